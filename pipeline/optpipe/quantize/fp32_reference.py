"""The FP32 graph's outputs on some samples, and what a graph of lower precision costs against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.entries import ModelInfo
from optpipe.core.events import SilentListener
from optpipe.core.precision import EXACT_DB, PrecisionCost
from optpipe.evaluate.evaluate import KEPT_VALUES, Predictions, predict_samples
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.models.inputs.annotations import NothingJudgedError
from optpipe.models.inputs.sample_set import SampleSet
from optpipe.stats.agreement import compute_output_error
from optpipe.stats.paired import CONFIDENCE
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD, ONNX

if TYPE_CHECKING:
    from numpy.typing import NDArray

Others = Mapping[str, "NDArray[Any]"]
"""The floating-point outputs but for the first by name, all values of all batches in one row."""


@dataclass(frozen=True, eq=False)
class Fp32Reference:
    """The FP32 graph's predictions on some samples, which graphs of lower precision are compared with."""

    model: Entry[ModelInfo]
    card: ModelCard
    samples: SampleSet
    task: TaskContract
    reference: Predictions
    others: Others
    truths: Values | None

    @property
    def metric(self) -> str:
        """What a drop is of."""
        return "agreement" if self.truths is None else self.task.score

    def measure_cost(self, graph: Any) -> PrecisionCost:
        """Runs `graph` over the samples and compares its outputs."""
        found, others = _predict(graph, self.model, self.card, self.samples, self.task)
        pairs = [(self.reference.outputs, found.outputs)]
        pairs += [(value, others[name]) for name, value in self.others.items()]
        snr = None
        if all(expected.size and expected.shape == value.shape for expected, value in pairs):
            errors = [compute_output_error("", *pair).snr_db for pair in pairs]
            snr = min(EXACT_DB if each is None else each for each in errors)
            snr = max(min(round(snr, 2), EXACT_DB), -EXACT_DB)
        source = self.reference.values
        truths = self.task.take_as_truths(source) if self.truths is None else self.truths
        cost = self.task.measure_drop(truths, source, found.values) if self.card.task in TASKS or self.truths else None
        return PrecisionCost(snr) if cost is None else PrecisionCost(snr, cost.value, cost.interval(CONFIDENCE).bounds)


def run_fp32_reference(model: Entry[ModelInfo], samples: SampleSet) -> Fp32Reference:
    """Runs the FP32 graph over `samples`. Raises BadInputError where its outputs do not fit its task."""
    import onnx

    card = card_from_file(model.file(CARD))
    task = TASKS.get(card.task, TASKS[Task.CLASSIFICATION])  # of what no task judges, the largest output
    if card.task in TASKS:
        task.require_model(card)
    reference, others = _predict(onnx.load(model.file(ONNX)), model, card, samples, task)
    truths = _read_truths(task, samples, card, reference.classes)
    return Fp32Reference(model, card, samples, task, reference, others, truths)


def _read_truths(task: TaskContract, samples: SampleSet, card: ModelCard, classes: int) -> Values | None:
    """None also where nothing in the samples is judged, as in a few that were drawn out of many."""
    try:
        return task.read_truths(samples, card, task.count_classes(card) or classes)
    except NothingJudgedError:
        return None


def _predict(
    graph: Any, model: Entry[ModelInfo], card: ModelCard, samples: SampleSet, task: TaskContract
) -> tuple[Predictions, Others]:
    from optpipe.quantize.collect import open_model_session

    session, names = open_model_session(graph), [each.name for each in card.outputs]
    others: dict[str, list[NDArray[Any]]] = {name: [] for name in names[1:]}
    room = KEPT_VALUES

    def run(batch: Mapping[str, "NDArray[Any]"]) -> Mapping[str, "NDArray[Any]"]:
        nonlocal room
        found = dict(zip(names, session.run(names, batch), strict=True))
        for name, kept in others.items():
            if found[name].dtype.kind == "f" and room >= found[name].size:
                kept.append(found[name].reshape(1, -1))
                room -= found[name].size
        return found

    predicted = predict_samples(model, card, samples, task, run, "predict", SilentListener())
    return predicted, {name: np.concatenate(kept, axis=1) for name, kept in others.items() if kept}
