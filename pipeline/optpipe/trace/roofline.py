"""The roofline: what each layer must at least take on the device, and how far the measured time is from it.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Bytes are those of a layer's inputs, weights and outputs, each moved once: what fusion
and caches save makes a layer faster than its bound, which is why whole-model bounds are given with and without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

from optpipe.trace.peaks import Peaks
from optpipe.trace.tensor_cores import ineligible_reason

LIMITED_SHARE = 0.7
"""Over 70 % of a peak, a layer is limited by it."""
_TYPE_BYTES = {
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1,
    "fp8": 1,
    "fp64": 8,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}
_NO_COST = frozenset({"Constant", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape"})


class Quadrant(StrEnum):
    """Where a layer stands: what bounds it, and whether it is near that bound."""

    MATH_LIMITED = "math-limited"
    MEMORY_LIMITED = "memory-limited"
    MATH_BOUND_BELOW_PEAK = "math-bound, below its peak"
    MEMORY_BOUND_BELOW_PEAK = "memory-bound, below its peak"


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer computes and moves at one batch size."""

    name: str
    op: str
    type: str
    macs: int
    bytes: int
    channels: tuple[int, int] | None = None
    """Input and output channels of a matrix layer, for the alignment that Tensor Cores need."""

    def math_ns(self, peaks: Peaks) -> float:
        """The time the arithmetic takes at the peak of the layer's type."""
        return 2 * self.macs / peaks.flops(self.type) * 1e9

    def memory_ns(self, peaks: Peaks) -> float:
        """The time the layer's bytes take at the peak of the memory."""
        return self.bytes / peaks.bytes_per_s * 1e9

    def bound_ns(self, peaks: Peaks) -> float:
        """The larger of the two."""
        return max(self.math_ns(peaks), self.memory_ns(peaks))


@dataclass(frozen=True, slots=True)
class Graph:
    """The model as its graph gives it at one batch size, on a device with these peaks."""

    costs: tuple[LayerCost, ...]
    peaks: Peaks
    batch_size: int
    edge_bytes: int = 0
    """What no fusion can save: the model's inputs, weights and outputs."""
    layer_ns: Mapping[str, float] = field(default_factory=dict)
    """Times of the layers where the recording has none."""


@dataclass(frozen=True, slots=True)
class LayerRoof:
    """One layer against its bound; the measured part is None where the layer's time is not known."""

    cost: LayerCost
    intensity: float
    bound_ns: float
    measured_ns: float | None
    quadrant: Quadrant | None

    @property
    def above_bound_ns(self) -> float:
        """How much the layer could gain at most; where its time is not known, nothing is claimed beyond the bound."""
        return self.measured_ns - self.bound_ns if self.measured_ns is not None else self.bound_ns


@dataclass(frozen=True, slots=True)
class Roofline:
    """The whole model: the sum of its layers' bounds, the bound if everything fused, and the layers."""

    peaks: Peaks
    batch_size: int
    layers: tuple[LayerRoof, ...]
    bound_ns: float
    fused_bound_ns: float
    """Arithmetic alone, or the model's inputs, weights and outputs alone, whichever takes longer."""
    measured_ns: float | None
    math_share: float
    """The part of the layers' bounds that arithmetic decides."""
    ineligible: Mapping[str, str]
    edge_bytes: int = 0
    """What no fusion can save: the model's inputs, weights and outputs."""

    def document(self) -> dict[str, Any]:
        """The JSON form, the layers furthest above their bound first."""
        quadrants = [each.quadrant for each in self.layers if each.quadrant]
        return {
            "peaks": asdict(self.peaks),
            "batch_size": self.batch_size,
            "macs": sum(each.cost.macs for each in self.layers),
            "bytes": sum(each.cost.bytes for each in self.layers),
            "bound_ns": self.bound_ns,
            "fused_bound_ns": self.fused_bound_ns,
            "measured_ns": self.measured_ns,
            "times_bound": self.measured_ns / self.bound_ns if self.measured_ns and self.bound_ns else None,
            "math_share": self.math_share,
            "quadrants": {str(each): quadrants.count(each) for each in Quadrant} if quadrants else {},
            "layers": [_layer_document(each, self.peaks) for each in self.layers],
            "ineligible": dict(self.ineligible),
            "edge_bytes": self.edge_bytes,
            "ncu": [],
        }  # fmt: skip


def _layer_document(roof: LayerRoof, peaks: Peaks) -> dict[str, Any]:
    measured = roof.measured_ns
    return {
        "name": roof.cost.name,
        "op": roof.cost.op,
        "type": roof.cost.type,
        "macs": roof.cost.macs,
        "bytes": roof.cost.bytes,
        "channels": list(roof.cost.channels) if roof.cost.channels else None,
        "intensity": roof.intensity,
        "bound_ns": roof.bound_ns,
        "measured_ns": measured,
        "math_peak_share": roof.cost.math_ns(peaks) / measured if measured else None,
        "memory_peak_share": roof.cost.memory_ns(peaks) / measured if measured else None,
        "quadrant": str(roof.quadrant) if roof.quadrant else None,
    }


def roofline(graph: Graph, measured_ns: float | None = None, layer_ns: Mapping[str, float] | None = None) -> Roofline:
    """Holds the layers against the peaks; `measured_ns` is one inference, `layer_ns` its layers' times where known."""
    costs, peaks = graph.costs, graph.peaks
    known_ns = layer_ns or graph.layer_ns
    layers = tuple(_layer_roof(cost, peaks, known_ns.get(cost.name)) for cost in costs)
    bound = sum(each.bound_ns for each in layers)
    by_math = sum(each.bound_ns for each in layers if each.cost.math_ns(peaks) >= each.cost.memory_ns(peaks))
    return Roofline(
        peaks=peaks,
        batch_size=graph.batch_size,
        layers=tuple(sorted(layers, key=lambda each: (-each.above_bound_ns, each.cost.name))),
        bound_ns=bound,
        fused_bound_ns=max(
            sum(each.cost.math_ns(peaks) for each in layers), graph.edge_bytes / peaks.bytes_per_s * 1e9
        ),
        measured_ns=measured_ns,
        math_share=by_math / bound if bound else 0.0,
        ineligible=ineligible_layers(costs),
        edge_bytes=graph.edge_bytes,
    )


def graph_from_document(document: Mapping[str, Any]) -> Graph | None:
    """What `Roofline.document` was computed from; None where nothing was. Costs are in the order of the document."""
    if "layers" not in document:
        return None
    layers = document["layers"]
    return Graph(
        costs=tuple(
            LayerCost(one["name"], one["op"], one["type"], one["macs"], one["bytes"], _pair(one.get("channels")))
            for one in layers
        ),
        peaks=Peaks(**document["peaks"]),
        batch_size=document["batch_size"],
        edge_bytes=document.get("edge_bytes", 0),
        layer_ns={one["name"]: one["measured_ns"] for one in layers if one["measured_ns"]},
    )


def _pair(channels: Sequence[int] | None) -> tuple[int, int] | None:
    return None if channels is None else (channels[0], channels[1])


def quadrant(cost: LayerCost, peaks: Peaks, measured_ns: float) -> Quadrant:
    """Math- or memory-limited over 70 % of that peak; else bound by the ceiling over its intensity, and below it."""
    math, memory = cost.math_ns(peaks) / measured_ns, cost.memory_ns(peaks) / measured_ns
    if max(math, memory) >= LIMITED_SHARE:
        return Quadrant.MATH_LIMITED if math >= memory else Quadrant.MEMORY_LIMITED
    return Quadrant.MATH_BOUND_BELOW_PEAK if math >= memory else Quadrant.MEMORY_BOUND_BELOW_PEAK


def _layer_roof(cost: LayerCost, peaks: Peaks, measured_ns: float | None) -> LayerRoof:
    return LayerRoof(
        cost=cost,
        intensity=2 * cost.macs / cost.bytes if cost.bytes else 0.0,
        bound_ns=cost.bound_ns(peaks),
        measured_ns=measured_ns,
        quadrant=quadrant(cost, peaks, measured_ns) if measured_ns else None,
    )


def ineligible_layers(costs: Sequence[LayerCost]) -> dict[str, str]:
    """Matrix layers that Tensor Cores cannot take as they are, and why."""
    reasons = {cost.name: ineligible_reason(cost) for cost in costs if cost.macs}
    return {name: reason for name, reason in reasons.items() if reason}


def graph_from_onnx(path: Path, inputs: Sequence[Any], batch_size: int, peaks: Peaks, *, tf32: bool = False) -> Graph:
    """Multiply-adds and bytes of every node of an ONNX graph, its inputs (`InputSpec`s) at `batch_size`.

    With `tf32` the products of fp32 tensors count as TF32, which is how the runtime was told to compute them.
    """
    import onnx

    from optpipe.backends.onnx_graph import graph_types, node_macs

    model = onnx.load(path, load_external_data=False)
    known = graph_types(model, [_at_batch(each, batch_size) for each in inputs])
    costs = tuple(
        _node_cost(node, known, node_macs(node, known), tf32=tf32)
        for node in model.graph.node
        if node.op_type not in _NO_COST and node.output
    )
    edges = dict.fromkeys(each.name for each in (*model.graph.input, *model.graph.output, *model.graph.initializer))
    return Graph(costs, peaks, batch_size, sum(_tensor_bytes(known, name) for name in edges))


def _at_batch(spec: Any, batch_size: int) -> Any:
    shape = (batch_size, *spec.opt[1:])
    return replace(
        spec,
        min=(min(spec.min[0], batch_size), *spec.min[1:]),
        opt=shape,
        max=(max(spec.max[0], batch_size), *spec.max[1:]),
    )


def _node_cost(node: Any, known: Any, macs: int, *, tf32: bool) -> LayerCost:
    tensors = [name for name in (*node.input, *node.output) if name]
    kind = known.types.get(node.input[0], "fp32") if node.input else "fp32"
    kind = "tf32" if tf32 and macs and kind == "fp32" else kind
    size = sum(_tensor_bytes(known, name) for name in dict.fromkeys(tensors))
    return LayerCost(
        node.name or node.output[0], node.op_type, kind, macs, size, _channels(node, known) if macs else None
    )


def _tensor_bytes(known: Any, name: str) -> int:
    shape = known.shapes.get(name)
    return prod(shape) * _TYPE_BYTES.get(known.types.get(name, "fp32"), 4) if shape is not None else 0


def _channels(node: Any, known: Any) -> tuple[int, int] | None:
    """Input and output channels per group: axes 1 and 0 of a convolution's weight, the inner and last of a product."""
    weight = known.shapes.get(node.input[1]) if len(node.input) > 1 else None
    if not weight or len(weight) < 2:
        return None
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    return (weight[1], weight[0] // groups) if "Conv" in node.op_type else (weight[-2], weight[-1])
