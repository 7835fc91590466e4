"""Task accuracy of the source model and of every artifact that can run here, on the same labelled images or texts.

What is judged is the difference on paired predictions, with its interval: two accuracies side by side prove little.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.artifacts.lookup import format_model_argument
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.events import Listener
from optpipe.core.verdict import Verdict
from optpipe.errors import BadInputError, StageError
from optpipe.export.exported import run_torch_model
from optpipe.export.model import Model
from optpipe.inputs.sample_set import SampleSet
from optpipe.inputs.task_data import fit_batch_size, iterate_input_batches
from optpipe.stats.macro_f1 import compute_macro_f1, compute_macro_f1_difference
from optpipe.stats.paired import (
    Interval,
    compute_difference_interval,
    compute_mcnemar_p_value,
    compute_share_interval,
)
from optpipe.workspace.file_names import CALIBRATION_SET, CARD, ONNX
from optpipe.workspace.runs import write_parquet
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVALUATION_BATCH = 32
TOP_K = 5
MAX_MOVED_PAIRS = 10
"""How many pairs of classes between which answers moved are listed."""


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

    entry: Entry | None
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


def list_model_artifacts(model_id: str, store: Store) -> list[Entry]:
    """The stored artifacts of the exported model with that id, the newest of each backend, device, precision, options and graph."""
    found: dict[tuple[Any, ...], Entry] = {}
    for entry in store.list_entries():
        if entry.manifest.kind == "artifact" and model_id in entry.manifest.parents:
            info = entry.info
            options = tuple(sorted(info.get("options", {}).items()))  # a layout that breaks answers is an option
            found[info["backend"], info["device"], info["precision"], options, *entry.manifest.parents] = entry
    return list(found.values())


def evaluate_artifacts(
    model: Model, exported: Entry, artifacts: Sequence[Entry], samples: SampleSet, store: Store, listener: Listener
) -> list[EvaluatedArtifact]:
    """Runs the source model, then each artifact, over `samples`. Raises BadInputError where the model is no classifier."""
    card = card_from_file(exported.file(CARD))
    require_classifier(card)
    rows = [EvaluatedArtifact(None, _evaluate_source(model, exported, card, samples, listener))]
    for entry in artifacts:
        backend, device = BACKENDS[entry.info["backend"]], entry.info["device"]
        if (reason := backend.find_run_blocker(entry.info, device)) is not None:
            rows.append(EvaluatedArtifact(entry, None, reason))
            continue
        name = f"evaluate {backend.name} {entry.info['precision']}"
        try:
            with backend.load(store.verify_entry(entry).path, entry.info, device, {}) as session:
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


def _count_calibration_samples(artifact: Entry, samples: SampleSet, store: Store) -> int:
    """How many of `samples` are, by content, in the calibration set of an INT8 artifact, as far as the store knows it."""
    entries = store.list_entries()
    graph = next((each for each in entries if each.id in artifact.manifest.parents and "set" in each.info), None)
    drawn = [
        each
        for each in entries
        if graph is not None
        and each.manifest.kind == "calibration"
        and each.info["set"]["sha256"] == graph.info["set"]["sha256"]
    ]
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
    model: Model, exported: Entry, card: ModelCard, samples: SampleSet, listener: Listener
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
    exported: Entry,
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


def records_from_evaluation(
    rows: Sequence[EvaluatedArtifact], labels: "NDArray[np.int64] | None", trained: bool, budget: float | None
) -> Iterator[dict[str, Any]]:
    """The JSON form of every row. Agreement and accuracy of random weights are not given: they prove nothing."""
    source = rows[0].predictions
    assert source is not None
    for row in rows:
        info = row.entry.info if row.entry else {"backend": "source", "precision": "source", "device": "cpu"}
        record: dict[str, Any] = {
            "artifact": row.entry.id if row.entry else None,
            "backend": info["backend"],
            "precision": info["precision"],
            "device": info["device"],
            "n": len(source.best),
            "why_not": row.why_not,
            "failed": row.failed,
            "calibrated_on": row.calibrated_on,
            **dict.fromkeys(_FIGURES),
        }
        if row.predictions is not None:
            record |= _compare_to_source(source, row.predictions)
            if labels is not None and trained:
                record |= _score_labels(source, row.predictions, labels)
        record["verdict"] = _verdict(record, budget)
        yield record


_FIGURES = (
    "top1",
    "top1_ci",
    "top5",
    "macro_f1",
    "macro_f1_drop",
    "macro_f1_drop_ci",
    "drop_vs_source",
    "drop_ci",
    "lost",
    "won",
    "mcnemar_p",
    "agreement",
    "agreement_ci",
    "snr_db",
    "moved",
)


def _compare_to_source(source: Predictions, found: Predictions) -> dict[str, Any]:
    """What needs no labels: agreement, where the source's answers vary at all, and the scores' SNR."""
    error = float(np.sum((found.scores.astype(np.float64) - source.scores) ** 2))
    power = float(np.sum(source.scores.astype(np.float64) ** 2))
    snr = None if error == 0 or power == 0 else float(10 * np.log10(power / error))
    if np.unique(source.top1).size < 2:
        return {"snr_db": snr}
    same = found.top1 == source.top1
    return {
        "snr_db": snr,
        "agreement": float(same.mean()),
        "agreement_ci": compute_share_interval(int(same.sum()), len(same)).to_list(),
        "moved": _count_moved(source.top1, found.top1),
    }


def _count_moved(before: "NDArray[np.int64]", after: "NDArray[np.int64]") -> list[dict[str, int]]:
    pairs, counts = np.unique(np.stack([before, after], 1)[before != after], axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_MOVED_PAIRS]
    return [{"from": int(pairs[i, 0]), "to": int(pairs[i, 1]), "count": int(counts[i])} for i in order]


def _score_labels(source: Predictions, found: Predictions, labels: "NDArray[np.int64]") -> dict[str, Any]:
    right, was_right = found.top1 == labels, source.top1 == labels
    lost, won, n = int((was_right & ~right).sum()), int((right & ~was_right).sum()), len(labels)
    classes = found.scores.shape[1]
    f1, was_f1 = (compute_macro_f1(labels, each.top1, classes) for each in (found, source))
    f1_drop = (
        compute_macro_f1_difference(labels, source.top1, found.top1, classes) if found is not source else Interval(0, 0)
    )
    return {
        "top1": float(right.mean()),
        "top1_ci": compute_share_interval(int(right.sum()), n).to_list(),
        "top5": float((found.best == labels[:, None]).any(axis=1).mean()) if classes > TOP_K else None,
        "macro_f1": f1,
        "macro_f1_drop": was_f1 - f1,
        "macro_f1_drop_ci": f1_drop.to_list(),
        "drop_vs_source": (lost - won) / n,
        "drop_ci": compute_difference_interval(lost, won, n).to_list() if found is not source else [0.0, 0.0],
        "lost": lost,
        "won": won,
        "mcnemar_p": compute_mcnemar_p_value(lost, won),
    }


def _verdict(record: Mapping[str, Any], budget: float | None) -> str | None:
    """PASS where the whole interval of the drop is inside the budget, FAIL where all of it is outside.

    Samples that the ranges were computed from flatter: for a PASS it has to hold even if all of those had been lost.
    """
    if budget is None or record["artifact"] is None:
        return None
    if record["drop_ci"] is None:
        return str(Verdict.INCONCLUSIVE)
    low, high = record["drop_ci"]
    if high + record["calibrated_on"] / record["n"] <= budget:
        return str(Verdict.PASS)
    return str(Verdict.FAIL if low > budget else Verdict.INCONCLUSIVE)


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
