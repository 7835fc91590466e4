"""The least time of a model and of its layers on a device, compared with the measured time.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Three figures for the whole model, at the given peaks:

- the bound: all arithmetic, or the model's inputs, weights, and outputs moved once, whichever takes longer. No fusion gets
  below it; weights that stay in a cache may, and fewer multiplications than the direct algorithm's (Winograd).
- fused: layer after layer, elementwise operators computed on their producer's registers.
- unfused: node after node, each moving its own inputs, weights, and outputs.

Peaks come from a short measurement, or from data sheets: NVIDIA H100/H200/A100/L4/L40S/A10/T4/V100 and B200 product pages;
dense rates, without sparsity.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from optpipe.backends.base import NodeCost
from optpipe.measure.trials import time_call
from optpipe.workspace.environment import count_cores

_CPU_REPEATS, _GPU_REPEATS, _GPU_ROUNDS = 20, 5, 4
ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}
"""Channels of a matrix layer must be multiples of this, by type (NVIDIA, "Matrix Multiplication Background")."""
LIMITED_SHARE = 0.7
"""Over 70% of a peak, that peak limits a layer."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """A device's peak rates. `flops_per_s` by type counts a MAC as two operations."""

    device: str
    source: str
    """`measured` or `data sheet`."""
    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def flops(self, kind: str) -> float:
        """A type without an entry counts as fp32."""
        return self.flops_per_s.get(kind) or self.flops_per_s["fp32"]


# dense TFLOP/s for fp32, tf32, fp16 (and bf16), int8; then GB/s. None: the device has no matrix units for the type
_SHEETS: tuple[tuple[str, tuple[float, float | None, float, float | None], float], ...] = (
    ("B200", (75, 1100, 2250, 4500), 8000),
    ("H200", (67, 494.7, 989.4, 1978.9), 4800),
    ("H100 PCIe", (51.2, 378, 756, 1513), 2000),
    ("H100", (67, 494.7, 989.4, 1978.9), 3350),
    ("A100-SXM4-80GB", (19.5, 156, 312, 624), 2039),
    ("A100 80GB", (19.5, 156, 312, 624), 1935),
    ("A100", (19.5, 156, 312, 624), 1555),
    ("L40S", (91.6, 183, 362, 733), 864),
    ("L4", (30.3, 60, 121, 242), 300),
    ("A10", (31.2, 62.5, 125, 250), 600),
    ("T4", (8.1, None, 65, 130), 320),
    ("V100", (15.7, None, 125, None), 900),
)


def peaks_from_data_sheet(device: str) -> Peaks | None:
    """The peaks of the first known model in the GPU's name; None if there is none."""
    for model, (fp32, tf32, fp16, int8), gigabytes in _SHEETS:
        if model.lower() in device.lower():
            rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "int8": int8}
            known = {kind: rate * 1e12 for kind, rate in rates.items() if rate}
            return Peaks(device, "data sheet", known, gigabytes * 1e9)
    return None


def measure_gpu_peaks() -> Peaks:
    """Measures for about a second: square matrix products of all types that torch can multiply, and a copy of 1 GiB."""
    import torch

    size = 8192
    rates: dict[str, float] = {}
    allowed = torch.backends.cuda.matmul.allow_tf32
    for kind, dtype in {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }.items():
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        one, other = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        rates[kind] = 2 * size**3 / _time_best_gpu_run(torch, lambda a=one, b=other: a @ b)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = allowed
    whole, other_whole = (torch.randint(-8, 8, (size, size), device="cuda", dtype=torch.int8) for _ in range(2))
    with suppress(RuntimeError):
        rates["int8"] = 2 * size**3 / _time_best_gpu_run(torch, lambda: torch._int_mm(whole, other_whole.t()))
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(buffer)
    bandwidth = 2 * buffer.numel() / _time_best_gpu_run(torch, lambda: target.copy_(buffer))
    return Peaks(torch.cuda.get_device_name(), "measured", rates, bandwidth)


def measure_cpu_peaks(threads: int | None = None) -> Peaks:
    """Measures the CPU for about a second: float32 matrix products and a copy of 256 MiB, on `threads`, by default all.

    OMP_NUM_THREADS may limit torch's own number of threads, which need not be that of the judged runtime.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or count_cores())
    try:
        squares = [torch.randn(size, size) for size in (512, 1024)]
        rate = max(2 * len(each) ** 3 / _time_best_cpu_run(lambda each=each: each @ each) for each in squares)  # type: ignore[misc]
        buffer = torch.zeros(1 << 28, dtype=torch.uint8)
        target = torch.zeros_like(buffer)
        bandwidth = 2 * buffer.numel() / _time_best_cpu_run(lambda: target.copy_(buffer))
    finally:
        torch.set_num_threads(before)
    return Peaks("CPU", "measured", {"fp32": rate}, bandwidth)


def _time_best_cpu_run(work: Callable[[], Any]) -> float:
    """Seconds of the fastest call after the first."""
    work()
    return min(time_call(work) for _ in range(_CPU_REPEATS)) / 1e9


def _time_best_gpu_run(torch: Any, work: Callable[[], Any]) -> float:
    work()
    best = float("inf")
    for _ in range(_GPU_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_GPU_ROUNDS):
            work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / _GPU_ROUNDS)
    return best


@dataclass(frozen=True, slots=True)
class LayerCost(NodeCost):
    fused_bytes: int | None = None
    """`bytes` with elementwise operators fused, including those that join this layer; 0 if it joins another layer, None if
    nothing is fused."""

    @property
    def is_fused_away(self) -> bool:
        return self.fused_bytes == 0 and not self.macs

    def math_ns(self, peaks: Peaks) -> float:
        return 2 * self.macs / peaks.flops(self.type) * 1e9

    def memory_ns(self, peaks: Peaks) -> float:
        return self.bytes / peaks.bytes_per_s * 1e9

    def bound_ns(self, peaks: Peaks) -> float:
        return max(self.math_ns(peaks), self.memory_ns(peaks))

    def fused(self) -> "LayerCost":
        """The layer with the elementwise operators that join it."""
        return self if self.fused_bytes is None else replace(self, bytes=self.fused_bytes)

    @property
    def ineligible(self) -> str | None:
        """The reason why Tensor Cores cannot run a matrix layer: its type, or channels that are not aligned."""
        multiple = ALIGNMENT.get(self.type)
        if multiple is None:
            return f"there are no Tensor Cores for {self.type}; use fp16 or tf32"
        if self.channels and any(channels % multiple for channels in self.channels):
            return f"channels {self.channels[0]} and {self.channels[1]} are not multiples of {multiple}"
        return None


class Quadrant(StrEnum):
    """The ceiling of a layer, and whether the layer is near it."""

    MATH_LIMITED = "math-limited"
    MEMORY_LIMITED = "memory-limited"
    MATH_BOUND_BELOW_PEAK = "math-bound, below its peak"
    MEMORY_BOUND_BELOW_PEAK = "memory-bound, below its peak"


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """The layers of a model at one batch size, and the peaks of the device."""

    costs: tuple[LayerCost, ...]
    peaks: Peaks
    batch_size: int
    edge_bytes: int = 0
    """Bytes that no fusion can save: the model's inputs, weights, and outputs."""
    layer_ns: Mapping[str, float] = field(default_factory=dict)
    """Times of layers that the recording does not contain."""


@dataclass(frozen=True, slots=True)
class LayerRoof:
    """One layer as a separate node against its bound; shares are None if its time is not known."""

    cost: LayerCost
    intensity: float
    bound_ns: float
    measured_ns: float | None
    math_peak_share: float | None
    memory_peak_share: float | None
    quadrant: Quadrant | None

    @property
    def above_bound_ns(self) -> float:
        """The largest possible gain; the bound itself if the layer's time is not known."""
        return self.measured_ns - self.bound_ns if self.measured_ns is not None else self.bound_ns


@dataclass(frozen=True, slots=True)
class TotalCost:
    """Sum of all layers at the peaks, one after the other."""

    bytes: int
    ns: float
    math_share: float
    """Share of `ns` in layers whose arithmetic takes longer than their bytes."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The whole model by three measures (see the module), and its layers, farthest above their bound first."""

    peaks: Peaks
    batch_size: int
    macs: int
    edge_bytes: int
    bound_ns: float
    """All arithmetic except that of `types_without_peak`, or `edge_bytes` moved once, whichever takes longer."""
    types_without_peak: tuple[str, ...]
    """Types whose arithmetic the bound leaves out: they may run faster than fp32."""
    fused: TotalCost
    unfused: TotalCost
    measured_ns: float | None
    times_bound: float | None
    layers: tuple[LayerRoof, ...]


def compute_roofline(
    graph: GraphCosts, measured_ns: float | None = None, layer_ns: Mapping[str, float] | None = None
) -> Roofline:
    """`measured_ns` is one inference, `layer_ns` the times of its layers, if known."""
    costs, peaks = graph.costs, graph.peaks
    known_ns = layer_ns or graph.layer_ns
    layers = []
    for cost in costs:
        ns = known_ns.get(cost.name)
        math, memory = (cost.math_ns(peaks) / ns, cost.memory_ns(peaks) / ns) if ns else (None, None)
        quadrant = _classify(math, memory) if math is not None and memory is not None else None
        intensity = 2 * cost.macs / cost.bytes if cost.bytes else 0.0
        layers.append(LayerRoof(cost, intensity, cost.bound_ns(peaks), ns, math, memory, quadrant))
    known_math_ns = sum(each.math_ns(peaks) for each in costs if each.type in peaks.flops_per_s)
    bound_ns = max(known_math_ns, graph.edge_bytes / peaks.bytes_per_s * 1e9)
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


def _classify(math: float, memory: float) -> Quadrant:
    """Limited over 70% of one peak; otherwise bound by the nearer ceiling, and below it."""
    if max(math, memory) >= LIMITED_SHARE:
        return Quadrant.MATH_LIMITED if math >= memory else Quadrant.MEMORY_LIMITED
    return Quadrant.MATH_BOUND_BELOW_PEAK if math >= memory else Quadrant.MEMORY_BOUND_BELOW_PEAK


def _sum_costs(costs: Sequence[LayerCost], peaks: Peaks) -> TotalCost:
    total = sum(each.bound_ns(peaks) for each in costs)
    by_math = sum(each.bound_ns(peaks) for each in costs if each.math_ns(peaks) >= each.memory_ns(peaks))
    return TotalCost(sum(each.bytes for each in costs), total, by_math / total if total else 0.0)


def graph_costs_from_roofline(found: Roofline) -> GraphCosts:
    """The inputs of `compute_roofline`; costs are in the order of its layers."""
    layer_ns = {each.cost.name: each.measured_ns for each in found.layers if each.measured_ns}
    costs = tuple(each.cost for each in found.layers)
    return GraphCosts(costs, found.peaks, found.batch_size, found.edge_bytes, layer_ns)
