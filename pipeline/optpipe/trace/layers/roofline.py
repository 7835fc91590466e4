"""The roofline: what the model and each layer must at least take on the device, and how far the measured time is from it.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Three figures for the whole model, each at the peaks given, in this order:

- the bound: all arithmetic, or the model's inputs, weights and outputs moved once, whichever takes longer. No fusion gets
  below it; what may is weights that stay in a cache, or fewer multiplications than the direct algorithm's (Winograd).
- fused: layer after layer, elementwise operators computed on what their producer holds in registers.
- unfused: node after node, each moving its own inputs, weights and outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from optpipe.trace.layers.layer_cost import LayerCost
from optpipe.trace.layers.peaks import Peaks

LIMITED_SHARE = 0.7
"""Over 70 % of a peak, a layer is limited by it."""


class Quadrant(StrEnum):
    """Where a layer stands: what bounds it, and whether it is near that bound."""

    MATH_LIMITED = "math-limited"
    MEMORY_LIMITED = "memory-limited"
    MATH_BOUND_BELOW_PEAK = "math-bound, below its peak"
    MEMORY_BOUND_BELOW_PEAK = "memory-bound, below its peak"


@dataclass(frozen=True, slots=True)
class GraphCosts:
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
class TotalCost:
    """What all layers take at the peaks, one after the other, and how it is made up."""

    bytes: int
    ns: float
    math_share: float
    """The part of `ns` in layers whose arithmetic takes longer than their bytes."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The whole model, by three measures (see the module), and its layers."""

    peaks: Peaks
    batch_size: int
    layers: tuple[LayerRoof, ...]
    bound_ns: float
    fused: TotalCost
    unfused: TotalCost
    measured_ns: float | None
    ineligible: Mapping[str, str]
    edge_bytes: int = 0
    """What no fusion can save: the model's inputs, weights and outputs."""

    @property
    def types_without_peak(self) -> list[str]:
        """Types whose arithmetic the bound leaves out: they may run faster than the fp32 that they are else taken for."""
        return sorted({each.cost.type for each in self.layers if each.cost.macs} - set(self.peaks.flops_per_s))

    def document(self) -> dict[str, Any]:
        """The JSON form, the layers furthest above their bound first.

        `bound_ns`: what no fusion gets below (all arithmetic but that of `types_without_peak`, or `edge_bytes` once);
        `times_bound`: `measured_ns` over it.
        `fused` and `unfused`: {`bytes`, `ns`, `math_share`} of all layers one after the other, with elementwise operators on
        their producers' registers, and node by node. Each of `layers` stands on its own: its `bytes`, its `bound_ns`.
        """
        quadrants = [each.quadrant for each in self.layers if each.quadrant]
        return {
            "peaks": asdict(self.peaks),
            "batch_size": self.batch_size,
            "macs": sum(each.cost.macs for each in self.layers),
            "edge_bytes": self.edge_bytes,
            "bound_ns": self.bound_ns,
            "types_without_peak": self.types_without_peak,
            "fused": asdict(self.fused),
            "unfused": asdict(self.unfused),
            "measured_ns": self.measured_ns,
            "times_bound": self.measured_ns / self.bound_ns if self.measured_ns and self.bound_ns else None,
            "quadrants": {str(each): quadrants.count(each) for each in Quadrant} if quadrants else {},
            "layers": [_layer_document(each, self.peaks) for each in self.layers],
            "ineligible": dict(self.ineligible),
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
        "fused_bytes": roof.cost.fused_bytes,
        "channels": list(roof.cost.channels) if roof.cost.channels else None,
        "intensity": roof.intensity,
        "bound_ns": roof.bound_ns,
        "measured_ns": measured,
        "math_peak_share": roof.cost.math_ns(peaks) / measured if measured else None,
        "memory_peak_share": roof.cost.memory_ns(peaks) / measured if measured else None,
        "quadrant": str(roof.quadrant) if roof.quadrant else None,
    }


def compute_roofline(
    graph: GraphCosts, measured_ns: float | None = None, layer_ns: Mapping[str, float] | None = None
) -> Roofline:
    """Holds the layers against the peaks; `measured_ns` is one inference, `layer_ns` its layers' times where known."""
    costs, peaks = graph.costs, graph.peaks
    known_ns = layer_ns or graph.layer_ns
    layers = tuple(_compute_layer_roof(cost, peaks, known_ns.get(cost.name)) for cost in costs)
    return Roofline(
        peaks=peaks,
        batch_size=graph.batch_size,
        layers=tuple(sorted(layers, key=lambda each: (-each.above_bound_ns, each.cost.name))),
        bound_ns=max(_known_math_ns(costs, peaks), graph.edge_bytes / peaks.bytes_per_s * 1e9),
        fused=_sum_costs([each.fused() for each in costs], peaks),
        unfused=_sum_costs(costs, peaks),
        measured_ns=measured_ns,
        ineligible=list_ineligible_layers(costs),
        edge_bytes=graph.edge_bytes,
    )


def _known_math_ns(costs: Iterable[LayerCost], peaks: Peaks) -> float:
    """All arithmetic whose peak is known."""
    return sum(each.math_ns(peaks) for each in costs if each.type in peaks.flops_per_s)


def _sum_costs(costs: Sequence[LayerCost], peaks: Peaks) -> TotalCost:
    total = sum(each.bound_ns(peaks) for each in costs)
    by_math = sum(each.bound_ns(peaks) for each in costs if each.math_ns(peaks) >= each.memory_ns(peaks))
    return TotalCost(sum(each.bytes for each in costs), total, by_math / total if total else 0.0)


def graph_costs_from_document(document: Mapping[str, Any]) -> GraphCosts | None:
    """What `Roofline.document` was computed from; None where nothing was. Costs are in the order of the document.

    Documents of a version that did not know what fusion saves have layers without `fused_bytes`.
    """
    if "layers" not in document:
        return None
    layers = document["layers"]
    return GraphCosts(
        costs=tuple(
            LayerCost(
                name=one["name"],
                op=one["op"],
                type=one["type"],
                macs=one["macs"],
                bytes=one["bytes"],
                channels=_pair(one.get("channels")),
                fused_bytes=one.get("fused_bytes"),
            )
            for one in layers
        ),
        peaks=Peaks(**document["peaks"]),
        batch_size=document["batch_size"],
        edge_bytes=document.get("edge_bytes", 0),
        layer_ns={one["name"]: one["measured_ns"] for one in layers if one["measured_ns"]},
    )


def _pair(channels: Sequence[int] | None) -> tuple[int, int] | None:
    return None if channels is None else (channels[0], channels[1])


def classify_quadrant(cost: LayerCost, peaks: Peaks, measured_ns: float) -> Quadrant:
    """Math- or memory-limited over 70 % of that peak; else bound by the ceiling over its intensity, and below it."""
    math, memory = cost.math_ns(peaks) / measured_ns, cost.memory_ns(peaks) / measured_ns
    if max(math, memory) >= LIMITED_SHARE:
        return Quadrant.MATH_LIMITED if math >= memory else Quadrant.MEMORY_LIMITED
    return Quadrant.MATH_BOUND_BELOW_PEAK if math >= memory else Quadrant.MEMORY_BOUND_BELOW_PEAK


def _compute_layer_roof(cost: LayerCost, peaks: Peaks, measured_ns: float | None) -> LayerRoof:
    return LayerRoof(
        cost=cost,
        intensity=2 * cost.macs / cost.bytes if cost.bytes else 0.0,
        bound_ns=cost.bound_ns(peaks),
        measured_ns=measured_ns,
        quadrant=classify_quadrant(cost, peaks, measured_ns) if measured_ns else None,
    )


def list_ineligible_layers(costs: Sequence[LayerCost]) -> dict[str, str]:
    """Matrix layers that Tensor Cores cannot take as they are, and why."""
    reasons = {cost.name: cost.ineligible for cost in costs if cost.macs}
    return {name: reason for name, reason in reasons.items() if reason}
