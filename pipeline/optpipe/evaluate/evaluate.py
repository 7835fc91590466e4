"""Task accuracy of the source model and of every artifact that can run here, on the same labelled images or texts.

What is judged is the difference on paired predictions, with its interval: two accuracies side by side prove little.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.artifacts.lookup import format_model_argument
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.entries import ArtifactInfo, CalibrationInfo, GraphInfo, ModelInfo
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError, StageError
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.scores import compute_accuracy, compute_agreement
from optpipe.export.exported import run_torch_model
from optpipe.export.model import Model
from optpipe.inputs.sample_set import SampleSet
from optpipe.inputs.task_data import fit_batch_size, iterate_input_batches
from optpipe.stats.agreement import compute_output_error
from optpipe.workspace.file_names import CALIBRATION_SET, CARD, ONNX
from optpipe.workspace.runs import write_parquet
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVALUATION_BATCH = 32
TOP_K = 5


@dataclass(frozen=True, eq=False)
class Predictions:
    """One model's answers: the best classes in falling order, (samples, at most TOP), and the first output's scores."""

    best: "NDArray[np.int64]"
    scores: "NDArray[np.float32]"

    @property
    def top1(self) -> "NDArray[np.int64]":
        """The largest score's class per sample."""
        return self.best[:, 0]


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


def predictions_from_scores(scores: "NDArray[Any]") -> Predictions:
    """From (samples, classes) scores. Of equal scores the lower class comes first, as argmax has it."""
    values = np.asarray(scores, np.float32)
    best = np.argsort(-values, axis=1, kind="stable")[:, :TOP_K]
    return Predictions(best.astype(np.int64), values)


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
    store: Store,
    listener: Listener,
) -> list[EvaluatedArtifact]:
    """Runs the source model, then each artifact, over `samples`. Raises BadInputError where the model is no classifier."""
    card = card_from_file(exported.file(CARD))
    require_classifier(card)
    rows = [EvaluatedArtifact(None, _evaluate_source(model, exported, card, samples, listener))]
    for entry in artifacts:
        backend = BACKENDS[entry.info.backend]
        if (reason := backend.find_run_blocker(entry.info)) is not None:
            rows.append(EvaluatedArtifact(entry, None, reason))
            continue
        name = f"evaluate {backend.name} {entry.info.precision}"
        try:
            with backend.load(store.verify_entry(entry).path, entry.info, {}) as session:
                scores = _compute_scores(exported, card, samples, session.run, name, listener)
        except StageError as error:  # one broken artifact must not hide what the others do
            rows.append(EvaluatedArtifact(entry, None, str(error), failed=True))
            continue
        rows.append(
            EvaluatedArtifact(
                entry, predictions_from_scores(scores), calibrated_on=_count_calibration_samples(entry, samples, store)
            )
        )
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


def require_classifier(card: ModelCard) -> None:
    """Raises BadInputError where answers cannot be right or wrong."""
    if card.task not in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION):
        way = "\nset its task and labels in a model card (see models/README.md)" if card.task is Task.OTHER else ""
        raise BadInputError(
            f"{card.name} is not a classifier (task: {card.task}); `optpipe build {format_model_argument(card)}` verifies its tensors{way}"
        )


def _evaluate_source(
    model: Model, exported: Entry[ModelInfo], card: ModelCard, samples: SampleSet, listener: Listener
) -> Predictions:
    module = model.load().module
    if module is None:
        from optpipe.backends.onnxruntime_session import OnnxRuntimeSession

        with OnnxRuntimeSession(exported.file(ONNX), "cpu", {}) as session:
            return predictions_from_scores(
                _compute_scores(exported, card, samples, session.run, "evaluate source", listener)
            )
    run = partial(run_torch_model, module, card)
    return predictions_from_scores(_compute_scores(exported, card, samples, run, "evaluate source", listener))


def _compute_scores(
    exported: Entry[ModelInfo],
    card: ModelCard,
    samples: SampleSet,
    run: Callable[[Mapping[str, "NDArray[Any]"]], Mapping[str, "NDArray[Any]"]],
    name: str,
    listener: Listener,
) -> "NDArray[Any]":
    parts = []
    with listener.step(name, total=len(samples.files)) as step:
        for batch, count in iterate_input_batches(exported, card, samples, fit_batch_size(card, EVALUATION_BATCH)):
            found = run(batch)[card.outputs[0].name][:count]
            parts.append(found.reshape(len(found), -1) if found.ndim != 2 else found)
            step.advance(len(found))
    return np.concatenate(parts)


def score_artifacts(
    rows: Sequence[EvaluatedArtifact], labels: "NDArray[np.int64] | None", trained: bool, budget: float | None
) -> Iterator[EvaluatedModel]:
    """The figures of every row; `labels` are class indices (samples,). Random weights have no accuracy: it would prove nothing."""
    source = rows[0].predictions
    assert source is not None
    for row in rows:
        info, found = row.entry.info if row.entry else None, row.predictions
        scored = EvaluatedModel(
            backend=info.backend if info else "source",
            precision=info.precision if info else "source",
            device=info.device if info else "cpu",
            samples=len(source.best),
            artifact=row.entry.id if row.entry else None,
            why_not=row.why_not,
            failed=row.failed,
            calibrated_on=row.calibrated_on,
            snr_db=None if found is None else compute_output_error("", source.scores, found.scores).snr_db,
            agreement=None if found is None else compute_agreement(source.best, found.best),
            accuracy=None
            if found is None or labels is None or not trained
            else compute_accuracy(source.best, found.best, labels, top5=found.scores.shape[1] > TOP_K),
        )
        yield replace(scored, verdict=_judge_drop(scored, budget))


def _judge_drop(row: EvaluatedModel, budget: float | None) -> Verdict | None:
    """PASS where the whole interval of the drop is inside the budget, FAIL where all of it is outside.

    Samples that the ranges were computed from flatter: for a PASS it has to hold even if all of those had been lost.
    """
    if budget is None or row.artifact is None:
        return None
    if row.accuracy is None:
        return Verdict.INCONCLUSIVE
    low, high = row.accuracy.drop_ci
    if high + row.calibrated_on / row.samples <= budget:
        return Verdict.PASS
    return Verdict.FAIL if low > budget else Verdict.INCONCLUSIVE


def write_predictions(
    path: Path, samples: SampleSet, labels: "NDArray[np.int64] | None", rows: Sequence[EvaluatedArtifact]
) -> None:
    """Parquet: one row per sample with its class and every model's answers, so that anyone can recompute the figures."""
    import polars as pl

    columns: dict[str, Any] = {
        "path": [each.path for each in samples.files],
        "sha256": [each.sha256 for each in samples.files],
        "label": [each.label for each in samples.files],
        "class": [None] * len(samples.files) if labels is None else labels,
    }
    for row in rows:
        if row.predictions is not None:
            name = row.entry.id if row.entry else "source"
            columns[f"{name}:best"] = row.predictions.best.tolist()
    write_parquet(path, pl.DataFrame(columns))
