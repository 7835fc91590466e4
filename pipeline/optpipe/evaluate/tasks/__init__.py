"""Tasks: a class for each, and one entry of `TASKS`.

A task decodes outputs into predictions, scores them with intervals, compares two models' predictions, and reads its data.
Predictions and truths are plain values that Parquet can hold, so that `verify` can score them again.
"""

from collections.abc import Mapping

from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.tasks.answers import QuestionAnswering
from optpipe.evaluate.tasks.classification import Classification
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.evaluate.tasks.texts import Embedding, TokenClassification
from optpipe.evaluate.tasks.values import MultiLabel, Regression
from optpipe.models.artifacts.model_names import format_model_argument
from optpipe.models.export.exported import Model, read_card
from optpipe.models.export.onnx_export import read_outputs_early
from optpipe.models.inputs.task_data import OF_TEXTS
from optpipe.workspace.entry import Entry

TASKS: Mapping[Task, TaskContract] = {
    Task.CLASSIFICATION: Classification(),
    Task.TEXT_CLASSIFICATION: Classification(),
    Task.DETECTION: Detection(),
    Task.EMBEDDING: Embedding(),
    Task.SEGMENTATION: Segmentation(),
    Task.TOKEN_CLASSIFICATION: TokenClassification(),
    Task.QUESTION_ANSWERING: QuestionAnswering(),
    Task.MULTI_LABEL: MultiLabel(),
    Task.REGRESSION: Regression(),
}


def require_fitting_task(model: Model, stored: Entry[ModelInfo] | None) -> None:
    """Raises BadInputError, before any export, if the model's inputs or outputs do not fit its task."""
    if read_card(model, stored).task not in TASKS:
        return
    card = read_card(model, stored) if stored else read_outputs_early(model.load())
    if card is None:
        return
    if card.takes_images and card.task in OF_TEXTS and card.task is not Task.EMBEDDING:
        problem = f"{card.name}: {card.task} takes texts, but the model takes images"
        raise BadInputError(f"{problem}\nset another task in a model card (models/README.md)")
    TASKS[card.task].require_model(card)


def find_task(card: ModelCard) -> TaskContract:
    """Raises BadInputError for a task that optpipe does not evaluate."""
    if card.task in TASKS:
        return TASKS[card.task]
    problem = (
        f"{card.name} cannot be evaluated (task: {card.task}; evaluated are {', '.join(TASKS)})"
    )
    build = Call("build", format_model_argument(card.name, card.source))
    raise BadInputError(
        f"{problem}; `" + build + "` verifies its tensors",
        remedy="set its task and labels in a model card (models/README.md), or give your own: "
        + Argument("task", "FILE.py"),
    )
