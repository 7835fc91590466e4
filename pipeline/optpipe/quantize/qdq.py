"""Chooses the layers for INT8 or FP8, and writes their Q/DQ nodes into an ONNX graph.

TensorRT and ONNX Runtime need different INT8 graphs. TensorRT fuses a convolution with the ReLU and the residual addition
after it when only *inputs* are quantized: no Q/DQ between convolution, addition and ReLU, and one on the shortcut's branch
of the addition, so that the fused kernel reads it as INT8 (TensorRT developer guide, "Q/DQ placement recommendations"). ONNX
Runtime's CPU provider fuses an operator only if its *output* is quantized too. The target `fp8` is torch's: the inputs of
linear layers, in E4M3.

Weights are per-channel and symmetric (FP8: per-tensor), activations per-tensor.

For TensorRT activations are symmetric INT8 with zero point 0. ONNX Runtime's CPU kernels are fastest, and can fuse a
ReLU, with unsigned activations: UINT8 from the smallest to the largest value, each cut at the range's bound, so that the levels
of the short side of a Swish or an input are not lost. A scale is never 0, NaN or inf.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import ceil, log2
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import (
    WEIGHTED_OPS,
    OnnxGraph,
    list_read_names,
    name_nodes,
    rename_inner_twins,
    replace_nodes,
)
from optpipe.core import onnx
from optpipe.core.entries import SkippedLayer
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.plan import for_workspace
from optpipe.quantize.ranges import CalibrationTable, TensorRange

Target = Literal["tensorrt", "cpu", "fp8"]
_ACTIVATIONS = ("Relu", "Clip")
FP8_MULTIPLE = 16
"""Divides a weight's sizes (PyTorch, `torch._scaled_mm`)."""
_MIN_CHANNELS: dict[Target, int] = {"tensorrt": 16, "cpu": 1}
"""Input channels of a group below which a convolution stays in floating point. INT8 Tensor Core kernels take 16 at a time; a
CPU's take any number, and with depthwise and narrow ones in INT8 no tensor is converted between them: 0.62 to 1.01 of the
time (`benchmarks/README.md`).
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers` by name; `edges` are the (node, input position) pairs that read a dequantized tensor."""

    target: Target
    layers: tuple[str, ...]
    edges: tuple[tuple[str, int], ...]
    tensors: tuple[str, ...]
    """The activations that need a range, in the graph's order, each once."""
    skipped: tuple[SkippedLayer, ...]
    after: tuple[str, ...] = ()
    """Tensors whose Q/DQ serves every consumer: on `cpu`, the outputs of quantized layers."""


def place_qdq(
    model: Any,
    target: Target,
    keep: Callable[[str], bool] = lambda _: False,
    unseen: Collection[str] = (),
) -> Placement:
    """Decides for every layer of `model`. Layers for which `keep` holds stay in floating point.

    So do readers of the tensors `unseen`, which were zero in all calibration data: any other value would be clipped to zero.
    """
    graph = OnnxGraph(name_nodes(model))
    layers, skipped = [], []
    for node in model.graph.node:
        if node.op_type not in WEIGHTED_OPS:
            continue
        obstacle = _find_obstacle(node, graph, target) or (
            "its input was zero in all calibration data" if node.input[0] in unseen else None
        )
        reason = "kept in floating point by request" if keep(node.name) else obstacle
        skipped.append(SkippedLayer(node.name, reason)) if reason else layers.append(node)
    skipped += _list_inner_layers(model.graph)
    edges = [(node.name, 0) for node in layers]
    after: list[str] = []
    if target == "tensorrt":
        edges += _find_shortcuts(layers, graph)
    elif target == "cpu":
        after = [name for name in _find_outputs(layers, graph) if name not in unseen]
    by_name = {node.name: node for node in model.graph.node}
    edges = [
        (name, position) for name, position in edges if by_name[name].input[position] not in unseen
    ]
    needed = {by_name[name].input[position] for name, position in edges} | set(after)
    order = [each.name for each in model.graph.input] + [
        out for node in model.graph.node for out in node.output
    ]
    return Placement(
        target=target,
        layers=tuple(node.name for node in layers),
        edges=tuple(edges),
        tensors=tuple(name for name in order if name in needed),
        skipped=tuple(skipped),
        after=tuple(after),
    )


def _list_inner_layers(graph: Any) -> Iterator[SkippedLayer]:
    """The layers in the subgraphs of If, Loop and Scan."""
    for outer in graph.node:
        for inner in (attribute.g for attribute in outer.attribute if attribute.HasField("g")):
            for node in inner.node:
                if node.op_type in WEIGHTED_OPS:
                    name = f"{outer.name}/{node.name or node.output[0]}"
                    yield SkippedLayer(
                        name, f"inside {outer.op_type}: subgraphs stay in floating point"
                    )
            yield from _list_inner_layers(inner)


def _find_epilogue(graph: OnnxGraph, tensor: str) -> str:
    """The output of the activation that is the only reader of `tensor`, which a fused kernel writes; otherwise `tensor`."""
    readers = graph.consumers.get(tensor, [])
    if len(readers) == 1 and readers[0].op_type in _ACTIVATIONS and tensor not in graph.outputs:
        return str(readers[0].output[0])
    return tensor


def _find_obstacle(node: Any, graph: OnnxGraph, target: Target) -> str | None:
    """Why the target's precision would not pay or not work for a layer; None if it fits."""
    weight = graph.weights.get(node.input[1]) if len(node.input) > 1 else None
    attributes = {each.name: each for each in node.attribute}
    if weight is None or node.input[0] in graph.weights:
        return "its weights are not constant"
    if weight.data_type != 1:
        return "its weights are not FP32"
    if node.op_type == "MatMul" and len(weight.dims) != 2:
        return "its weights are not a matrix"
    if node.op_type == "Gemm" and "transA" in attributes and attributes["transA"].i:
        return "its data is transposed"
    if node.op_type in ("MatMul", "Gemm"):
        if target == "fp8" and any(size % FP8_MULTIPLE for size in weight.dims):
            sizes = " × ".join(map(str, weight.dims))
            return f"a matrix of {sizes}: FP8 kernels take multiples of {FP8_MULTIPLE}"
        return None
    if target == "fp8":
        return "a convolution; FP8 is for linear layers"
    groups = attributes["group"].i if "group" in attributes else 1
    per_group = weight.dims[0] // groups if node.op_type == "ConvTranspose" else weight.dims[1]
    if per_group >= _MIN_CHANNELS[target]:
        return None
    if groups > 1:
        kind = "depthwise" if per_group == 1 else f"grouped, {per_group} channels per group"
        return (
            f"{kind}: memory-bound; without a Tensor Core kernel INT8 loses accuracy for no speedup"
        )
    return f"{per_group} input channels: INT8 kernels pad them to {_MIN_CHANNELS[target]}"


def _find_shortcuts(layers: list[Any], graph: OnnxGraph) -> list[tuple[str, int]]:
    """The inputs of residual additions that do not come directly from the convolution fused with the addition."""
    quantized = {node.input[0] for node in layers}
    writers = {node.output[0] for node in layers if node.op_type in ("Conv", "ConvTranspose")}
    depth = _compute_depths(graph)
    found = []
    for node in graph.model.graph.node:
        if node.op_type != "Add" or any(name in graph.weights for name in node.input):
            continue
        fusable = [
            name for name in node.input if name in writers and len(graph.consumers[name]) == 1
        ]
        end = _find_epilogue(graph, node.output[0])
        # quantized for a layer, itself or as the shortcut of the next addition
        reaches = end in quantized or any(
            each.op_type in ("Add", "MaxPool") for each in graph.consumers.get(end, [])
        )
        if not fusable or not reaches or node.input[0] == node.input[1]:
            continue
        kept = max(
            fusable, key=lambda name: depth[name]
        )  # the convolution that runs last is fused with the addition
        found += [(node.name, position) for position, name in enumerate(node.input) if name != kept]
    return found


def _compute_depths(graph: OnnxGraph) -> dict[str, int]:
    """The longest path from an input to each tensor, in nodes. ONNX graphs are sorted."""
    depth: dict[str, int] = {}
    for node in graph.model.graph.node:
        level = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update(dict.fromkeys(node.output, level))
    return depth


def _find_outputs(layers: list[Any], graph: OnnxGraph) -> list[str]:
    """The outputs that ONNX Runtime needs quantized: those of the layers, and additions and max pools of such outputs."""
    convolutions = {node.name for node in layers if node.op_type in ("Conv", "ConvTranspose")}
    done: dict[str, None] = {node.input[0]: None for node in layers}
    inputs = set(done)
    for node in graph.model.graph.node:
        fits = node.name in convolutions or (
            node.op_type in ("Add", "MaxPool") and all(name in done for name in node.input)
        )
        end = _find_epilogue(graph, node.output[0]) if fits else ""
        if fits and end not in graph.outputs:
            done[end] = None
    return [name for name in done if name not in inputs or name in graph.producers]


LEVELS = 127
UNSIGNED_LEVELS = 255
OPSET = 19
"""The first opset whose Q/DQ nodes take FP16 scales."""


def round_up_to_fp16(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """`scale` rounded up to FP16, in FP32.

    If the graph becomes FP16, so do its scales: integers made with another scale would then be wrong.
    """
    smallest, largest = np.float32(2.0**-24), np.float32(np.finfo(np.float16).max)
    clipped = np.clip(scale, smallest, largest).astype(np.float32)
    half = clipped.astype(np.float16)
    below = half.astype(np.float32) < clipped
    above = np.nextafter(half, np.finfo(np.float16).max, dtype=np.float16)
    return np.where(below, above, half).astype(np.float32)


def quantize_activation(each: TensorRange, target: Target) -> tuple[np.float32, int, Any]:
    """Scale, zero point and dtype."""
    if target == "fp8":
        return choose_scale(each.amax), 0, get_e4m3()
    if target != "cpu":
        return round_up_to_fp16(np.array([each.amax / LEVELS], np.float32))[0], 0, np.int8
    low, high = max(min(each.low, 0.0), -each.amax), min(max(each.high, 0.0), each.amax)
    scale = round_up_to_fp16(np.array([(high - low) / UNSIGNED_LEVELS], np.float32))[0]
    return scale, min(round(-low / float(scale)), UNSIGNED_LEVELS), np.uint8


def quantize_weights(
    values: NDArray[np.float32], axis: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`values` as INT8 with one scale per index of `axis`, (channels,)."""
    others = tuple(each for each in range(values.ndim) if each != axis)
    scale = round_up_to_fp16(np.abs(values).max(axis=others) / np.float32(LEVELS))
    shape = [-1 if each == axis else 1 for each in range(values.ndim)]
    steps = np.rint(values / scale.reshape(shape))
    return np.clip(steps, -LEVELS, LEVELS).astype(np.int8), scale


Integers = dict[str, tuple[NDArray[Any], Any]]
"""Quantized weights and their scales by name."""


def qdq_from_onnx(
    model: Any, placed: Placement, ranges: Mapping[str, TensorRange], known: Integers | None = None
) -> Any:
    """A copy of `model` (FP32) with the Q/DQ pairs of `placed`; everything else stays in FP32.

    Weights are taken from `known`, which also receives new ones.

    Raises BadInputError for a missing range: the calibration table belongs to another graph or target.
    """
    if missing := [name for name in placed.tensors if name not in ranges]:
        raise BadInputError(
            f"the calibration table does not match this graph: no range for '{missing[0]}'"
            f" and {len(missing) - 1} more; create a matching table with `{for_workspace('optpipe calibrate MODEL')}`"
        )
    writer = _Writer(_convert_opset(model, OPSET), placed.target, {} if known is None else known)
    for name in placed.tensors:
        writer.activation(name, ranges[name])
    writer.connect(placed)
    for name in placed.layers:
        writer.weights(name, bias=placed.target == "cpu")
    return writer.finished()


def quantize_graph(
    model: Any, table: CalibrationTable, target: Target, known: Integers | None = None
) -> tuple[Any, Placement]:
    """`model` (FP32) with the table's Q/DQ pairs; everything else, and the layers in `keep`, stay FP32.

    `known` holds the weights that the same graph and target gave before. Raises BadInputError if the table keeps an unknown layer
    or lacks a range.
    """
    keep = frozenset(table.keep)
    if unknown := sorted(keep - {node.name for node in name_nodes(model).graph.node}):
        raise BadInputError(
            f"the calibration table keeps layer '{unknown[0]}' in floating point, but {table.model} has no such layer;"
            f" `{for_workspace(f'optpipe calibrate {table.model} --sensitivity')}` lists its layers"
        )
    unseen = {name for name, each in table.ranges.items() if each.low == each.high == 0}
    placed = place_qdq(model, target, keep.__contains__, unseen)
    return qdq_from_onnx(model, placed, table.ranges, known), placed


def _convert_opset(model: Any, least: int) -> Any:
    """A copy at opset `least` or later, with a name for every node."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    version = next(
        (each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0
    )
    if version < least:
        try:
            copy = onnx.version_converter.convert_version(copy, least)
            rename_inner_twins(copy)
        except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
            raise StageError(
                f"cannot convert the graph from opset {version} to {least}, required for FP16 Q/DQ: {error}"
            ) from error
    return name_nodes(copy)


class _Writer:
    def __init__(self, model: Any, target: Target, known: Integers) -> None:
        self._model, self._known = model, known
        self._graph = OnnxGraph(model)
        self._target = target
        self._nodes = {node.name: node for node in model.graph.node}
        self._scales: dict[str, np.float32] = {}
        self._new: list[Any] = []
        self._initializers: dict[str, Any] = {}

    def activation(self, name: str, each: TensorRange) -> None:
        self._scales[name], zero_point, dtype = quantize_activation(each, self._target)
        scale = self._constant(f"{name}_scale", np.array(self._scales[name], np.float32))
        zero = self._constant(f"{name}_zero_point", np.array(zero_point, dtype))
        make = onnx.helper.make_node
        self._new += [
            make(
                "QuantizeLinear", [name, scale, zero], [f"{name}_q"], name=f"{name}_QuantizeLinear"
            ),
            make(
                "DequantizeLinear",
                [f"{name}_q", scale, zero],
                [f"{name}_dq"],
                name=f"{name}_DequantizeLinear",
            ),
        ]

    def connect(self, placed: Placement) -> None:
        for layer, position in placed.edges:
            node = self._nodes[layer]
            node.input[position] = f"{node.input[position].removesuffix('_dq')}_dq"
        for name in placed.after:
            for node in self._graph.consumers.get(name, []):
                for position, read in enumerate(node.input):
                    if read == name:
                        node.input[position] = f"{name}_dq"

    def weights(self, layer: str, *, bias: bool) -> None:
        """Turns a layer's weights into INT8 or FP8 with a DequantizeLinear, and optionally its bias into INT32.

        On a CPU, each layer that shares weights reads a copy: ONNX Runtime without VNNI converts them for each (see `EXACT_SUMS`).
        """
        node = self._nodes[layer]
        transposed = node.op_type == "Gemm" and any(
            each.name == "transB" and each.i for each in node.attribute
        )
        name, axis = (
            node.input[1],
            0 if node.op_type == "Conv" or transposed else 1,
        )  # axis of the output channels
        stem = (
            f"{layer}_{name}"
            if self._target == "cpu" and f"{name}_q{axis}" in self._initializers
            else name
        )
        if f"{stem}_q{axis}" not in self._initializers:
            if f"{name}_q{axis}" not in self._known:
                values = onnx.numpy_helper.to_array(self._graph.weights[name])
                if self._target == "fp8":
                    scale: Any = choose_scale(float(np.abs(values).max()))
                    self._known[f"{name}_q{axis}"] = round_to_e4m3(values, scale), scale
                else:
                    self._known[f"{name}_q{axis}"] = quantize_weights(values, axis)
            steps, scale = self._known[f"{name}_q{axis}"]
            self._dequantize(stem, axis, steps, scale, np.zeros(scale.shape, steps.dtype))
        node.input[1] = f"{stem}_dq{axis}"
        if bias and len(node.input) > 2 and node.input[2] in self._graph.weights:
            self._bias(node, stem, axis)

    def _bias(self, node: Any, weight: str, axis: int) -> None:
        values = onnx.numpy_helper.to_array(self._graph.weights[node.input[2]])
        source = node.input[0].removesuffix("_dq")
        per_channel = onnx.numpy_helper.to_array(self._initializers[f"{weight}_scale{axis}"])
        scale = (per_channel * self._scales[source]).astype(np.float32)
        steps = np.rint(values.astype(np.float64) / scale)
        if values.ndim != 1 or np.abs(steps).max(initial=0) >= 2**31:
            return
        name = f"{node.name}_bias"
        self._dequantize(name, 0, steps.astype(np.int32), scale, np.zeros(scale.shape, np.int32))
        node.input[2] = f"{name}_dq0"

    def _dequantize(
        self,
        name: str,
        axis: int,
        steps: NDArray[Any],
        scale: NDArray[np.float32],
        zero: NDArray[Any],
    ) -> None:
        inputs = [
            self._constant(f"{name}_q{axis}", steps),
            self._constant(f"{name}_scale{axis}", scale),
            self._constant(f"{name}_zero_point{axis}", zero),
        ]
        self._new.append(
            onnx.helper.make_node(
                "DequantizeLinear",
                inputs,
                [f"{name}_dq{axis}"],
                name=f"{name}_DequantizeLinear{axis}",
                axis=axis,
            )
        )

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self._initializers[name] = onnx.numpy_helper.from_array(
            np.ascontiguousarray(values).reshape(values.shape), name
        )
        return name

    def finished(self) -> Any:
        graph = self._model.graph
        replace_nodes(graph, _sort_nodes([*graph.node, *self._new]), self._initializers.values())
        return self._model


def _sort_nodes(nodes: list[Any]) -> list[Any]:
    """`nodes` sorted so that each comes after its inputs."""
    writers = {output: index for index, node in enumerate(nodes) for output in node.output}
    needs = {
        index: [writers[name] for name in list_read_names(node) if name and name in writers]
        for index, node in enumerate(nodes)
    }
    return [nodes[index] for index in TopologicalSorter(needs).static_order()]


# FP8 numbers with 4 bits of exponent and 3 of mantissa: from 2**-9 to 448, no infinity.
#
# Scales are powers of two: multiplying by them is exact, so NumPy, ONNX Runtime and torch round the same values; and the relative
# error of a floating-point number does not depend on its scale. Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.


LARGEST = 448.0
_EXPONENTS = (-24, 24)


def get_e4m3() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


def choose_scale(amax: float) -> np.float32:
    """The smallest power of two that brings `amax` to at most LARGEST; never 0."""
    low, high = _EXPONENTS
    exponent = low if amax <= 0 else min(max(ceil(log2(amax / LARGEST)), low), high)
    return np.float32(2.0**exponent)


def round_to_e4m3(values: NDArray[np.float32], scale: np.float32) -> NDArray[Any]:
    """`values / scale`, clamped to the range of E4M3 and rounded half to even."""
    return np.asarray(np.clip(values / scale, -LARGEST, LARGEST).astype(get_e4m3()))
