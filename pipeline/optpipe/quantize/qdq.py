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
from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.graph_names import NameGiver
from optpipe.backends.onnx_graph import (
    WEIGHTED_OPS,
    OnnxGraph,
    list_read_names,
    name_nodes,
    replace_nodes,
    sort_nodes,
)
from optpipe.backends.onnx_products import describe_stored_weights
from optpipe.core import onnx
from optpipe.core.entries import SkippedLayer
from optpipe.core.errors import BadInputError, escape
from optpipe.core.precision import QdqForm
from optpipe.core.wording import Call
from optpipe.models.export.opsets import raise_opset
from optpipe.quantize.ranges import CalibrationTable, TensorRange

Target = QdqForm
CPU_FORMS: tuple[Target, ...] = ("cpu", "cpu-7bit")
_ACTIVATIONS = ("Relu", "Clip")
FP8_MULTIPLE = 16
"""Divides a weight's sizes (PyTorch, `torch._scaled_mm`)."""
_MIN_CHANNELS: dict[Target, int] = {"tensorrt": 16, "cpu": 1, "cpu-7bit": 1}
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

    So do readers of the tensors `unseen`, which were empty or zero in all calibration data: any other value would be clipped to zero.
    """
    graph = OnnxGraph(name_nodes(model))
    layers, skipped = [], []
    for node in model.graph.node:
        if node.op_type not in WEIGHTED_OPS:
            continue
        obstacle = _find_obstacle(node, graph, target) or (
            "its input was empty or zero in all calibration data"
            if node.input[0] in unseen
            else None
        )
        reason = "kept in floating point by request" if keep(node.name) else obstacle
        skipped.append(SkippedLayer(node.name, reason)) if reason else layers.append(node)
    skipped += _list_inner_layers(model.graph)
    edges = [(node.name, 0) for node in layers]
    after: list[str] = []
    if target == "tensorrt":
        edges += _find_shortcuts(layers, graph)
    elif target in CPU_FORMS:
        after = [name for name in _find_outputs(layers, graph) if name not in unseen]
    by_name = {node.name: node for node in model.graph.node}
    edges = [
        (name, position) for name, position in edges if by_name[name].input[position] not in unseen
    ]
    needed = {by_name[name].input[position] for name, position in edges} | set(after)
    order = [value.name for value in model.graph.input] + [
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


class ConstantWeight(NamedTuple):
    """A layer's weight: the constant `tensor`, read through Identity and Transpose nodes.

    An output layer that is tied to an embedding reads the embedding's table transposed.
    """

    tensor: Any
    """The `onnx.TensorProto`."""
    order: tuple[int, ...]
    """The axes of `tensor` in the order in which the layer reads them."""

    @property
    def name(self) -> str:
        return str(self.tensor.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims[axis] for axis in self.order)

    def read(self) -> NDArray[Any]:
        return np.asarray(onnx.numpy_helper.to_array(self.tensor)).transpose(self.order)


def find_weight(name: str, graph: OnnxGraph) -> ConstantWeight | None:
    """The constant behind the tensor `name`; None if it is computed from an input or in another way."""
    orders: list[tuple[int, ...] | None] = []
    while name not in graph.weights:
        node = graph.producers.get(name)
        if node is None or node.op_type not in ("Identity", "Transpose"):
            return None
        if node.op_type == "Transpose":
            given = next(
                (attribute.ints for attribute in node.attribute if attribute.name == "perm"), None
            )
            orders.append(None if given is None else tuple(given))
        name = node.input[0]
    tensor = graph.weights[name]
    order = tuple(range(len(tensor.dims)))
    for permutation in reversed(orders):
        order = order[::-1] if permutation is None else tuple(order[axis] for axis in permutation)
    return ConstantWeight(tensor, order)


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
    weight = find_weight(node.input[1], graph) if len(node.input) > 1 else None
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if weight is None:
        form = describe_stored_weights(node, graph.producers, graph.weights)
        return f"its weights are {form} already" if form else "its weights are not constant"
    if find_weight(node.input[0], graph) is not None:
        return "its data are constant"
    if weight.tensor.data_type != 1:
        return "its weights are not FP32"
    if 0 in weight.shape:
        return "its weights are empty"
    if node.op_type == "MatMul" and len(weight.shape) != 2:
        return "its weights are not a matrix"
    if node.op_type == "Gemm" and "transA" in attributes and attributes["transA"].i:
        return "its data is transposed"
    if node.op_type in ("MatMul", "Gemm"):
        if target == "fp8" and any(size % FP8_MULTIPLE for size in weight.shape):
            sizes = " × ".join(map(str, weight.shape))
            return f"a matrix of {sizes}: FP8 kernels take multiples of {FP8_MULTIPLE}"
        return None
    if target == "fp8":
        return "a convolution; FP8 is for linear layers"
    groups = attributes["group"].i if "group" in attributes else 1
    per_group = weight.shape[0] // groups if node.op_type == "ConvTranspose" else weight.shape[1]
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
    shortcuts = []
    for node in graph.model.graph.node:
        if node.op_type != "Add" or any(name in graph.weights for name in node.input):
            continue
        fusable = [
            name for name in node.input if name in writers and len(graph.consumers[name]) == 1
        ]
        end = _find_epilogue(graph, node.output[0])
        # quantized for a layer, itself or as the shortcut of the next addition
        reaches = end in quantized or any(
            consumer.op_type in ("Add", "MaxPool") for consumer in graph.consumers.get(end, [])
        )
        if not fusable or not reaches or node.input[0] == node.input[1]:
            continue
        kept = max(
            fusable, key=lambda name: depth[name]
        )  # the convolution that runs last is fused with the addition
        shortcuts += [
            (node.name, position) for position, name in enumerate(node.input) if name != kept
        ]
    return shortcuts


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
SEVEN_BIT_LEVELS = 63
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


SMALLEST_FP32 = np.float32(np.finfo(np.float32).tiny)


def round_scale(scale: NDArray[np.float32], target: Target) -> NDArray[np.float32]:
    """`scale` as the target stores it, never 0: on a CPU in FP32, for TensorRT in FP16, which has nothing between 0 and 6e-8."""
    if target in CPU_FORMS:
        return np.maximum(scale, SMALLEST_FP32).astype(np.float32)
    return round_up_to_fp16(scale)


def quantize_activation(bounds: TensorRange, target: Target) -> tuple[np.float32, int, Any]:
    """Scale, zero point and dtype."""
    if target == "fp8":
        return choose_scale(bounds.amax), 0, get_e4m3()
    if target not in CPU_FORMS:
        return round_scale(np.array([bounds.amax / LEVELS], np.float32), target)[0], 0, np.int8
    low, high = max(min(bounds.low, 0.0), -bounds.amax), min(max(bounds.high, 0.0), bounds.amax)
    scale = round_scale(np.array([(high - low) / UNSIGNED_LEVELS], np.float32), target)[0]
    return scale, min(round(-low / float(scale)), UNSIGNED_LEVELS), np.uint8


def quantize_weights(
    values: NDArray[np.float32], axis: int, target: Target = "tensorrt"
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`values` as INT8 with one scale per index of `axis`, (channels,).

    A channel of zeros gets the largest scale of the others, so that the scale of a bias, which is this one times that of the
    data, does not become too small for INT32.
    """
    others = tuple(dim for dim in range(values.ndim) if dim != axis)
    amax = np.abs(values).max(axis=others)
    amax = np.where(amax == 0, amax.max(), amax)
    levels = SEVEN_BIT_LEVELS if target == "cpu-7bit" else LEVELS
    scale = round_scale(amax / np.float32(levels), target)
    shape = [-1 if dim == axis else 1 for dim in range(values.ndim)]
    steps = np.rint(values / scale.reshape(shape))
    return np.clip(steps, -levels, levels).astype(np.int8), scale


Integers = dict[tuple[str, tuple[int, ...], int], tuple[NDArray[Any], Any]]
"""Quantized weights and their scales, by the constant's name, the order of its axes, and the axis of the output channels."""


def qdq_from_onnx(
    model: Any,
    placed: Placement,
    ranges: Mapping[str, TensorRange],
    known: Integers | None = None,
    *,
    widen: bool = False,
) -> Any:
    """A copy of `model` (FP32) with the Q/DQ pairs of `placed`; everything else stays in FP32.

    Weights are taken from `known`, which also receives new ones. With `widen`, one-dimensional convolutions become
    two-dimensional ones, which compute the same.

    Raises BadInputError for a missing range: the calibration table belongs to another graph or target.
    """
    if missing := [name for name in placed.tensors if name not in ranges]:
        raise BadInputError(
            f"the calibration table does not match this graph: no range for '{missing[0]}'"
            f" and {len(missing) - 1} more; create a matching table with `"
            + Call("calibrate", "MODEL")
            + "`"
        )
    copy = raise_opset(model, OPSET)
    writer = _Writer(copy, placed.target, ranges, {} if known is None else known)
    if widen:
        writer.widen(placed.layers)
    writer.connect(placed)
    for name in placed.layers:
        writer.quantize_weight(name, bias=placed.target in CPU_FORMS)
    return writer.finish()


def quantize_graph(
    model: Any,
    table: CalibrationTable,
    target: Target,
    known: Integers | None = None,
    *,
    widen: bool = False,
) -> tuple[Any, Placement]:
    """`model` (FP32) with the table's Q/DQ pairs; everything else, and the layers in `keep`, stay FP32.

    `known` holds the weights that the same graph and target gave before. TensorRT has INT8 kernels for two-dimensional
    convolutions alone: `widen` makes such of one-dimensional ones. Raises BadInputError if the table keeps an unknown layer or
    lacks a range.
    """
    keep = frozenset(table.keep)
    if unknown := sorted(keep - {node.name for node in name_nodes(model).graph.node}):
        raise BadInputError(
            f"the calibration table keeps layer '{unknown[0]}' in floating point, but {table.model} has no such layer; `"
            + Call("calibrate", table.model, sensitivity=True)
            + "` lists its layers"
        )
    unseen = {name for name, bounds in table.ranges.items() if bounds.low == bounds.high == 0}
    placed = place_qdq(model, target, keep.__contains__, unseen)
    return qdq_from_onnx(model, placed, table.ranges, known, widen=widen), placed


class _Writer:
    """Writes Q/DQ pairs into a graph, in place. Edges are those of the graph as it was given; new names are free ones."""

    def __init__(
        self, model: Any, target: Target, ranges: Mapping[str, TensorRange], known: Integers
    ) -> None:
        self._model, self._target, self._ranges, self._known = model, target, ranges, known
        self._graph = OnnxGraph(model)
        self._names = NameGiver(model)
        self._nodes = {node.name: node for node in model.graph.node}
        self._inputs = {node.name: tuple(node.input) for node in model.graph.node}
        """What each node read in the graph as it was given."""
        self._read_inside = {
            name for node in model.graph.node for name in list_read_names(node) - {*node.input}
        }
        """The tensors that only the branches and bodies inside a node read."""
        self._wide: set[str] = set()
        """The layers that were one-dimensional convolutions."""
        self._scales: dict[str, np.float32] = {}
        self._pairs: dict[tuple[str, bool], str] = {}
        """The dequantized tensor for an activation, and for its form with one more axis."""
        self._weights: dict[tuple[str, tuple[int, ...], int, bool], tuple[str, Any]] = {}
        """The dequantized tensor for a weight, and its scales."""
        self._axes = ""
        self._new: list[Any] = []
        self._initializers: dict[str, Any] = {}

    def widen(self, layers: Collection[str]) -> None:
        """Makes two-dimensional convolutions, of height 1, of the one-dimensional ones among `layers`.

        Their data get the axis from an Unsqueeze before the Q/DQ pair, and their results lose it behind the activation.
        """
        for name in layers:
            node = self._nodes[name]
            if node.op_type not in ("Conv", "ConvTranspose"):
                continue
            weight = find_weight(node.input[1], self._graph)
            if weight is None or len(weight.shape) != 3:
                continue
            self._wide.add(name)
            for attribute in node.attribute:
                if attribute.name in _SIZES_OF_CONVOLUTION:
                    attribute.ints[:] = [_SIZES_OF_CONVOLUTION[attribute.name], *attribute.ints]
                elif attribute.name == "pads":
                    attribute.ints[:] = [0, attribute.ints[0], 0, attribute.ints[1]]
            self._narrow(node)

    def _narrow(self, node: Any) -> None:
        """Takes the added axis from a convolution's result, or from that of the activation that is its only reader."""
        result = node.output[0]
        end = _find_epilogue(self._graph, result)
        if result in self._read_inside:
            end = result
        if end != result:
            activation = self._graph.producers[end]
            activation.input[0] = node.output[0] = self._names.give(f"{result}_2d")
            node = activation
        wide = self._names.give(f"{end}_2d")
        node.output[0] = wide
        self._reshape("Squeeze", wide, end)

    def _reshape(self, operator: str, source: str, target: str) -> None:
        if not self._axes:
            self._axes = self._constant("axes", np.array([2], np.int64))
        name = self._names.give(f"{target}_{operator}")
        self._new.append(onnx.helper.make_node(operator, [source, self._axes], [target], name=name))

    def connect(self, placed: Placement) -> None:
        """Lets the edges of a placement read dequantized tensors."""
        for layer, position in placed.edges:
            source = self._inputs[layer][position]
            self._nodes[layer].input[position] = self._quantize(source, layer in self._wide)
        for source in placed.after:
            for node in self._graph.consumers.get(source, []):
                for position, read in enumerate(self._inputs[node.name]):
                    if read == source:
                        node.input[position] = self._quantize(source, node.name in self._wide)

    def _quantize(self, source: str, wide: bool) -> str:
        """The output of the Q/DQ pair of an activation, which all its readers share."""
        if (source, wide) in self._pairs:
            return self._pairs[source, wide]
        tensor = source
        if wide:
            tensor = self._names.give(f"{source}_2d")
            self._reshape("Unsqueeze", source, tensor)
        self._scales[source], zero_point, dtype = quantize_activation(
            self._ranges[source], self._target
        )
        scale = self._constant(f"{tensor}_scale", np.array(self._scales[source], np.float32))
        zero = self._constant(f"{tensor}_zero_point", np.array(zero_point, dtype))
        integers, dequantized = (self._names.give(f"{tensor}_{end}") for end in ("q", "dq"))
        for operator, read, made in (
            ("QuantizeLinear", tensor, integers),
            ("DequantizeLinear", integers, dequantized),
        ):
            name = self._names.give(f"{tensor}_{operator}")
            self._new.append(
                onnx.helper.make_node(operator, [read, scale, zero], [made], name=name)
            )
        self._pairs[source, wide] = dequantized
        return dequantized

    def quantize_weight(self, layer: str, *, bias: bool) -> None:
        """Turns a layer's weights into INT8 or FP8 with a DequantizeLinear, and optionally its bias into INT32.

        On a CPU, each layer that shares weights reads a copy: ONNX Runtime without VNNI converts them for each (see `EXACT_SUMS`).
        """
        node = self._nodes[layer]
        weight = find_weight(self._inputs[layer][1], self._graph)
        assert weight is not None, layer
        straight = node.op_type == "Conv" or (
            node.op_type == "Gemm"
            and any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        )
        axis = 0 if straight else 1  # of the output channels
        key = weight.name, weight.order, axis
        shared = *key, layer in self._wide
        if self._target in CPU_FORMS or shared not in self._weights:
            if key not in self._known:
                self._known[key] = self._make_integers(weight, axis)
            steps, scale = self._known[key]
            if layer in self._wide:
                steps = np.expand_dims(steps, 2)
            self._weights[shared] = self._dequantize(weight.name, axis, steps, scale), scale
        node.input[1], scale = self._weights[shared]
        if bias and len(node.input) > 2 and node.input[2] in self._graph.weights:
            self._quantize_bias(node, weight, scale)

    def _make_integers(self, weight: ConstantWeight, axis: int) -> tuple[NDArray[Any], Any]:
        values = weight.read()
        if not np.isfinite(values).all():
            raise BadInputError(
                f"the weights '{escape(weight.name)}' contain NaN or Inf, which no 8-bit type has\n"
                "train or load the weights again; no precision gives usable outputs with these"
            )
        if self._target != "fp8":
            return quantize_weights(values, axis, self._target)
        scale = choose_scale(float(np.abs(values).max()))
        return round_to_e4m3(values, scale), scale

    def _quantize_bias(
        self, node: Any, weight: ConstantWeight, weight_scale: NDArray[np.float32]
    ) -> None:
        """Turns a layer's bias into INT32 with the scale of its sums, if it fits.

        A group of a ConvTranspose shares its weights' scales with the other groups, so they repeat over the output channels.
        """
        values = onnx.numpy_helper.to_array(self._graph.weights[node.input[2]])
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        repeats = groups if node.op_type == "ConvTranspose" else 1
        scale = np.tile(weight_scale, repeats) * self._scales[self._inputs[node.name][0]]
        scale = scale.astype(np.float32)
        if values.ndim != 1 or values.size not in (1, scale.size) or not scale.all():
            return
        steps = np.rint(np.broadcast_to(values, scale.shape).astype(np.float64) / scale)
        if not np.abs(steps).max(initial=0) < 2**31:
            return
        node.input[2] = self._dequantize(f"{node.name}_bias", 0, steps.astype(np.int32), scale)

    def _dequantize(
        self, name: str, axis: int, steps: NDArray[Any], scale: NDArray[np.float32]
    ) -> str:
        inputs = [
            self._constant(f"{name}_q", steps),
            self._constant(f"{name}_scale", scale),
            self._constant(f"{name}_zero_point", np.zeros(scale.shape, steps.dtype)),
        ]
        made = self._names.give(f"{name}_dq")
        node = self._names.give(f"{name}_DequantizeLinear")
        self._new.append(
            onnx.helper.make_node("DequantizeLinear", inputs, [made], name=node, axis=axis)
        )
        return made

    def _constant(self, wish: str, values: NDArray[Any]) -> str:
        name = self._names.give(wish)
        self._initializers[name] = onnx.numpy_helper.from_array(
            np.ascontiguousarray(values).reshape(values.shape), name
        )
        return name

    def finish(self) -> Any:
        """The graph with the new nodes in order, without the nodes and constants that nothing reads since weights are INT8."""
        graph = self._model.graph
        nodes = _drop_unread([*graph.node, *self._new], {output.name for output in graph.output})
        replace_nodes(graph, sort_nodes(nodes), self._initializers.values())
        return self._model


_SIZES_OF_CONVOLUTION = {
    "kernel_shape": 1,
    "strides": 1,
    "dilations": 1,
    "output_padding": 0,
    "output_shape": 1,
}
"""The attributes of a convolution with one value for each axis of its data, and their values for a height of 1."""


def _drop_unread(nodes: list[Any], outputs: Collection[str]) -> list[Any]:
    """`nodes` without the Identity and Transpose nodes that nothing reads."""
    while True:
        read = {*outputs}.union(*map(list_read_names, nodes))
        kept = [
            node
            for node in nodes
            if node.op_type not in ("Identity", "Transpose") or not read.isdisjoint(node.output)
        ]
        if len(kept) == len(nodes):
            return kept
        nodes = kept


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
