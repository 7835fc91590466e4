"""The tasks that are evaluated."""

from collections.abc import Mapping

from optpipe.artifacts.lookup import format_model_argument
from optpipe.core.card import ModelCard, Task
from optpipe.errors import BadInputError
from optpipe.evaluate.tasks.classification import Classification
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.embedding import Embedding
from optpipe.evaluate.tasks.question_answering import QuestionAnswering
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.evaluate.tasks.token_classification import TokenClassification

TASKS: Mapping[Task, TaskContract] = {
    Task.CLASSIFICATION: Classification(),
    Task.TEXT_CLASSIFICATION: Classification(),
    Task.DETECTION: Detection(),
    Task.EMBEDDING: Embedding(),
    Task.QUESTION_ANSWERING: QuestionAnswering(),
    Task.SEGMENTATION: Segmentation(),
    Task.TOKEN_CLASSIFICATION: TokenClassification(),
}


def find_task(card: ModelCard) -> TaskContract:
    """The task of a model. Raises BadInputError where optpipe does not evaluate it."""
    if card.task in TASKS:
        return TASKS[card.task]
    way = "\nset its task and labels in a model card (see models/README.md)" if card.task is Task.OTHER else ""
    raise BadInputError(
        f"{card.name} cannot be evaluated (task: {card.task}; evaluated are {', '.join(TASKS)});"
        f" `optpipe build {format_model_argument(card.name, card.source)}` verifies its tensors{way}"
    )
