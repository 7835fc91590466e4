"""The least time of a model and of its layers on a device, compared with the measured time.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Three figures for the whole model, at the given peaks:

- the bound: all arithmetic, or the model's inputs, weights, and outputs moved once, whichever takes longer. No fusion gets
  below it; weights that stay in a cache may, and fewer multiplications than the direct algorithm's (Winograd).
- fused: layer after layer, elementwise operators computed on their producer's registers.
- unfused: node after node, each moving its own inputs, weights, and outputs.

A fused elementwise operator computes on its producer's registers: only tensors between such groups are moved, written once
and read once by each group that needs them (a skip connection is read again by the group that adds it). The scores between
the two products of an attention are not moved at all (Dao et al., "FlashAttention", 2022). Subgraphs of constants are
computed before the run.

Peaks come from a short measurement, or from data sheets: NVIDIA H100/H200/A100/L4/L40S/A10/T4/V100 and B200 product pages;
dense rates, without sparsity.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from optpipe.backends.base import NodeCost, NodeRun, ProgramCosts
from optpipe.backends.onnx_graph import load_onnx
from optpipe.core.card import InputSpec
from optpipe.core.errors import StageError
from optpipe.measure.trials import time_call
from optpipe.trace.analysis import array_from_column
from optpipe.trace.nsys import ITERATION_RANGE, LAYERS_RANGE
from optpipe.trace.read import NAME_DTYPE, RANGE_SCHEMA, Trace
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


def compute_math_ns(cost: NodeCost, peaks: Peaks) -> float:
    return 2 * cost.macs / peaks.flops(cost.type) * 1e9


def compute_memory_ns(cost: NodeCost, peaks: Peaks) -> float:
    return cost.bytes / peaks.bytes_per_s * 1e9


def explain_ineligible(cost: NodeCost) -> str | None:
    """The reason why Tensor Cores cannot run a matrix layer: its type, or channels that are not aligned."""
    multiple = ALIGNMENT.get(cost.type)
    if multiple is None:
        return f"there are no Tensor Cores for {cost.type}; use fp16 or tf32"
    if cost.channels and any(channels % multiple for channels in cost.channels):
        return f"channels {cost.channels[0]} and {cost.channels[1]} are not multiples of {multiple}"
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

    costs: tuple[NodeCost, ...]
    peaks: Peaks
    batch_size: int
    edge_bytes: int = 0
    """Bytes that no fusion can save: the model's inputs, weights, and outputs."""
    layer_ns: Mapping[str, float] = field(default_factory=dict)
    """Times of layers that the recording does not contain."""


@dataclass(frozen=True, slots=True)
class LayerRoof:
    """One layer as a separate node against its bound; shares are None if its time is not known."""

    cost: NodeCost
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
        ns, math_ns, memory_ns = known_ns.get(cost.name), compute_math_ns(cost, peaks), compute_memory_ns(cost, peaks)
        math, memory = (math_ns / ns, memory_ns / ns) if ns else (None, None)
        quadrant = _classify(math, memory) if math is not None and memory is not None else None
        intensity = 2 * cost.macs / cost.bytes if cost.bytes else 0.0
        layers.append(LayerRoof(cost, intensity, max(math_ns, memory_ns), ns, math, memory, quadrant))
    known_math_ns = sum(compute_math_ns(each, peaks) for each in costs if each.type in peaks.flops_per_s)
    fused = [each if each.fused_bytes is None else replace(each, bytes=each.fused_bytes) for each in costs]
    bound_ns = max(known_math_ns, graph.edge_bytes / peaks.bytes_per_s * 1e9)
    return Roofline(
        peaks=peaks,
        batch_size=graph.batch_size,
        macs=sum(each.macs for each in costs),
        edge_bytes=graph.edge_bytes,
        bound_ns=bound_ns,
        types_without_peak=tuple(sorted({each.type for each in costs if each.macs} - set(peaks.flops_per_s))),
        fused=_sum_costs(fused, peaks),
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


def _sum_costs(costs: Sequence[NodeCost], peaks: Peaks) -> TotalCost:
    times = [(compute_math_ns(each, peaks), compute_memory_ns(each, peaks)) for each in costs]
    total, by_math = sum(map(max, times)), sum(math for math, memory in times if math >= memory)
    return TotalCost(sum(each.bytes for each in costs), total, by_math / total if total else 0.0)


def graph_costs_from_roofline(found: Roofline) -> GraphCosts:
    """The inputs of `compute_roofline`; costs are in the order of its layers."""
    layer_ns = {each.cost.name: each.measured_ns for each in found.layers if each.measured_ns}
    costs = tuple(each.cost for each in found.layers)
    return GraphCosts(costs, found.peaks, found.batch_size, found.edge_bytes, layer_ns)


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
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""The same bytes under another name."""
_NO_COST = _VIEWS | {"Constant", "Shape"}
_ELEMENTWISE = frozenset(
    {
        "Abs", "Add", "And", "BatchNormalization", "Cast", "Ceil", "Clip", "Cos", "DequantizeLinear", "Div", "Elu", "Equal",
        "Erf", "Exp", "Floor", "Gelu", "Greater", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "Log", "Max", "Min",
        "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu",
        "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where",
    }
)  # fmt: skip
_PRODUCT = "MatMul"


def graph_costs_from_onnx(
    path: Path, inputs: Sequence[InputSpec], batch_size: int, peaks: Peaks, *, tf32: bool = False
) -> GraphCosts:
    """With `tf32`, products of fp32 tensors count as TF32; products of dequantized tensors count as INT8."""
    from optpipe.backends.onnx_graph import count_node_macs, infer_graph_types

    model = load_onnx(path, weights=False)
    ranges = ((each, each.batch_range) for each in inputs)
    sized = [
        each if found is None else each.with_batch(min(found[0], batch_size), batch_size, max(found[2], batch_size))
        for each, found in ranges
    ]
    known = infer_graph_types(model, sized)
    nodes = [node for node in model.graph.node if node.output]
    fused, edge_bytes = _sum_fused_traffic(model.graph, nodes, known)
    quantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    costs = []
    for index, node in enumerate(nodes):
        if node.op_type not in _NO_COST:
            macs = count_node_macs(node, known)
            kind = known.types.get(node.input[0], "fp32") if node.input else "fp32"
            if macs:
                kind = "int8" if node.input[0] in quantized else "tf32" if tf32 and kind == "fp32" else kind
            moved = {name: _read_bytes(node, name, known, _tensor_bytes(known, name)) for name in node.input if name}
            moved |= {name: _tensor_bytes(known, name) for name in node.output if name and name not in moved}
            channels = _get_channels(node, known) if macs else None
            label = node.name or node.output[0]
            costs.append(NodeCost(label, node.op_type, kind, macs, sum(moved.values()), channels, fused[index]))
    return GraphCosts(tuple(costs), peaks, batch_size, edge_bytes)


def graph_costs_from_program(program: ProgramCosts, batch_size: int, peaks: Peaks, *, tf32: bool = False) -> GraphCosts:
    """The nodes of a torch program are its kernels, so none is fused into another."""
    nodes, edge_bytes = program
    costs = (replace(node, type="tf32") if tf32 and node.macs and node.type == "fp32" else node for node in nodes)
    return GraphCosts(tuple(costs), peaks, batch_size, edge_bytes)


def _sum_fused_traffic(graph: Any, nodes: Sequence[Any], known: Any) -> tuple[list[int], int]:
    """Bytes between groups, listed at each group's leader, and the bytes that no fusion saves: inputs, weights, outputs."""
    same = _find_same_tensors(nodes, frozenset(each.name for each in graph.output))
    constants = _sum_constants(graph, nodes, known)
    scores = _find_scores(nodes, same)
    leaders = _find_leaders(nodes, same, constants, scores)
    results = {same.get(each.name, each.name) for each in graph.output}
    written_by: dict[str, int] = {}
    read: list[dict[str, int]] = [{} for _ in nodes]
    written: list[dict[str, int]] = [{} for _ in nodes]
    edges: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if index not in leaders:
            continue
        leader = leaders[index]
        for name in filter(None, node.input):
            tensor = same.get(name, name)
            writer = written_by.get(tensor)
            if writer == leader or tensor in scores:
                continue
            size = _read_bytes(node, name, known, constants.get(tensor, _tensor_bytes(known, tensor)))
            _keep_larger(read[leader], tensor, size)
            if writer is None:
                _keep_larger(edges, tensor, size)
            else:
                written[writer][tensor] = _tensor_bytes(known, tensor)
        for name in filter(None, node.output):
            written_by[name] = leader
            if name in results:
                written[leader][name] = edges[name] = _tensor_bytes(known, name)
    moved = [sum(each.values()) + sum(other.values()) for each, other in zip(read, written, strict=True)]
    return moved, sum(edges.values())


def _keep_larger(sizes: dict[str, int], tensor: str, size: int) -> None:
    sizes[tensor] = max(size, sizes.get(tensor, 0))


def _find_same_tensors(nodes: Sequence[Any], results: frozenset[str]) -> dict[str, str]:
    """Maps a view to its base, and a dequantized tensor to its quantized form."""
    same: dict[str, str] = {}
    for node in nodes:
        if node.op_type in _VIEWS or (node.op_type == "DequantizeLinear" and node.output[0] not in results):
            same[node.output[0]] = same.get(node.input[0], node.input[0])
    return same


def _sum_constants(graph: Any, nodes: Sequence[Any], known: Any) -> dict[str, int]:
    """Bytes of constants and of tensors computed only from constants: their own or their sources', whichever is smaller."""
    found = {each.name: _tensor_bytes(known, each.name) for each in graph.initializer}
    for node in nodes:
        given = [name for name in node.input if name]
        if (given or node.op_type == "Constant") and all(name in found for name in given):
            sources = sum(found[name] for name in dict.fromkeys(given))
            for name in node.output:
                size = _tensor_bytes(known, name)
                found[name] = min(size, sources) if given else size
    return found


def _find_leaders(
    nodes: Sequence[Any], same: Mapping[str, str], constants: Mapping[str, int], scores: frozenset[str]
) -> dict[int, int]:
    """The first node of each node's group: an elementwise node joins its last producer. Views and constants have none."""
    leaders: dict[int, int] = {}
    group: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.op_type in _NO_COST or node.output[0] in same or all(name in constants for name in node.output):
            continue
        producers = [group[tensor] for name in node.input if (tensor := same.get(name, name)) in group]
        joins = node.op_type in _ELEMENTWISE or node.output[0] in scores
        leaders[index] = max(producers) if joins and producers else index
        group |= dict.fromkeys(node.output, leaders[index])
    return leaders


def _find_scores(nodes: Sequence[Any], same: Mapping[str, str]) -> frozenset[str]:
    """Outputs of a Softmax that only matrix products read."""
    softmax = {node.output[0] for node in nodes if node.op_type == "Softmax"}
    readers: dict[str, set[str]] = {}
    for node in nodes:
        if node.output[0] not in same:
            for name in node.input:
                readers.setdefault(same.get(name, name), set()).add(node.op_type)
    return frozenset(name for name in softmax if readers.get(name) == {_PRODUCT})


def _read_bytes(node: Any, name: str, known: Any, size: int) -> int:
    """Gather reads only the rows that it picks."""
    picks = node.op_type == "Gather" and name == node.input[0]
    return min(size, _tensor_bytes(known, node.output[0])) if picks else size


def _tensor_bytes(known: Any, name: str) -> int:
    shape = known.shapes.get(name)
    return prod(shape) * _TYPE_BYTES.get(known.types.get(name, "fp32"), 4) if shape is not None else 0


def _get_channels(node: Any, known: Any) -> tuple[int, int] | None:
    """Input and output channels per group: axes 1 and 0 of a convolution's weight, the last two of a product's."""
    weight = known.shapes.get(node.input[1]) if len(node.input) > 1 else None
    if not weight or len(weight) < 2:
        return None
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    return (weight[1], weight[0] // groups) if "Conv" in node.op_type else (weight[-2], weight[-1])


_FUSED_DEPTH = 4
"""Nodes that may follow the product in a fused convolution: bias, sum, activation."""
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", "ConvInteger", "QLinearConv"})
_NHWC_SUFFIX = re.compile(r"_token_\d+$")
_STEP_NS = 100
_TICK_NS = 1_000
"""The profile truncates its times to whole microseconds."""
_APART_NS = 50_000
"""Launches follow each other faster than this, so clocks must be aligned more closely."""


class ClockAnchor(NamedTuple):
    """System-clock times just before a range opens, just inside it at both ends, and just after it closes."""

    before_ns: int
    entered_ns: int
    leaving_ns: int
    after_ns: int


def add_node_ranges(
    trace: Trace, runs: Sequence[NodeRun], anchors: Sequence[ClockAnchor], names: Mapping[str, str]
) -> Trace:
    """Adds a range for every node that ran inside the marked iterations; `names` maps runtime names to layer names.

    Raises StageError if these iterations are not in the recording, or the clocks cannot be aligned.
    """
    name = pl.col("name").cast(pl.String)
    layers = trace.ranges.filter(name == LAYERS_RANGE)
    if layers.is_empty():
        raise StageError("the recording has no layer iterations: it ended before them")
    within = (pl.col("start_ns") >= layers["start_ns"][0]) & (pl.col("end_ns") <= layers["end_ns"][0])
    iterations = trace.ranges.filter((name == ITERATION_RANGE) & within).sort("start_ns")
    offset_ns = _choose_offset_ns(trace, iterations, runs, estimate_clock_offsets_ns(iterations, anchors))
    thread = int(iterations["thread"][0])
    starts, ends = iterations["start_ns"].to_list(), iterations["end_ns"].to_list()
    rows = []
    for first, second in zip(runs, [*runs[1:], None], strict=True):
        start, end = first.start_ns - offset_ns, first.end_ns - offset_ns
        following = second.start_ns - offset_ns if second else end
        # the profile truncates both ends; a node that holds others (If, Loop) stays whole
        until = following if abs(end - following) <= 2 * _TICK_NS else end + _TICK_NS
        inside = next((i for i, begin in enumerate(starts) if begin <= start and until <= ends[i]), None)
        if inside is not None:
            rows.append((start, max(until, start + 1), thread, names.get(first.name, first.name)))
    added = pl.DataFrame(rows, schema={**RANGE_SCHEMA, "name": pl.String}, orient="row").with_columns(
        pl.col("name").cast(NAME_DTYPE)
    )
    return replace(trace, ranges=pl.concat([trace.ranges, added]).sort("start_ns", maintain_order=True))


def estimate_clock_offsets_ns(iterations: pl.DataFrame, anchors: Sequence[ClockAnchor]) -> tuple[int, int]:
    """The range of the system clock's offset from the recording's that all `anchors` allow.

    Raises StageError if the numbers of iterations differ, or the anchors contradict each other by more than 50 µs.
    """
    if iterations.height != len(anchors) or not anchors:
        raise StageError(f"the recording has {iterations.height} layer iterations, but {len(anchors)} were run")
    starts, ends = iterations["start_ns"].to_list(), iterations["end_ns"].to_list()
    places = list(zip(anchors, starts, ends, strict=True))
    least = max(max(each.before_ns - start, each.leaving_ns - end) for each, start, end in places)
    most = min(min(each.entered_ns - start, each.after_ns - end) for each, start, end in places)
    if abs(most - least) > _APART_NS:
        raise StageError(f"the profiler and system clocks can be aligned only to {abs(most - least) / 1e3:.0f} µs")
    return min(least, most), max(least, most)


def _choose_offset_ns(trace: Trace, iterations: pl.DataFrame, runs: Sequence[NodeRun], allowed: tuple[int, int]) -> int:
    """The allowed offset at which most launches lie inside one node: the anchors leave some microseconds open."""
    inside = (pl.col("start_ns") >= iterations["start_ns"].min()) & (pl.col("end_ns") <= iterations["end_ns"].max())
    launches = trace.api.filter(inside).join(trace.kernels.select("correlation_id"), on="correlation_id", how="semi")
    candidates = np.arange(allowed[0], allowed[1] + 1, _STEP_NS)
    if launches.is_empty() or not runs:
        return int(candidates[candidates.size // 2])
    starts, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("start_ns", "end_ns"))
    called, returned = array_from_column(launches, "start_ns"), array_from_column(launches, "end_ns")

    def held(offset: int) -> int:
        node = np.maximum(np.searchsorted(starts - offset, called, side="right") - 1, 0)
        return int(((starts[node] - offset <= called) & (returned <= ends[node] - offset + _TICK_NS)).sum())

    counts = np.array([held(int(offset)) for offset in candidates])
    best = candidates[counts == counts.max()]
    return int(best[best.size // 2])


def match_source_names(graph: Path, runtime_names: Sequence[str]) -> dict[str, str]:
    """Maps ONNX Runtime's node names to the names of `graph`'s nodes; unknown ones are left out.

    The CUDA provider's NHWC conversion numbers a node that keeps its name (`_token_12`). The CPU provider names a blocked
    convolution after the tensor that it writes (`relu_3_nchwc`): its node is the product that elementwise steps follow.
    """
    nodes = list(load_onnx(graph, weights=False).graph.node)
    known = {node.name for node in nodes}
    writers = {output: node for node in nodes for output in node.output}
    found: dict[str, str] = {}
    for name in dict.fromkeys(runtime_names):
        plain = _NHWC_SUFFIX.sub("", name.removeprefix("fused "))
        if plain in known:
            found[name] = plain
        elif (product := _find_product_behind(plain.removesuffix("_nchwc"), writers, set(found.values()))) is not None:
            found[name] = product
    return found


def sum_layer_times(graph: Path, node_ns: Mapping[str, float]) -> dict[str, float]:
    times: dict[str, float] = {}
    for runtime_name, name in match_source_names(graph, list(node_ns)).items():
        times[name] = times.get(name, 0.0) + node_ns[runtime_name]
    return times


def _find_product_behind(tensor: str, writers: Mapping[str, Any], taken: set[str]) -> str | None:
    """The nearest product upstream of `tensor` that is not in `taken`."""
    wave = [tensor]
    for _ in range(_FUSED_DEPTH):
        found = [writers[each] for each in wave if each in writers]
        for node in found:
            if node.op_type in _PRODUCTS and node.name not in taken:
                return str(node.name)
        wave = [each for node in found if node.op_type not in _PRODUCTS for each in node.input]
    return None
