"""Task scores of the source model and of every artifact that can run here, on the same labeled samples.

What is judged is the difference on paired predictions, with its interval: two scores side by side prove little.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.backends.registry import BACKENDS
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import ArtifactInfo, CalibrationInfo, GraphInfo, ModelInfo
from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict
from optpipe.evaluate.result import Accuracy, EvaluatedModel, TaskScores
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.models.artifacts.engine import hash_engine
from optpipe.models.export.exported import run_torch_model
from optpipe.models.export.model import Model
from optpipe.models.inputs.rows import rows_from_outputs
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.models.inputs.task_data import fit_batch_size, iterate_input_batches
from optpipe.stats.agreement import compute_output_error
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CALIBRATION_SET, CARD, ONNX
from optpipe.workspace.files import write_parquet
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

Runner = Callable[[Mapping[str, "NDArray[Any]"]], Mapping[str, "NDArray[Any]"]]
EVALUATION_BATCH = 32
KEPT_VALUES = 1 << 26
"""Of the first output at most as many are kept for its SNR: those of the first samples."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What one model predicts for every sample, as its task decodes it, and the rows of its first output (samples, values)."""

    values: Values
    outputs: "NDArray[np.float32]"
    """Of the first samples only, where they are many; where sizes differ from batch to batch, all values in one row."""
    classes: int
    """Of the first output's last axis; 0 where there is none."""


@dataclass(frozen=True, eq=False)
class EvaluatedArtifact:
    """An artifact's predictions, or why it could not run; `entry` is None for the source model."""

    entry: Entry[ArtifactInfo] | None
    predictions: Predictions | None
    why_not: str | None = None
    failed: bool = False
    """Whether it should have run here and did not."""
    calibrated_on: int = 0
    """How many of the samples its INT8 ranges were computed from: accuracy on those flatters."""


def list_model_artifacts(model_id: str, store: Store) -> list[Entry[ArtifactInfo]]:
    """The stored artifacts of the exported model with that id, the newest of each backend, device, precision, options and graph."""
    found = {}
    for entry in store.list_entries(ArtifactInfo):
        if model_id in entry.manifest.parents:
            options = tuple(sorted(entry.info.options.items()))  # a layout that breaks outputs is an option
            found[entry.info.label, options, entry.manifest.parents] = entry
    return list(found.values())


def evaluate_artifacts(
    model: Model,
    exported: Entry[ModelInfo],
    artifacts: Sequence[Entry[ArtifactInfo]],
    samples: SampleSet,
    task: TaskContract,
    store: Store,
    listener: Listener,
) -> list[EvaluatedArtifact]:
    """Runs the source model, then each artifact, over `samples`."""
    card = card_from_file(exported.file(CARD))
    rows = [EvaluatedArtifact(None, _evaluate_source(model, exported, card, samples, task, listener))]
    for entry in artifacts:
        backend = BACKENDS[entry.info.backend]
        if (reason := backend.find_run_blocker(entry.info)) is not None:
            rows.append(EvaluatedArtifact(entry, None, reason))
            continue
        name = f"evaluate {backend.name} {entry.info.precision}"
        try:
            with backend.load(store.verify_entry(entry).path, entry.info, {}) as session:
                found = predict_samples(exported, card, samples, task, session.run, name, listener)
        except StageError as error:  # one broken artifact must not hide what the others do
            rows.append(EvaluatedArtifact(entry, None, str(error), failed=True))
            continue
        used = _count_calibration_samples(entry, samples, store)
        rows.append(EvaluatedArtifact(entry, found, calibrated_on=used))
    return rows


def _count_calibration_samples(artifact: Entry[ArtifactInfo], samples: SampleSet, store: Store) -> int:
    """How many of `samples` are, by content, in the calibration set of an INT8 artifact, as far as the store knows it."""
    graphs = (each for each in store.list_entries(GraphInfo) if each.id in artifact.manifest.parents)
    used = next((each.info.set.sha256 for each in graphs if each.info.set), None)
    drawn = [each for each in store.list_entries(CalibrationInfo) if each.info.set.sha256 == used]
    if not drawn:
        return 0
    known = {
        each["sha256"] for each in json.loads(drawn[-1].file(CALIBRATION_SET).read_text(encoding="utf-8"))["files"]
    }
    return sum(each.sha256 in known for each in samples.files)


def _evaluate_source(
    model: Model,
    exported: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    task: TaskContract,
    listener: Listener,
) -> Predictions:
    module, name = model.load().module, "evaluate source"
    if module is None:
        from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

        with OnnxRuntimeSession(exported.file(ONNX), "cpu", {}) as session:
            return predict_samples(exported, card, samples, task, session.run, name, listener)
    return predict_samples(exported, card, samples, task, partial(run_torch_model, module, card), name, listener)


def predict_samples(
    exported: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    task: TaskContract,
    run: Runner,
    name: str,
    listener: Listener,
) -> Predictions:
    """The predictions of `run`, which maps a batch of the model's inputs to its outputs."""
    values: list[Any] = []
    kept: list[NDArray[Any]] = []
    room, classes = KEPT_VALUES, 0
    with listener.step(name, total=len(samples.files)) as step:
        for batch, count in iterate_input_batches(exported, card, samples, fit_batch_size(card, EVALUATION_BATCH)):
            rows = rows_from_outputs(card.outputs, run(batch), count)
            if count < card.batch_range[0]:  # filled up; else all is kept: the first axis may count boxes of one image
                rows = {key: each[:count] for key, each in rows.items()}
            first = rows[card.outputs[0].name]
            classes = int(first.shape[-1]) if first.ndim > 1 else 0
            values += task.decode(rows, samples.files[len(values) : len(values) + count], samples, card)
            if room >= first.size:
                kept.append(np.asarray(first, np.float32).reshape(count, -1))
                room -= first.size
            step.advance(count)
    if len({each.shape[1] for each in kept}) > 1:
        kept = [np.concatenate([each.reshape(1, -1) for each in kept], axis=1)]
    outputs = np.concatenate(kept) if kept else np.zeros((0, 0), np.float32)
    return Predictions(values, outputs, classes)


def score_artifacts(
    rows: Sequence[EvaluatedArtifact],
    truths: Values | None,
    task: TaskContract,
    labels: Sequence[str],
    classes: int,
    budget: float | None,
    *,
    trained: bool,
) -> Iterator[EvaluatedModel]:
    """The figures of every row; `labels` name the classes. Random weights have no accuracy: it would prove nothing."""
    source = rows[0].predictions
    assert source is not None
    for row in rows:
        info, found = row.entry.info if row.entry else None, row.predictions
        score = None
        if found is not None and truths is not None and trained:
            score = task.score_predictions(truths, source.values, found.values, labels, classes)
        same_sizes = found is None or found.outputs.shape == source.outputs.shape
        scored = EvaluatedModel(
            backend=info.backend if info else "source",
            precision=info.precision if info else "source",
            device=info.device if info else "cpu",
            samples=len(source.values),
            artifact=row.entry.id if row.entry else None,
            sha256=hash_engine(row.entry) if row.entry else None,
            why_not=row.why_not,
            failed=row.failed,
            calibrated_on=row.calibrated_on,
            snr_db=compute_output_error("", source.outputs, found.outputs).snr_db if found and same_sizes else None,
            same_sizes=same_sizes,
            agreement=None if found is None else task.compute_parity(source.values, found.values),
            accuracy=score if isinstance(score, Accuracy) else None,
            scores=score if isinstance(score, TaskScores) else None,
        )
        yield replace(scored, verdict=_judge_drop(scored, budget, task))


def _judge_drop(row: EvaluatedModel, budget: float | None, task: TaskContract) -> Verdict | None:
    """PASS where the whole interval of the drop is inside the budget, FAIL where all of it is outside.

    For a PASS it has to hold with `TaskContract.bound_hidden_loss` too.
    """
    if budget is None or row.artifact is None:
        return None
    if row.drop_ci is None:
        return Verdict.INCONCLUSIVE
    low, high = row.drop_ci
    if high + task.bound_hidden_loss(row) <= budget:
        return Verdict.PASS
    return Verdict.FAIL if low > budget else Verdict.INCONCLUSIVE


def write_predictions(
    path: Path, samples: SampleSet, truths: Values | None, task: TaskContract, rows: Sequence[EvaluatedArtifact]
) -> None:
    """Parquet: one row per sample with its truth and every model's prediction, so that anyone can recompute the figures."""
    import polars as pl

    columns: dict[str, Any] = {
        "path": [each.path for each in samples.files],
        "sha256": [each.sha256 for each in samples.files],
        "label": [each.label for each in samples.files],
        task.truth_column: [None] * len(samples.files) if truths is None else truths,
    }
    for row in rows:
        if row.predictions is not None:
            name = row.entry.id if row.entry else "source"
            columns[f"{name}:{task.prediction_column}"] = row.predictions.values
    write_parquet(path, pl.DataFrame(columns))
