"""Which layers INT8 hurts, and the fewest that have to stay in floating point for a drop inside a budget.

Each layer is quantized alone and the model's output compared with FP32: that ranks them. Of the ranking, a binary search
finds how many of the worst must be spared; it takes log2(layers) evaluations of the whole set instead of one per layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from optpipe.core.card import ModelCard, Task, card_from_file
from optpipe.core.entries import ModelInfo
from optpipe.core.events import Listener, SilentListener
from optpipe.errors import BadInputError
from optpipe.evaluate.evaluate import Predictions, predict_samples
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.inputs.sample_set import SampleSet, draw_subset
from optpipe.quantize.calibrate import quantize_graph
from optpipe.quantize.table import CalibrationTable
from optpipe.stats.agreement import compute_output_error
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import CARD, ONNX
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.quantize.placement import Target

REVISION = 1
RANKING_IMAGES = 128
"""Images that the ranking is made on; the search uses the whole set."""
EXACT_DB = 200.0
"""Stands for an output equal to the bit."""


@dataclass(frozen=True, slots=True)
class QuantizationCost:
    """What a quantized graph does to the outputs."""

    snr_db: float
    """Of the first output; EXACT_DB where it is equal to the bit."""
    drop: float | None = None
    """Of the task's score, or of agreement where labels are missing; None where the FP32 graph predicts one class for everything."""
    drop_ci: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class MethodsInfo:
    """What the INT8 graph of every calibration method does to the outputs."""

    KIND: ClassVar[str] = "methods"

    images: int
    costs: Mapping[str, QuantizationCost]
    best: str


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What quantizing one layer alone does, with its multiply-adds."""

    layer: str
    cost: QuantizationCost
    macs: int


@dataclass(frozen=True, slots=True)
class SensitivityInfo:
    """Every INT8 layer quantized alone, the costliest first."""

    KIND: ClassVar[str] = "sensitivity"

    images: int
    layers: tuple[LayerCost, ...]
    total_macs: int


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """The graph with the `kept` costliest layers in floating point."""

    kept: int
    int8_macs_share: float
    cost: QuantizationCost


@dataclass(frozen=True, slots=True)
class SelectionInfo:
    """The layers to keep in floating point for a budget, and what was tried."""

    KIND: ClassVar[str] = "selection"

    budget: float
    images: int
    metric: str
    """The task's score that the drop is of; `agreement` where labels are missing."""
    keep: tuple[str, ...]
    layers: int
    tried: tuple[KeptTrial, ...]


@dataclass(frozen=True, eq=False)
class Fp32Reference:
    """The FP32 graph's predictions on some samples, which quantized graphs are compared with."""

    model: Entry[ModelInfo]
    card: ModelCard
    samples: SampleSet
    task: TaskContract
    reference: Predictions
    truths: Values | None

    @property
    def metric(self) -> str:
        """What the drop is of."""
        return "agreement" if self.truths is None else self.task.score

    def measure_cost(self, graph: Any) -> QuantizationCost:
        """Runs a quantized `graph` over the samples and compares its outputs."""
        found = _predict(graph, self.model, self.card, self.samples, self.task)
        snr = compute_output_error("", self.reference.outputs, found.outputs).snr_db
        snr = EXACT_DB if snr is None else min(round(snr, 2), EXACT_DB)
        source = self.reference.values
        truths = self.task.take_as_truths(source) if self.truths is None else self.truths
        cost = self.task.measure_drop(truths, source, found.values)
        return QuantizationCost(snr) if cost is None else QuantizationCost(snr, cost.drop, cost.ci)


def run_fp32_reference(model: Entry[ModelInfo], samples: SampleSet) -> Fp32Reference:
    """Runs the FP32 graph over `samples`. Raises BadInputError where its outputs do not fit its task."""
    import onnx

    card = card_from_file(model.file(CARD))
    task = TASKS.get(card.task, TASKS[Task.CLASSIFICATION])  # of what no task judges, the largest output
    task.require_model(card)
    reference = _predict(onnx.load(model.file(ONNX)), model, card, samples, task)
    truths = task.read_truths(samples, card, task.count_classes(card) or reference.classes)
    return Fp32Reference(model, card, samples, task, reference, truths)


def _predict(
    graph: Any, model: Entry[ModelInfo], card: ModelCard, samples: SampleSet, task: TaskContract
) -> Predictions:
    from optpipe.quantize.collect import open_model_session

    session, names = open_model_session(graph), [each.name for each in card.outputs]

    def run(batch: Mapping[str, "NDArray[Any]"]) -> Mapping[str, "NDArray[Any]"]:
        return dict(zip(names, session.run(names, batch), strict=True))

    return predict_samples(model, card, samples, task, run, "predict", SilentListener())


def compare_methods(
    model: Entry[ModelInfo],
    tables: Mapping[str, CalibrationTable],
    samples: SampleSet,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry[MethodsInfo], bool]:
    """The store entry `methods`: what the INT8 graph of every table does to the outputs on at most RANKED_ON images."""
    few = draw_subset(samples, RANKING_IMAGES)
    recipe = _recipe(model, few, target) | {"tables": {method: table.sha256 for method, table in tables.items()}}

    def make(_: object) -> MethodsInfo:
        import onnx

        against, graph, costs = run_fp32_reference(model, few), onnx.load(model.file(ONNX)), {}
        with listener.step("compare methods", total=len(tables)) as step:
            for method, table in tables.items():
                costs[method] = against.measure_cost(quantize_graph(graph, table, target)[0])
                step.advance()
        return MethodsInfo(len(few.files), costs, best=max(costs, key=lambda method: costs[method].snr_db))

    return store.produce(MethodsInfo, recipe, make, parents=(model.id,), listener=listener)


def rank_layers(
    model: Entry[ModelInfo],
    table: CalibrationTable,
    samples: SampleSet,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry[SensitivityInfo], bool]:
    """The store entry `sensitivity`: every INT8 layer quantized alone, the costliest first, with its multiply-adds."""
    few = draw_subset(samples, RANKING_IMAGES)
    recipe = _recipe(model, few, target) | {"table": replace(table, keep=()).sha256}

    def make(_: object) -> SensitivityInfo:
        import onnx

        graph = onnx.load(model.file(ONNX))
        against = run_fp32_reference(model, few)
        macs = count_layer_macs(graph, against.card)
        layers = quantize_graph(graph, replace(table, keep=()), target)[1].layers
        rows = []
        with listener.step(f"quantize {len(layers)} layers one by one", total=len(layers)) as step:
            for layer in layers:
                alone = replace(table, keep=tuple(other for other in macs if other != layer))
                cost = against.measure_cost(quantize_graph(graph, alone, target)[0])
                rows.append(LayerCost(layer, cost, macs[layer]))
                step.advance()
        rows.sort(key=lambda row: row.cost.snr_db)
        return SensitivityInfo(len(few.files), tuple(rows), sum(macs.values()))

    return store.produce(SensitivityInfo, recipe, make, parents=(model.id,), listener=listener)


def select_float_layers(
    model: Entry[ModelInfo],
    table: CalibrationTable,
    ranking: Sequence[LayerCost],
    samples: SampleSet,
    budget: float,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry[SelectionInfo], bool]:
    """The store entry `selection`: the fewest of the ranking's first layers to keep so that the drop is within `budget`.

    Raises BadInputError where no drop can be measured: the model gives every image the same class.
    """
    recipe = _recipe(model, samples, target) | {
        "table": replace(table, keep=()).sha256,
        "ranking": [row.layer for row in ranking],
        "budget": budget,
    }

    def make(_: object) -> SelectionInfo:
        import onnx

        graph, against = onnx.load(model.file(ONNX)), run_fp32_reference(model, samples)
        macs = count_layer_macs(graph, against.card)
        order = [row.layer for row in ranking]
        tried: dict[int, KeptTrial] = {}

        def keep_layers(kept: int) -> KeptTrial:
            keep = frozenset(order[:kept])
            made, placed = quantize_graph(graph, replace(table, keep=tuple(order[:kept])), target)
            share = sum(macs[layer] for layer in placed.layers if layer not in keep) / max(sum(macs.values()), 1)
            return KeptTrial(kept, share, against.measure_cost(made))

        steps = math.ceil(math.log2(len(order) + 1)) + 1
        with listener.step("search for the fewest layers to keep in floating point", total=steps) as step:
            for kept in _search_kept_counts(len(order), tried, budget):
                tried[kept] = keep_layers(kept)
                step.advance()
        chosen = min((kept for kept, trial in tried.items() if _holds(trial, budget)), default=len(order))
        return SelectionInfo(
            budget=budget,
            images=len(samples.files),
            metric=against.metric,
            keep=tuple(order[:chosen]),
            layers=len(order),
            tried=tuple(tried[kept] for kept in sorted(tried)),
        )

    return store.produce(SelectionInfo, recipe, make, parents=(model.id,), listener=listener)


def _search_kept_counts(count: int, tried: Mapping[int, KeptTrial], budget: float) -> Iterator[int]:
    """How many layers to keep next: none first, then by halving; keeping all is FP32 and needs no trial."""
    yield 0
    if tried[0].cost.drop is None:
        raise BadInputError(
            "the model predicts the same class for every calibration image, so no accuracy drop can be measured"
        )
    if _holds(tried[0], budget):
        return
    fails, holds = 0, count
    while holds - fails > 1:
        middle = (fails + holds) // 2
        yield middle
        if _holds(tried[middle], budget):
            holds = middle
        else:
            fails = middle


def _holds(trial: KeptTrial, budget: float) -> bool:
    return trial.cost.drop is not None and trial.cost.drop <= budget


def count_layer_macs(graph: Any, card: ModelCard) -> dict[str, int]:
    """Multiply-adds of every layer that has some, at the profile's `opt` shapes."""
    from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types, name_nodes

    name_nodes(graph)
    known = infer_graph_types(graph, card.inputs)
    found = {node.name: count_node_macs(node, known) for node in graph.graph.node}
    return {name: macs for name, macs in found.items() if macs}


def _recipe(model: Entry[ModelInfo], samples: SampleSet, target: "Target") -> dict[str, Any]:
    return {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "target": target,
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }
