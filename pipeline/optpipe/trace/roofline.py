"""The least time of a model and of its layers on a device, compared with the measured time.

Arithmetic intensity and the two ceilings after Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model" (CACM 2009). Two figures for the whole model, at the given peaks:

- the bound: all arithmetic, or the model's inputs, weights, and outputs moved once, whichever takes longer. No fusion gets
  below it; weights that stay in a cache may, and fewer multiplications than the direct algorithm's (Winograd).
- the layers: one after the other, elementwise operators computed on their producer's registers.

A fused elementwise operator computes on its producer's registers: only tensors between such groups are moved, written once
and read once by each group that needs them (a skip connection is read again by the group that adds it). The scores between
the two products of an attention are not moved at all (Dao et al., "FlashAttention", 2022). Subgraphs of constants are
computed before the run.

Peaks come from a short measurement, which other work on the machine may slow down. A measured time below a bound shows that
the bound is none: a layer then has none, and where it is the whole inference, or the arithmetic of all timed layers, nothing
follows from the peaks (`Roofline.contradiction`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from optpipe.backends.onnx_graph import load_onnx
from optpipe.backends.onnx_layers import infer_graph_types
from optpipe.backends.onnx_products import count_node_macs
from optpipe.core import torch
from optpipe.core.card import InputSpec
from optpipe.core.records import group_pairs
from optpipe.measure.trials import time_calls
from optpipe.workspace.environment import count_cores

_CPU_REPEATS, _GPU_REPEATS, _GPU_ROUNDS = 20, 5, 4
ALIGNMENT = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}
"""Channels of a matrix layer must be multiples of this, by type (NVIDIA, "Matrix Multiplication Background")."""
LIMITED_SHARE = 0.7
"""Over 70% of a peak, that peak limits a model."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """A device's peak rates. `flops_per_s` by type counts a MAC as two operations; a type without an entry counts as fp32."""

    device: str
    source: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float


def measure_gpu_peaks() -> Peaks:
    """Measures for about a second: square matrix products of all types that torch can multiply, and a copy of 1 GiB."""
    size = 8192
    rates: dict[str, float] = {}
    allowed = torch.backends.cuda.matmul.allow_tf32
    kinds = {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }
    for kind, dtype in kinds.items():
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        left, right = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        rates[kind] = 2 * size**3 / _time_best_gpu_run(lambda a=left, b=right: a @ b)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = allowed
    whole, other_whole = (
        torch.randint(-8, 8, (size, size), device="cuda", dtype=torch.int8) for _ in range(2)
    )
    with suppress(RuntimeError):
        rates["int8"] = (
            2 * size**3 / _time_best_gpu_run(lambda: torch._int_mm(whole, other_whole.t()))
        )
    buffer = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(buffer)
    bandwidth = 2 * buffer.numel() / _time_best_gpu_run(lambda: target.copy_(buffer))
    return Peaks(torch.cuda.get_device_name(), "measured", rates, bandwidth)


def measure_cpu_peaks(threads: int | None = None) -> Peaks:
    """Measures the CPU for about a second: float32 matrix products and a copy of 256 MiB, on `threads`, by default all.

    OMP_NUM_THREADS may limit torch's own number of threads, which need not be that of the judged runtime.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or count_cores())
    try:
        squares = [torch.randn(size, size) for size in (512, 1024)]
        rate = max(
            2 * len(square) ** 3 / _time_best_cpu_run(partial(torch.matmul, square, square))
            for square in squares
        )
        buffer = torch.zeros(1 << 28, dtype=torch.uint8)
        target = torch.zeros_like(buffer)
        bandwidth = 2 * buffer.numel() / _time_best_cpu_run(lambda: target.copy_(buffer))
    finally:
        torch.set_num_threads(before)
    return Peaks("CPU", "measured", {"fp32": rate}, bandwidth)


def _time_best_cpu_run(work: Callable[[], Any]) -> float:
    """Seconds of the fastest call after the first."""
    work()
    return (
        min(ended - started for started, _, ended in islice(time_calls(work), _CPU_REPEATS)) / 1e9
    )


def _time_best_gpu_run(work: Callable[[], Any]) -> float:
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
class NodeCost:
    """Multiply-adds and memory traffic of all nodes with one name."""

    name: str
    op: str
    type: str
    macs: int
    bytes: int
    channels: tuple[int, int] | None = None
    """Input and output channels of a matrix product, per group of a convolution."""
    fused_bytes: int | None = None
    """`bytes` with elementwise operators fused, including those that join this layer; 0 if it joins another layer, None if
    nothing is fused."""


def compute_math_ns(cost: NodeCost, peaks: Peaks) -> float:
    return 2 * cost.macs / (peaks.flops_per_s.get(cost.type) or peaks.flops_per_s["fp32"]) * 1e9


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
    """One layer as a separate node against its bound; `measured_ns` is None if its time is not known."""

    cost: NodeCost
    intensity: float
    bound_ns: float
    measured_ns: float | None

    @property
    def is_contradicted(self) -> bool:
        """Whether the layer is faster than its bound, which is then none."""
        return self.measured_ns is not None and self.measured_ns < self.bound_ns

    @property
    def above_bound_ns(self) -> float:
        """The largest possible gain; the bound itself if the layer's time is not known."""
        return self.measured_ns - self.bound_ns if self.measured_ns is not None else self.bound_ns


@dataclass(frozen=True, slots=True)
class Roofline:
    """The whole model by two measures (see the module), and its layers, farthest above their bound first."""

    peaks: Peaks
    batch_size: int
    macs: int
    edge_bytes: int
    bound_ns: float
    """All arithmetic except that of `types_without_peak`, or `edge_bytes` moved once, whichever takes longer."""
    types_without_peak: tuple[str, ...]
    """Types whose arithmetic the bound leaves out: they may run faster than fp32."""
    layers_ns: float
    """The layers one after the other at the peaks, with elementwise operators fused."""
    math_share: float
    """Share of `layers_ns` in layers whose arithmetic takes longer than their bytes."""
    measured_ns: float | None
    times_bound: float | None
    """None if the inference is not measured, or faster than the bound."""
    layers: tuple[LayerRoof, ...]

    @property
    def contradiction(self) -> tuple[float, float] | None:
        """A measured time in ns and the longer one that the peaks require for the same; None if all can be true.

        The whole inference is compared with its bound, and the layers that were timed with their arithmetic.
        """
        if self.measured_ns is not None and self.measured_ns < self.bound_ns:
            return self.measured_ns, self.bound_ns
        timed = [
            (layer.measured_ns, compute_math_ns(layer.cost, self.peaks))
            for layer in self.layers
            if layer.measured_ns and layer.cost.macs and layer.cost.type in self.peaks.flops_per_s
        ]
        measured_ns, math_ns = (
            (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 0)
        )
        return (measured_ns, math_ns) if measured_ns < math_ns else None


def compute_roofline(
    graph: GraphCosts, measured_ns: float | None = None, layer_ns: Mapping[str, float] | None = None
) -> Roofline:
    """`measured_ns` is one inference, `layer_ns` the times of its layers, if known."""
    costs, peaks = graph.costs, graph.peaks
    known_ns = layer_ns or graph.layer_ns
    layers = []
    for cost in costs:
        intensity = 2 * cost.macs / cost.bytes if cost.bytes else 0.0
        bound_ns = max(compute_math_ns(cost, peaks), compute_memory_ns(cost, peaks))
        layers.append(LayerRoof(cost, intensity, bound_ns, known_ns.get(cost.name)))
    known_math_ns = sum(
        compute_math_ns(cost, peaks) for cost in costs if cost.type in peaks.flops_per_s
    )
    fused = [
        cost if cost.fused_bytes is None else replace(cost, bytes=cost.fused_bytes)
        for cost in costs
    ]
    times = [(compute_math_ns(cost, peaks), compute_memory_ns(cost, peaks)) for cost in fused]
    layers_ns, by_math_ns = (
        sum(map(max, times)),
        sum(math for math, memory in times if math >= memory),
    )
    bound_ns = max(known_math_ns, graph.edge_bytes / peaks.bytes_per_s * 1e9)
    return Roofline(
        peaks=peaks,
        batch_size=graph.batch_size,
        macs=sum(cost.macs for cost in costs),
        edge_bytes=graph.edge_bytes,
        bound_ns=bound_ns,
        types_without_peak=tuple(
            sorted({cost.type for cost in costs if cost.macs} - set(peaks.flops_per_s))
        ),
        layers_ns=layers_ns,
        math_share=by_math_ns / layers_ns if layers_ns else 0.0,
        measured_ns=measured_ns,
        times_bound=measured_ns / bound_ns
        if bound_ns and measured_ns and measured_ns >= bound_ns
        else None,
        layers=tuple(sorted(layers, key=lambda layer: (-layer.above_bound_ns, layer.cost.name))),
    )


def graph_costs_from_roofline(roofline: Roofline) -> GraphCosts:
    """The inputs of `compute_roofline`; costs are in the order of its layers."""
    layer_ns = {
        layer.cost.name: layer.measured_ns for layer in roofline.layers if layer.measured_ns
    }
    costs = tuple(layer.cost for layer in roofline.layers)
    return GraphCosts(costs, roofline.peaks, roofline.batch_size, roofline.edge_bytes, layer_ns)


_TYPE_BYTES = {
    "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1, "fp64": 8, "int64": 8, "int32": 4, "bool": 1,
}  # fmt: skip
_CAST = ("fp16", "bf16")
"""Types that a runtime may cast a whole FP32 graph to."""
_VIEWS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""The same bytes under another name."""
_NO_COST = _VIEWS | {"Constant", "Shape"}
_ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "BatchNormalization", "Cast", "Ceil", "Clip", "Cos", "DequantizeLinear", "Div", "Elu", "Equal",
    "Erf", "Exp", "Floor", "Gelu", "Greater", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "Log", "Max", "Min",
    "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu",
    "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where",
})  # fmt: skip


def graph_costs_from_onnx(
    path: Path,
    inputs: Sequence[InputSpec],
    batch_size: int,
    peaks: Peaks,
    *,
    precision: str = "fp32",
) -> GraphCosts:
    """The costs of a build in `precision`; products of dequantized tensors count as INT8.

    The graph of a TF32 build is in FP32, and so is that of an FP16 build whose runtime casts it: all its FP32 counts as the build's type.
    """
    model = load_onnx(path, weights=False)
    sized = [
        spec
        if limits is None
        else spec.with_batch(min(limits[0], batch_size), batch_size, max(limits[2], batch_size))
        for spec, limits in ((spec, spec.batch_range) for spec in inputs)
    ]
    known = infer_graph_types(model, sized)
    nodes = [node for node in model.graph.node if node.output]
    tf32 = precision == "tf32"
    if precision in _CAST and precision not in known.types.values():
        types = {name: precision if kind == "fp32" else kind for name, kind in known.types.items()}
        known = known._replace(types=types)
    fused, edge_bytes = _sum_fused_traffic(model.graph, nodes, known)
    quantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    costs = []
    for index, node in enumerate(nodes):
        if node.op_type not in _NO_COST:
            macs = count_node_macs(node, known) or 0
            kind = known.types.get(node.input[0], "fp32") if node.input else "fp32"
            if macs:
                kind = (
                    "int8"
                    if node.input[0] in quantized
                    else "tf32"
                    if tf32 and kind == "fp32"
                    else kind
                )
            moved = {
                name: _read_bytes(node, name, known, _tensor_bytes(known, name))
                for name in node.input
                if name
            }
            moved |= {
                name: _tensor_bytes(known, name)
                for name in node.output
                if name and name not in moved
            }
            channels = _get_channels(node, known) if macs else None
            label = node.name or node.output[0]
            costs.append(
                NodeCost(
                    label, node.op_type, kind, macs, sum(moved.values()), channels, fused[index]
                )
            )
    return GraphCosts(tuple(costs), peaks, batch_size, edge_bytes)


def _sum_fused_traffic(graph: Any, nodes: Sequence[Any], known: Any) -> tuple[list[int], int]:
    """Bytes between groups, listed at each group's leader, and the bytes that no fusion saves: inputs, weights, outputs."""
    same = _find_same_tensors(nodes, frozenset(output.name for output in graph.output))
    constants = _sum_constants(graph, nodes, known)
    scores = _find_scores(nodes, same)
    leaders = _find_leaders(nodes, same, constants, scores)
    results = {same.get(output.name, output.name) for output in graph.output}
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
            size = _read_bytes(
                node, name, known, constants.get(tensor, _tensor_bytes(known, tensor))
            )
            read[leader][tensor] = max(size, read[leader].get(tensor, 0))
            if writer is None:
                edges[tensor] = max(size, edges.get(tensor, 0))
            else:
                written[writer][tensor] = _tensor_bytes(known, tensor)
        for name in filter(None, node.output):
            written_by[name] = leader
            if name in results:
                written[leader][name] = edges[name] = _tensor_bytes(known, name)
    moved = [
        sum(reads.values()) + sum(writes.values())
        for reads, writes in zip(read, written, strict=True)
    ]
    return moved, sum(edges.values())


def _find_same_tensors(nodes: Sequence[Any], results: frozenset[str]) -> dict[str, str]:
    """Maps a view to its base, and a dequantized tensor to its quantized form."""
    same: dict[str, str] = {}
    for node in nodes:
        if node.op_type in _VIEWS or (
            node.op_type == "DequantizeLinear" and node.output[0] not in results
        ):
            same[node.output[0]] = same.get(node.input[0], node.input[0])
    return same


def _sum_constants(graph: Any, nodes: Sequence[Any], known: Any) -> dict[str, int]:
    """Bytes of constants and of tensors computed only from constants: their own or their sources', whichever is smaller."""
    sizes = {tensor.name: _tensor_bytes(known, tensor.name) for tensor in graph.initializer}
    for node in nodes:
        given = [name for name in node.input if name]
        if (given or node.op_type == "Constant") and all(name in sizes for name in given):
            sources = sum(sizes[name] for name in dict.fromkeys(given))
            for name in node.output:
                size = _tensor_bytes(known, name)
                sizes[name] = min(size, sources) if given else size
    return sizes


def _find_leaders(
    nodes: Sequence[Any],
    same: Mapping[str, str],
    constants: Mapping[str, int],
    scores: frozenset[str],
) -> dict[int, int]:
    """The first node of each node's group: an elementwise node joins its last producer. Views and constants have none."""
    leaders: dict[int, int] = {}
    group: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if (
            node.op_type in _NO_COST
            or node.output[0] in same
            or all(name in constants for name in node.output)
        ):
            continue
        producers = [
            group[tensor] for name in node.input if (tensor := same.get(name, name)) in group
        ]
        joins = node.op_type in _ELEMENTWISE or node.output[0] in scores
        leaders[index] = max(producers) if joins and producers else index
        group |= dict.fromkeys(node.output, leaders[index])
    return leaders


def _find_scores(nodes: Sequence[Any], same: Mapping[str, str]) -> frozenset[str]:
    """Outputs of a Softmax that only matrix products read."""
    softmax = {node.output[0] for node in nodes if node.op_type == "Softmax"}
    reading = (node for node in nodes if node.output[0] not in same)
    readers = group_pairs(
        (same.get(name, name), node.op_type) for node in reading for name in node.input
    )
    return frozenset(name for name in softmax if set(readers.get(name, ())) == {"MatMul"})


def _read_bytes(node: Any, name: str, known: Any, size: int) -> int:
    """Gather reads only the rows that it picks."""
    picks = node.op_type == "Gather" and name == node.input[0]
    return min(size, _tensor_bytes(known, node.output[0])) if picks else size


def _tensor_bytes(known: Any, name: str) -> int:
    shape = known.shapes.get(name)
    return (
        prod(shape) * _TYPE_BYTES.get(known.types.get(name, "fp32"), 4) if shape is not None else 0
    )


def _get_channels(node: Any, known: Any) -> tuple[int, int] | None:
    """Input and output channels per group: axes 1 and 0 of a convolution's weight, the last two of a product's."""
    weight = known.shapes.get(node.input[1]) if len(node.input) > 1 else None
    if not weight or len(weight) < 2:
        return None
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    return (weight[1], weight[0] // groups) if "Conv" in node.op_type else (weight[-2], weight[-1])


_FUSED_DEPTH = 4
"""Nodes that may follow the product in a fused convolution: bias, sum, activation."""
_PRODUCTS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", "ConvInteger", "QLinearConv"}
)


def sum_layer_times(graph: Path, node_ns: Mapping[str, float]) -> dict[str, float]:
    """Times by the names of `graph`'s nodes; nodes of ONNX Runtime's own are left out.

    The CPU provider names a blocked convolution after the tensor that it writes (`relu_3_nchwc`): its node is the product that
    elementwise steps follow.
    """
    nodes = list(load_onnx(graph, weights=False).graph.node)
    known = {node.name for node in nodes}
    writers = {output: node for node in nodes for output in node.output}
    times: dict[str, float] = {}
    for runtime_name, ns in node_ns.items():
        plain = runtime_name.removeprefix("fused ")
        name = (
            plain
            if plain in known
            else _find_product_behind(plain.removesuffix("_nchwc"), writers, set(times))
        )
        if name is not None:
            times[name] = times.get(name, 0.0) + ns
    return times


def _find_product_behind(tensor: str, writers: Mapping[str, Any], taken: set[str]) -> str | None:
    """The nearest product upstream of `tensor` that is not in `taken`."""
    wave = [tensor]
    for _ in range(_FUSED_DEPTH):
        nodes = [writers[name] for name in wave if name in writers]
        for node in nodes:
            if node.op_type in _PRODUCTS and node.name not in taken:
                return str(node.name)
        wave = [name for node in nodes if node.op_type not in _PRODUCTS for name in node.input]
    return None
