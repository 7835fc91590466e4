"""The figures of a parity proof from its rows, one per image: when it is made, and again whenever it is verified.

`images.parquet`: `image`, `mean_levels`, `max_levels` (pixels), the sums of `stats.agreement.compute_row_errors` (outputs), and
for a classifier `reference_class`, `dali_class` and, where labels are known, `class`. For a detector or segmenter, decoded and
scored as `optpipe evaluate` does: `reference_prediction`, `dali_prediction` and, with annotations, `truth`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError, first_line
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.verdict import Blocker, Observation
from optpipe.evaluate.tasks.contract import BootstrapTask
from optpipe.evaluate.tasks.heads import lacks_image_axis
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import ImageFolder, is_annotated
from optpipe.models.inputs.sample_set import SetFile
from optpipe.preprocess.parity.judge import FEWEST_IMAGES, compute_agreement, judge_parity
from optpipe.preprocess.parity.records import Accuracy, PredictionAgreement, Proof, TaskScore
from optpipe.stats.agreement import compute_row_errors, find_best_classes, pool_errors
from optpipe.workspace.file_names import ROWS

if TYPE_CHECKING:
    import numpy as np
    import polars as pl


_TASKS = (Task.DETECTION, Task.SEGMENTATION)
_COLUMNS = ("reference_prediction", "dali_prediction")
_CLASSES = ("reference_class", "dali_class", "class")


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


def rows_from_outputs(reference: "np.ndarray", got: "np.ndarray", *, classifies: bool) -> "pl.DataFrame":
    """The rows' columns about the outputs of one batch, `(images, …)` each; classes are null for what is no classifier."""
    import numpy as np
    import polars as pl

    reference, got = (each.astype(np.float32) for each in (reference, got))
    columns: dict[str, Any] = dict(compute_row_errors(reference, got))
    for name, outputs in (("reference_class", reference), ("dali_class", got)):
        columns[name] = find_best_classes(outputs) if classifies else [None] * len(outputs)
    return pl.DataFrame(columns).cast({"reference_class": pl.Int64, "dali_class": pl.Int64})


def proof_from_rows(
    rows: "pl.DataFrame", *, trained: bool, classifies: bool, refused: int, task: BootstrapTask | None = None
) -> Proof:
    """The proof that `rows` amount to; `task` is that of a detector or segmenter."""
    sums = _list_sums(rows)
    error = pool_errors("output", row_errors_from_table(rows))
    top1 = accuracy = None
    if classifies:
        top1 = compute_agreement(sums["reference_class"], sums["dali_class"])
        if "class" in rows.columns and rows["class"].null_count() == 0:
            truth = sums["class"]
            shares = (float((sums[name] == truth).mean()) for name in ("reference_class", "dali_class"))
            accuracy = Accuracy(*shares)
    score, predicted = compare_predictions(rows, task)
    judgment = judge_parity(
        top1,
        error.snr_db,
        finite=error.finite,
        trained=trained,
        classifies=classifies or "dali_prediction" in rows.columns,
        refused=refused,
        blind=error.snr_db is None and rows["reference_square"].n_unique() < 2 and sums["max_levels"].max() > 0,
        score=score,
        predicted=predicted,
    )
    return Proof(judgment.verdict, judgment.reason, judgment.remedy, error, top1, accuracy, score, predicted)


def row_errors_from_table(rows: "pl.DataFrame") -> "dict[str, np.ndarray]":
    """The sums of each image, as `stats.agreement` takes them."""
    return {name: values for name, values in _list_sums(rows).items() if name not in _CLASSES}


def _list_sums(rows: "pl.DataFrame") -> "dict[str, np.ndarray]":
    return {name: rows[name].to_numpy() for name in rows.columns if rows[name].dtype.is_numeric() or name == "finite"}


def read_rows(files: Files) -> "pl.DataFrame":
    """The rows of a proof. Raises BadInputError where they are not there."""
    import polars as pl

    try:
        rows = pl.read_parquet(files.read(ROWS))
    except pl.exceptions.PolarsError as error:
        raise BadInputError(f"cannot read the parity results in {files.folder / ROWS}: {first_line(error)}") from error
    if "difference_square" not in rows.columns:
        raise BadInputError(f"{files.folder / ROWS} has no per-image output errors; run optpipe preprocess again")
    return rows
