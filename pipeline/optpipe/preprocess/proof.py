"""The figures of a parity proof from its rows, one per image, when it is made and when it is verified.

`images.parquet`: `image`, `mean_levels`, `max_levels` (pixels), the sums of `stats.paired.compute_row_errors` (outputs), and
for a classifier `reference_class`, `dali_class` and, for known labels, `class`. A detector's or segmenter's rows, decoded and
scored as in `optpipe evaluate`, have `reference_prediction`, `dali_prediction` and, with annotations, `truth`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import OutputError
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.parquet import read_parquet
from optpipe.core.records import Recomputed, record_from_files
from optpipe.core.tables import require_columns
from optpipe.core.transform import Transform
from optpipe.core.verdict import RANDOM_WEIGHTS, Blocker, Observation, Verdict
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.bounds import measure_answers, require_bounded
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.evaluate.tasks.detection_heads import lacks_image_axis
from optpipe.models.artifacts.judged_build import JudgedBuild
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.sample_set import SetFile
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.throughput import ThroughputTuning
from optpipe.stats.paired import (
    FEWEST_FOR_SNR,
    Share,
    compute_row_errors,
    compute_share_interval,
    compute_snr_interval,
    count_samples_to_decide,
    find_best_classes,
    pool_errors,
)
from optpipe.stats.row_sums import find_broken_sums
from optpipe.workspace.entry import Run
from optpipe.workspace.file_names import PREPROCESSING, ROWS
from optpipe.workspace.runs import newest_runs


@dataclass(frozen=True, slots=True)
class StepDifference:
    """Absolute differences in 8-bit levels after a step, including all earlier steps, over images."""

    step: str
    mean_levels: float
    """The mean of the images' means: every image has the same weight, whatever its size."""
    max_levels: float
    off_share: float
    """Share of levels that differ by more than half a level."""
    images: int


@dataclass(frozen=True, slots=True)
class RefusedImage:
    image: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorstImage:
    image: str
    mean_levels: float
    max_levels: float
    file: str
    """The image of reference, result and difference side by side, in the run's folder."""
    difference_times: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Share of equal top-1 predictions of both pipelines, or the mean over images of a task's parity of predictions; from 0 to 1."""

    images: int
    share: float
    ci: tuple[float, float]
    """95%; exact for top-1 predictions."""
    equal: int | None = None
    """Number of equal top-1 predictions."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    reference: float
    dali: float


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The first score of a detector or segmenter (AP, mIoU) with both pipelines, as fractions."""

    name: str
    reference: float
    dali: float
    drop: float
    drop_ci: tuple[float, float]
    """95%, over images."""


@dataclass(frozen=True, slots=True)
class Proof:
    verdict: Verdict
    reason: str
    remedy: str | None
    output: OutputError
    top1_agreement: Agreement | None
    accuracy: Accuracy | None
    task_score: TaskScore | None = None
    prediction_agreement: Agreement | None = None


@dataclass(frozen=True, slots=True)
class ParityRecord:
    proof: Proof
    images: int
    steps: tuple[StepDifference, ...]
    far: int
    """Images that differ visibly."""
    refused: tuple[RefusedImage, ...]
    worst: tuple[WorstImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    id: str
    path: str
    sha256: str
    plan: DaliPlan
    steps: tuple[Mapping[str, Any], ...]
    """As `Transform.to_dict` writes them."""

    @property
    def transform(self) -> Transform:
        return Transform.from_dict({"steps": self.steps})


@dataclass(frozen=True, slots=True)
class ImagesRecord:
    folder: str
    count: int
    unreadable: tuple[RefusedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class PreprocessRecord:
    model: str
    classifies: bool
    trained: bool
    """Agreement of random weights proves little."""
    pipeline: PipelineRecord
    images: ImagesRecord
    parity: ParityRecord
    throughput: ThroughputTuning | None
    verdict: Verdict
    """Verdict of the parity proof; speed is reported, not judged."""
    run_dir: str
    warnings: tuple[str, ...] = ()
    task: str | None = None
    """Task of the model; None in records of earlier versions."""
    model_sha256: str | None = None
    """`hash_model` of the exported model of the proof; None in records of earlier versions."""


@dataclass(frozen=True, slots=True)
class AgainstRecord:
    """A user's training transform (`FILE.py:NAME`), the argument that it is given, and the first step that differs."""

    model: str
    transform: str
    given: str
    images: ImagesRecord
    verdict: Verdict
    reason: str
    step: str | None
    tolerance_levels: float
    differences: tuple[StepDifference, ...]
    """From the user's results: of the card, DALI, and, on the images that were tried, the card with the changes in `reason`."""
    worst: WorstImage
    warnings: tuple[str, ...] = ()


REQUIRED_AGREEMENT = 0.995
"""Share of equal top-1 predictions that a replacement of preprocessing must keep."""
MAXIMUM_SCORE_CHANGE = 0.005
"""Limit of a score's change in either direction: the same as of accuracy at REQUIRED_AGREEMENT."""
FEWEST_IMAGES = 100
"""Fewer images prove no agreement."""
SNR_FLOOR_DB = 50.0
"""Error of the outputs if predictions prove nothing: 0.3% of their norm.

ResNet-50 with random weights: 90 dB with exact arithmetic, 67 dB with DALI's resize, 30 dB without antialiasing.
"""


class Judgment(NamedTuple):
    verdict: Verdict
    reason: str
    remedy: str | None = None


INSPECT = "inspect the worst images; more images will not help"


def compute_agreement(reference: np.ndarray, got: np.ndarray) -> Agreement | None:
    """Top-1 agreement of two `(images,)` arrays of classes; None if the reference has one class for every image."""
    if np.unique(reference).size < 2:
        return None
    return agreement_from_counts(int(np.count_nonzero(reference == got)), len(reference))


def agreement_from_counts(equal: int, images: int) -> Agreement:
    return Agreement(images, equal / images, compute_share_interval(equal, images), equal)


def judge_parity(
    agreement: Agreement | None,
    snr_db: float | None,
    *,
    finite: bool,
    trained: bool,
    classifies: bool,
    refused: int,
    blind: bool = False,
    score: TaskScore | None = None,
    predicted: Agreement | None = None,
) -> Judgment:
    """The verdict on a derived pipeline; `snr_db` is None for bit-identical outputs.

    `classifies` is true of every model whose predictions are compared; `score` and `predicted` are a detector's or segmenter's.
    A `blind` model has bit-identical outputs for different images, for example with a last layer of zeros.
    """
    if refused:
        reason = f"DALI cannot decode {refused} image(s) that the model's own loader can read"
        return Judgment(Verdict.FAIL, reason, "convert or remove them")
    if not finite:
        return Judgment(Verdict.FAIL, "the model's outputs contain NaN or Inf")
    snr = "bit-identical" if snr_db is None else f"SNR {snr_db:.1f} dB"
    if trained and agreement is not None:
        return _judge_by_agreement(agreement)
    if trained and predicted is not None:
        return _judge_predictions(score, predicted)
    if snr_db is not None and snr_db < SNR_FLOOR_DB:
        return Judgment(
            Verdict.FAIL, f"outputs differ: {snr}, below the minimum of {SNR_FLOOR_DB:.0f} dB"
        )
    if blind:
        reason = "the model's outputs are the same for every image, so agreement proves nothing"
        return Judgment(
            Verdict.INCONCLUSIVE, reason, "use trained weights (" + Argument("weights") + ")"
        )
    judged = f"so judged by output error: {snr}, minimum {SNR_FLOOR_DB:.0f} dB"
    if not classifies:
        return Judgment(Verdict.PASS, f"not a classifier, {judged}")
    if trained:
        reason = f"the model predicts the same class for every image ({snr}), so agreement proves nothing"
        return Judgment(
            Verdict.INCONCLUSIVE,
            reason,
            "use images of several classes (" + Argument("images") + ")",
        )
    return Judgment(Verdict.PASS, f"weights are random, {judged}")


MORE_IMAGES = "(" + Argument("images") + ", " + Argument("limit") + ")"


def _judge_by_agreement(agreement: Agreement) -> Judgment:
    (low, high), equal = agreement.ci, agreement.equal or 0
    agreed = f"{100 * agreement.share:.4g}% [{100 * low:.4g}, {100 * high:.4g}]"
    share = f"{equal} of {agreement.images} top-1 predictions agree, {agreed}"
    if low >= REQUIRED_AGREEMENT:
        return Judgment(Verdict.PASS, share)
    if high < REQUIRED_AGREEMENT:
        return Judgment(Verdict.FAIL, f"{share}; {REQUIRED_AGREEMENT:.1%} is required")
    needed = count_samples_to_decide(Share(equal, agreement.images), REQUIRED_AGREEMENT)
    remedy = INSPECT if needed is None else f"use at least {needed} images " + MORE_IMAGES
    return Judgment(
        Verdict.INCONCLUSIVE, f"{share}; too few images to prove {REQUIRED_AGREEMENT:.1%}", remedy
    )


def _judge_predictions(score: TaskScore | None, predicted: Agreement) -> Judgment:
    """FAIL if the whole interval of the agreement or of the score's drop is outside its limit; PASS if it is inside.

    The score's interval decides on PASS with annotations, that of the agreement without.
    """
    (low, high), required = predicted.ci, f"{REQUIRED_AGREEMENT:.1%}"
    agreed = (
        f"predictions agree by {100 * predicted.share:.4g}% [{100 * low:.4g}, {100 * high:.4g}]"
    )
    if predicted.images < FEWEST_IMAGES:
        reason = f"{agreed}; {predicted.images} images are too few to prove it"
        return Judgment(
            Verdict.INCONCLUSIVE, reason, f"use at least {FEWEST_IMAGES} images " + MORE_IMAGES
        )
    if high < REQUIRED_AGREEMENT:
        return Judgment(Verdict.FAIL, f"{agreed}; {required} is required")
    passed, said, unproven = (
        low >= REQUIRED_AGREEMENT,
        agreed,
        f"too few images to prove {required}",
    )
    room, half = predicted.share - REQUIRED_AGREEMENT, predicted.share - low
    if score is not None:
        low, high = score.drop_ci
        limit = f"{100 * MAXIMUM_SCORE_CHANGE:g} points"
        said = (
            f"{score.name} drop {100 * score.drop:.2f} [{100 * low:.2f}, {100 * high:.2f}] points"
        )
        if max(low, -high) > MAXIMUM_SCORE_CHANGE:
            return Judgment(Verdict.FAIL, f"{said}; a change of at most {limit} is allowed")
        passed, unproven = (
            max(-low, high) <= MAXIMUM_SCORE_CHANGE,
            f"too few images to prove a change within {limit}",
        )
        room, half = (
            MAXIMUM_SCORE_CHANGE - abs(score.drop),
            max(high - score.drop, score.drop - low),
        )
    if passed:
        return Judgment(Verdict.PASS, f"{said}, {predicted.images:,} images")
    remedy = INSPECT
    if room > 0:  # an interval narrows with the root of the number
        needed = ceil(predicted.images * (half / room) ** 2)
        remedy = f"use about {needed:,} images like these {predicted.images:,} " + MORE_IMAGES
    return Judgment(Verdict.INCONCLUSIVE, f"{said}; {unproven}", remedy)


_TASKS = (Task.DETECTION, Task.SEGMENTATION)
_COLUMNS = ("reference_prediction", "dali_prediction")
_CLASSES = ("reference_class", "dali_class", "class")


@dataclass(frozen=True)
class PredictionDecoder:
    task: TaskContract
    card: ModelCard
    samples: ImageSet
    truths: Mapping[str, Any]
    """By `samples.files[].path`; empty without annotations."""

    def decode(self, outputs: Mapping[str, np.ndarray], names: Sequence[str]) -> list[Any]:
        return list(
            self.task.decode(
                outputs, [SetFile(name, "") for name in names], self.samples, self.card
            )
        )

    def add_columns(self, rows: pl.DataFrame, reference: list[Any], got: list[Any]) -> pl.DataFrame:
        columns = dict(zip(_COLUMNS, (reference, got), strict=True))
        if self.truths:
            columns["truth"] = [self.truths[name] for name in rows["image"]]
        return rows.hstack(pl.DataFrame(columns))


def open_prediction_decoder(
    card: ModelCard, samples: ImageSet, listener: Listener
) -> PredictionDecoder | None:
    """The decoder of a detector or segmenter; None for other models, and, with a warning, for outputs that do not fit the task.

    Raises BadInputError for annotations that do not fit the images or the model.
    """
    task = find_stored_task(card.task)
    if task is None:
        return None
    try:
        task.require_model(card)
        lacking = any(output.batch != 0 for output in card.outputs) and not lacks_image_axis(card)
        problem = "an output has no batch dimension" if lacking else ""
    except BadInputError as error:
        problem = error.message
    if problem:
        listener.warn("predictions are not compared, only outputs: " + problem)
        return None
    task.require_capacity(samples, card, 2)
    truths = task.read_truths(samples, card, task.count_classes(card))
    if truths is None:
        listener.warn(f"{task.score} not computed: {samples.name} has no annotations")
    named = (
        {}
        if truths is None
        else dict(zip((file.path for file in samples.files), truths, strict=True))
    )
    return PredictionDecoder(task, card, samples, named)


def find_stored_task(name: str | None) -> TaskContract | None:
    return TASKS[Task(name)] if name in _TASKS else None


def compare_predictions(
    rows: pl.DataFrame, task: TaskContract | None
) -> tuple[TaskScore | None, Agreement | None]:
    """Score and agreement of the predictions in `rows`; None without predictions, or if the reference's prove nothing.

    They prove nothing if they are the same for every image, or score 0.
    """
    if task is None or not set(_COLUMNS) <= set(rows.columns):
        return None, None
    reference, got = (rows[name].to_list() for name in _COLUMNS)
    shown = task.take_as_truths(reference)
    if all(prediction == shown[0] for prediction in shown):
        return None, None
    same = task.compute_parity(reference, got)
    agreement = None if same is None else Agreement(rows.height, same.share, same.ci)
    if "truth" not in rows.columns:
        return None, agreement
    first = task.score_predictions(rows["truth"].to_list(), reference, got).scores[0]
    was = first.value + first.drop
    if not np.isfinite(was):
        return None, agreement
    if was == 0:
        return None, None
    return TaskScore(first.name, was, first.value, first.drop, first.drop_ci), agreement


def observe_prediction_agreement(
    rows: pl.DataFrame, task: TaskContract, confidence: float, about: str
) -> Observation:
    """The agreement of the predictions in `rows` with its interval at `confidence`; blocked if there are too few images."""
    reference, got = (rows[name].to_list() for name in _COLUMNS)
    agreement = task.observe(None, reference, got, confidence, about)["agreement"]
    if rows.height >= FEWEST_IMAGES:
        return agreement
    few = Blocker(
        f"{rows.height} images are too few to prove agreement",
        f"verify parity on {FEWEST_IMAGES} or more",
    )
    return replace(agreement, blockers=(few,))


def rows_from_outputs(reference: np.ndarray, got: np.ndarray, *, classifies: bool) -> pl.DataFrame:
    """Columns for the outputs of one batch, `(images, …)` each; the classes are null if the model is not a classifier."""
    reference, got = (outputs.astype(np.float32) for outputs in (reference, got))
    columns: dict[str, Any] = dict(compute_row_errors(reference, got))
    for name, outputs in (("reference_class", reference), ("dali_class", got)):
        columns[name] = find_best_classes(outputs) if classifies else [None] * len(outputs)
    return pl.DataFrame(columns).cast({"reference_class": pl.Int64, "dali_class": pl.Int64})


def proof_from_rows(
    rows: pl.DataFrame,
    *,
    trained: bool,
    classifies: bool,
    refused: int,
    task: TaskContract | None = None,
) -> Proof:
    """`task` is that of a detector or segmenter."""
    sums = _list_sums(rows)
    error = pool_errors("output", row_errors_from_table(rows))
    top1 = accuracy = None
    if classifies:
        top1 = compute_agreement(sums["reference_class"], sums["dali_class"])
        if "class" in rows.columns and rows["class"].null_count() == 0:
            truth = sums["class"]
            shares = (
                float((sums[name] == truth).mean()) for name in ("reference_class", "dali_class")
            )
            accuracy = Accuracy(*shares)
    score, predicted = compare_predictions(rows, task)
    judgment = judge_parity(
        top1,
        error.snr_db,
        finite=error.finite,
        trained=trained,
        classifies=classifies or "dali_prediction" in rows.columns,
        refused=refused,
        blind=error.snr_db is None
        and rows["reference_square"].n_unique() < 2
        and sums["max_levels"].max() > 0,
        score=score,
        predicted=predicted,
    )
    return Proof(*judgment, error, top1, accuracy, score, predicted)


def row_errors_from_table(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    """The sums of each image for `stats.paired`."""
    return {name: values for name, values in _list_sums(rows).items() if name not in _CLASSES}


def _list_sums(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    return {
        name: rows[name].to_numpy()
        for name in rows.columns
        if rows[name].dtype.is_numeric() or name == "finite"
    }


def read_rows(files: Files) -> pl.DataFrame:
    """Raises BadInputError if the run has no rows."""
    rows = require_columns(read_parquet(files, ROWS), "images", files.folder / ROWS)
    if "difference_square" not in rows.columns:
        raise BadInputError(
            f"{files.folder / ROWS} has no per-image output errors; run "
            + Call("preprocess")
            + " again"
        )
    require_bounded(measure_answers(rows), files.folder / ROWS)
    return rows


def observe_preprocessing(
    runs: Sequence[Run], build: JudgedBuild, confidence: float
) -> Mapping[str, Observation]:
    """`agreement` (fraction) and `snr` (dB) of the newest parity proof for the build's model, from its rows."""
    for run in newest_runs(runs, "preprocess"):
        record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        if is_proof_for(record, build):
            return _observe_parity(run, record, confidence)
    return {}


def is_proof_for(record: PreprocessRecord, build: JudgedBuild) -> bool:
    """Whether the proof is of the build's model; records of earlier versions only have its name."""
    return record.model == build.model and record.model_sha256 in (None, build.model_sha256)


def is_proof_run(run: Run, build: JudgedBuild) -> bool:
    if run.kind != "preprocess":
        return False
    return is_proof_for(record_from_files(run.files, PREPROCESSING, PreprocessRecord), build)


def identify_images(run: Run) -> tuple[str, ...]:
    """The images that a proof drew; the same images again are no new draw."""
    record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
    return record.images.folder, *read_rows(run.files)["image"]


def _observe_parity(
    run: Run, record: PreprocessRecord, confidence: float
) -> dict[str, Observation]:
    rows = read_rows(run.files)
    proof, refused = recompute_proof(rows, record), len(record.parity.refused)
    remedy = "convert or remove them, then verify parity again"
    blockers = (Blocker(f"{refused} images could not be decoded", remedy),) if refused else ()
    weights = () if record.trained else (RANDOM_WEIGHTS,)
    about = f"{rows.height:,} images"
    observations = {}
    if proof.top1_agreement is not None:
        share = Share(proof.top1_agreement.equal or 0, proof.top1_agreement.images)
        figure = share.value, *share.interval(confidence)
        observations["agreement"] = Observation(
            *figure, (*blockers, *weights), about, run.name, share
        )
    elif (
        proof.prediction_agreement is not None
        and (task := find_stored_task(record.task)) is not None
    ):
        seen = observe_prediction_agreement(rows, task, confidence, about)
        observations["agreement"] = replace(
            seen, blockers=(*blockers, *weights, *seen.blockers), source=run.name
        )
    if (snr := proof.output.snr_db) is not None:
        extent = compute_snr_interval(row_errors_from_table(rows), confidence)
        low, high = extent or (None, None)
        reason = f"fewer than {FEWEST_FOR_SNR} images share the error: how far its SNR scatters is not known"
        more = Call("preprocess", record.model, images="DIR")
        few = Blocker(reason, "verify parity on more images: " + more)
        observations["snr"] = Observation(
            snr, low, high, blockers if extent else (*blockers, few), about, run.name
        )
    return observations


def recompute_preprocessing(run: Run) -> Iterator[Recomputed]:
    """The proof of a preprocess run that has the rows of its images."""
    if run.files.has(ROWS):
        stored = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
        rows = read_rows(run.files)
        proof = recompute_proof(rows, stored)
        parity = replace(stored.parity, proof=proof, images=rows.height)
        yield PREPROCESSING, stored, replace(stored, parity=parity, verdict=proof.verdict)


def find_impossible_images(run: Run) -> Iterator[str]:
    """The rules that the rows of a preprocess run break, one line each; none without rows."""
    if not run.files.has(ROWS):
        return
    rows = read_rows(run.files)
    yield from (f"{ROWS}: {wrong}" for wrong in find_broken_sums(rows))
    if "image" not in rows.columns or rows["image"].has_nulls():
        yield f"{ROWS}: an image has no name"
    elif rows["image"].is_duplicated().any():
        yield f"{ROWS}: an image occurs twice"


def recompute_proof(rows: pl.DataFrame, record: PreprocessRecord) -> Proof:
    return proof_from_rows(
        rows,
        trained=record.trained,
        classifies=record.classifies,
        refused=len(record.parity.refused),
        task=find_stored_task(record.task),
    )
