"""The roofline: what the model and each layer must at least take on the device, and how far the measured time is from it.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Three figures for the whole model, each at the peaks given, in this order:

- the bound: all arithmetic, or the model's inputs, weights and outputs moved once, whichever takes longer. No fusion gets
  below it; what may is weights that stay in a cache, or fewer multiplications than the direct algorithm's (Winograd).
- fused: layer after layer, elementwise operators computed on what their producer holds in registers.
- unfused: node after node, each moving its own inputs, weights and outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
    """One layer as a node on its own against its bound; the measured part is None where the layer's time is not known."""

    cost: LayerCost
    intensity: float
    """Operations per byte."""
    bound_ns: float
    measured_ns: float | None
    math_peak_share: float | None
    memory_peak_share: float | None
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
    """The whole model, by three measures (see the module), and its layers, those furthest above their bound first."""

    peaks: Peaks
    batch_size: int
    macs: int
    edge_bytes: int
    """What no fusion can save: the model's inputs, weights and outputs."""
    bound_ns: float
    """All arithmetic but that of `types_without_peak`, or `edge_bytes` moved once: no fusion gets below it."""
    types_without_peak: tuple[str, ...]
    """Types whose arithmetic the bound leaves out: they may run faster than the fp32 that they are else taken for."""
    fused: TotalCost
    unfused: TotalCost
    measured_ns: float | None
    times_bound: float | None
    layers: tuple[LayerRoof, ...]


def compute_roofline(
    graph: GraphCosts, measured_ns: float | None = None, layer_ns: Mapping[str, float] | None = None
) -> Roofline:
    """Compares the layers with the peaks; `measured_ns` is one inference, `layer_ns` its layers' times where known."""
    costs, peaks = graph.costs, graph.peaks
    known_ns = layer_ns or graph.layer_ns
    layers = (_compute_layer_roof(cost, peaks, known_ns.get(cost.name)) for cost in costs)
    bound_ns = max(_known_math_ns(costs, peaks), graph.edge_bytes / peaks.bytes_per_s * 1e9)
    return Roofline(
        peaks=peaks,
        batch_size=graph.batch_size,
        macs=sum(each.macs for each in costs),
        edge_bytes=graph.edge_bytes,
        bound_ns=bound_ns,
        types_without_peak=tuple(sorted({each.type for each in costs if each.macs} - set(peaks.flops_per_s))),
        fused=_sum_costs([each.fused() for each in costs], peaks),
        unfused=_sum_costs(costs, peaks),
        measured_ns=measured_ns,
        times_bound=measured_ns / bound_ns if measured_ns and bound_ns else None,
        layers=tuple(sorted(layers, key=lambda each: (-each.above_bound_ns, each.cost.name))),
    )


def _known_math_ns(costs: Iterable[LayerCost], peaks: Peaks) -> float:
    """All arithmetic whose peak is known."""
    return sum(each.math_ns(peaks) for each in costs if each.type in peaks.flops_per_s)


def _sum_costs(costs: Sequence[LayerCost], peaks: Peaks) -> TotalCost:
    total = sum(each.bound_ns(peaks) for each in costs)
    by_math = sum(each.bound_ns(peaks) for each in costs if each.math_ns(peaks) >= each.memory_ns(peaks))
    return TotalCost(sum(each.bytes for each in costs), total, by_math / total if total else 0.0)


def graph_costs_from_roofline(found: Roofline) -> GraphCosts:
    """What a roofline was computed from; costs are in the order of its layers."""
    layer_ns = {each.cost.name: each.measured_ns for each in found.layers if each.measured_ns}
    costs = tuple(each.cost for each in found.layers)
    return GraphCosts(costs, found.peaks, found.batch_size, found.edge_bytes, layer_ns)


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
        math_peak_share=cost.math_ns(peaks) / measured_ns if measured_ns else None,
        memory_peak_share=cost.memory_ns(peaks) / measured_ns if measured_ns else None,
        quadrant=classify_quadrant(cost, peaks, measured_ns) if measured_ns else None,
    )
