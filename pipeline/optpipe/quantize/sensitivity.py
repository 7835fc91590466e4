"""Which layers a lower precision hurts: each is lowered alone, and the model's outputs are compared with FP32's.

What can be lowered, and how, is a `Lowering`: INT8 or FP8 by a calibration table, or FP16 by rounding.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.core.events import Listener
from optpipe.core.hashing import hash_value
from optpipe.core.mixed_precision import PrecisionCost, make_cost_order
from optpipe.core.precision import Precision
from optpipe.models.inputs.sample_set import SampleSet, draw_subset
from optpipe.quantize.calibrate import quantize_graph
from optpipe.quantize.fp32_reference import run_fp32_reference
from optpipe.quantize.table import CalibrationTable
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Entry, Store

if TYPE_CHECKING:
    from optpipe.quantize.placement import Target

REVISION = 3
RANKING_IMAGES = 128
"""Images that the ranking is made on; the search uses the whole set."""


@dataclass(frozen=True, slots=True)
class MethodsInfo:
    """What the INT8 graph of every calibration method does to the outputs."""

    KIND: ClassVar[str] = "methods"

    images: int
    costs: Mapping[str, PrecisionCost]
    best: str


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What lowering one layer alone does, with its MACs."""

    layer: str
    cost: PrecisionCost
    macs: int


@dataclass(frozen=True, slots=True)
class SensitivityInfo:
    """Every layer lowered alone, the costliest first."""

    KIND: ClassVar[str] = "sensitivity"

    images: int
    layers: tuple[LayerCost, ...]
    total_macs: int


@dataclass(frozen=True, slots=True)
class LoweredLayers:
    """The layers of a graph that a precision can be given to."""

    layers: tuple[str, ...]
    """By name, in the graph's order."""
    lower: Callable[[Collection[str]], Any]
    """Makes the graph in which only these layers are in the lower precision."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """How a model's layers get a lower precision."""

    precision: Precision
    recipe: Mapping[str, Any]
    """What decides it, for the store."""
    load: Callable[[], LoweredLayers]
    images: int = RANKING_IMAGES
    """How many the ranking is made on."""


def lower_by_table(model: Entry[ModelInfo], table: CalibrationTable, target: "Target") -> Lowering:
    """INT8, or on the target `fp8` FP8, by a table; what it keeps does not count."""
    table = replace(table, keep=())

    def load() -> LoweredLayers:
        import onnx

        graph = onnx.load(model.file(ONNX))
        layers = quantize_graph(graph, table, target)[1].layers

        def lower(chosen: Collection[str]) -> Any:
            kept = tuple(layer for layer in layers if layer not in chosen)
            return quantize_graph(graph, replace(table, keep=kept), target)[0]

        return LoweredLayers(layers, lower)

    precision = Precision.FP8 if target == "fp8" else Precision.INT8
    return Lowering(precision, {"target": target, "table": table.sha256}, load)


def compare_methods(
    model: Entry[ModelInfo],
    tables: Mapping[str, CalibrationTable],
    samples: SampleSet,
    target: "Target",
    store: Store,
    listener: Listener,
) -> tuple[Entry[MethodsInfo], bool]:
    """The store entry `methods`: what the graph of every table does to the outputs on at most RANKING_IMAGES images."""
    few = draw_subset(samples, RANKING_IMAGES)
    found = {method: table.sha256 for method, table in tables.items()}
    recipe = describe_recipe(model, few) | {"target": target, "tables": found}

    def make(_: object) -> MethodsInfo:
        import onnx

        against, graph, costs = run_fp32_reference(model, few), onnx.load(model.file(ONNX)), {}
        with listener.step("compare methods", total=len(tables)) as step:
            for method, table in tables.items():
                costs[method] = against.measure_cost(quantize_graph(graph, table, target)[0])
                step.advance()
        order = make_cost_order(costs.values())
        return MethodsInfo(len(few.files), costs, best=max(costs, key=lambda method: order(costs[method])))

    return store.produce(MethodsInfo, recipe, make, parents=(model.id,), listener=listener)


def rank_layers(
    model: Entry[ModelInfo], lowering: Lowering, samples: SampleSet, store: Store, listener: Listener
) -> tuple[Entry[SensitivityInfo], bool]:
    """The store entry `sensitivity`: every layer lowered alone, the costliest first, with its MACs."""
    few = draw_subset(samples, lowering.images)
    recipe = describe_recipe(model, few) | dict(lowering.recipe)

    def make(_: object) -> SensitivityInfo:
        import onnx

        found, against = lowering.load(), run_fp32_reference(model, few)
        macs = count_layer_macs(onnx.load(model.file(ONNX)), against.card)
        rows = []
        with listener.step(
            f"{lowering.precision} in {len(found.layers)} layers one by one", total=len(found.layers)
        ) as step:
            for layer in found.layers:
                rows.append(LayerCost(layer, against.measure_cost(found.lower((layer,))), macs.get(layer, 0)))
                step.advance()
        order = make_cost_order(row.cost for row in rows)
        rows.sort(key=lambda row: order(row.cost))
        return SensitivityInfo(len(few.files), tuple(rows), sum(macs.values()))

    return store.produce(SensitivityInfo, recipe, make, parents=(model.id,), listener=listener)


def count_layer_macs(graph: Any, card: ModelCard) -> dict[str, int]:
    """MACs of every layer that has some, at the profile's `opt` shapes."""
    from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types, name_nodes

    name_nodes(graph)
    known = infer_graph_types(graph, card.inputs)
    found = {node.name: count_node_macs(node, known) for node in graph.graph.node}
    return {name: macs for name, macs in found.items() if macs}


def describe_recipe(model: Entry[ModelInfo], samples: SampleSet) -> dict[str, Any]:
    """What decides every figure here but the lowering."""
    return {
        "revision": REVISION,
        "model": model.id,
        "set": samples.sha256,
        "labels": hash_value([each.label for each in samples.files]),
        "onnxruntime": get_package_version("onnxruntime-gpu"),
    }
