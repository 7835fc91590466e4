"""What detectors and segmenters predict with both pipelines: decoded, stored and scored as `optpipe evaluate` does.

Columns of `images.parquet`: `reference_prediction`, `dali_prediction` and, with annotations, `truth`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.observation import Blocker, Observation
from optpipe.evaluate.tasks.contract import BootstrapTask
from optpipe.evaluate.tasks.heads import lacks_image_axis
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import ImageFolder, is_annotated
from optpipe.models.inputs.sample_set import SetFile
from optpipe.preprocess.parity.judge import FEWEST_IMAGES
from optpipe.preprocess.parity.records import PredictionAgreement, TaskScore

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

_TASKS = (Task.DETECTION, Task.SEGMENTATION)
_COLUMNS = ("reference_prediction", "dali_prediction")


@dataclass(frozen=True)
class PredictionDecoder:
    """How outputs become predictions of a task, and what is true of the images."""

    task: BootstrapTask
    card: ModelCard
    samples: ImageSet
    truths: Mapping[Path, Any]
    """Empty without annotations."""

    def decode(self, outputs: "Mapping[str, np.ndarray]", paths: Sequence[Path]) -> list[Any]:
        """The predictions for some images from their outputs, (images, ...) each."""
        return list(self.task.decode(outputs, _name_files(paths, self.samples.root), self.samples, self.card))

    def add_columns(
        self, rows: "pl.DataFrame", paths: Sequence[Path], reference: list[Any], got: list[Any]
    ) -> "pl.DataFrame":
        """The rows of the images `paths` with predictions and truths."""
        import polars as pl

        columns = dict(zip(_COLUMNS, (reference, got), strict=True))
        if self.truths:
            columns["truth"] = [self.truths[path] for path in paths]
        return rows.hstack(pl.DataFrame(columns))


def open_prediction_decoder(card: ModelCard, images: ImageFolder, listener: Listener) -> PredictionDecoder | None:
    """The decoder of a detector or segmenter; None for other models, and, with a warning, for outputs that do not fit the task.

    Raises BadInputError for annotations that do not fit the images or the model.
    """
    task = find_stored_task(card.task)
    if task is None:
        return None
    try:
        task.require_model(card)
        lacking = any(each.batch != 0 for each in card.outputs) and not lacks_image_axis(card)
        problem = "an output has no batch dimension" if lacking else ""
    except BadInputError as error:
        problem = str(error)
    if problem:
        listener.warn(f"predictions are not compared, only outputs: {problem}")
        return None
    root = next((each for each in (images.folder, *images.folder.parents) if is_annotated(each)), images.folder)
    samples = ImageSet(root.name, root, 0, _name_files(images.paths, root))
    truths = task.read_truths(samples, card, task.count_classes(card))
    if truths is None:
        listener.warn(f"{task.score} not computed: {root} has no annotations")
    named = {} if truths is None else dict(zip(images.paths, truths, strict=True))
    return PredictionDecoder(task, card, samples, named)


def _name_files(paths: Sequence[Path], root: Path) -> tuple[SetFile, ...]:
    """The images as files of a set in `root`; their hashes are not asked for."""
    return tuple(SetFile(path.relative_to(root).as_posix(), "") for path in paths)


def find_stored_task(name: str | None) -> BootstrapTask | None:
    """The task that predictions are compared by; None for all but detection and segmentation."""
    task = TASKS[Task(name)] if name in _TASKS else None
    return task if isinstance(task, BootstrapTask) else None


def compare_predictions(
    rows: "pl.DataFrame", task: BootstrapTask | None
) -> tuple[TaskScore | None, PredictionAgreement | None]:
    """Score and agreement of the predictions in `rows`; None where there are none, or the reference's prove nothing.

    They prove nothing where they are the same for every image, or score 0.
    """
    import numpy as np

    if task is None or not set(_COLUMNS) <= set(rows.columns):
        return None, None
    reference, got = (rows[name].to_list() for name in _COLUMNS)
    shown = task.take_as_truths(reference)
    if all(each == shown[0] for each in shown):
        return None, None
    same = task.compute_parity(reference, got)
    agreement = None if same is None else PredictionAgreement(same.share, same.ci, rows.height)
    if "truth" not in rows.columns:
        return None, agreement
    first = task.score_predictions(rows["truth"].to_list(), reference, got, (), 0).scores[0]
    was = first.value + first.drop
    if not np.isfinite(was):
        return None, agreement
    if was == 0:
        return None, None
    return TaskScore(first.name, was, first.value, first.drop, first.drop_ci), agreement


def observe_prediction_agreement(
    rows: "pl.DataFrame", task: BootstrapTask, confidence: float, about: str
) -> Observation:
    """The agreement of the predictions in `rows` with its interval at `confidence`; blocked where the images are too few for one."""
    reference, got = (rows[name].to_list() for name in _COLUMNS)
    found = task.observe(None, reference, got, confidence, about)["agreement"]
    if rows.height >= FEWEST_IMAGES:
        return found
    few = Blocker(f"{rows.height} images are too few to prove agreement", f"verify parity on {FEWEST_IMAGES} or more")
    return replace(found, blockers=(few,))
