"""An ONNX Q/DQ graph, FP16 around its INT8 layers, as the steps of a `Network`.

Taken in INT8 are convolutions, narrow groups joined with zeros between them, and linear layers over the last axis, whose data
and weights are dequantized. What follows such a layer (bias, addition, ReLU, QuantizeLinear) joins it. A residual addition
reads the INT8 tensor of its shortcut, also where the graph has its value before quantization.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import GraphTypes, OnnxGraph, count_node_macs, name_nodes
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.matching import ALIGNED, FusedEnd, GraphMatcher, choose_merge, get_attribute
from optpipe.backends.torch_int8.movements import MADE_ON_DEVICE, READ_ON_HOST, WAY_OUT
from optpipe.backends.torch_int8.operators import FLOATING
from optpipe.core.errors import StageError

_FLOAT32 = 1
"""`TensorProto.FLOAT`."""
_ALIGNED_HALVES = 8
"""Channels of FP16: 16 bytes."""


def lower_graph(model: Any, types: GraphTypes) -> steps.Network:
    """The steps of `model`; MACs at the shapes of `types`.

    Raises `StageError` that names the operators without a step.
    """
    graph = OnnxGraph(hoist_constants(name_nodes(model)))
    if unknown := find_unknown_operators(model):
        raise StageError(explain_unknown(unknown))
    return _Lowering(graph, types, GraphMatcher(graph, types), find_shape_tensors(graph)).network()


def find_unknown_operators(model: Any) -> tuple[str, ...]:
    """The operator types that no step computes, sorted."""
    known = {*FLOATING, "QuantizeLinear", "DequantizeLinear", "Constant"}
    return tuple(sorted({node.op_type for node in model.graph.node} - known))


def explain_unknown(operators: tuple[str, ...]) -> str:
    """What is missing, and the way out."""
    return f"its INT8 kernels do not cover {', '.join(operators)}; {WAY_OUT}"


@dataclass
class _Lowering:
    graph: OnnxGraph
    types: GraphTypes
    match: GraphMatcher
    on_host: frozenset[str]
    done: list[steps.Step] = field(default_factory=list)
    halves: set[str] = field(default_factory=set)
    """Floating tensors that a step has written."""

    def network(self) -> steps.Network:
        for node in self.graph.model.graph.node:
            if node.name in self.match.ends:
                self._lower_fused(self.match.ends[node.name])
            elif node.name not in self.match.absorbed:
                self._lower_single(node)
        model = self.graph.model.graph
        weights = self.graph.weights
        outputs = tuple(each.name for each in model.output)
        return steps.Network(
            tuple(each.name for each in model.input if each.name not in weights),
            outputs,
            _drop_unread(self.done, outputs),
        )

    def _lower_fused(self, fused: tuple[Any, FusedEnd]) -> None:
        node, end = fused
        if node.op_type in ("GlobalAveragePool", "ReduceMean"):
            given, output = self._read_half(node.input[0]), str(end.quantize.output[0])
            inverse_scale = 1.0 / self.match.read_scale(end.quantize)
            keepdims = len(self.types.shapes.get(end.tensor, ())) == 4
            spare = self.match.count_spare(output)
            self.done.append(steps.MeanPool(node.name, given, output, inverse_scale, keepdims, spare))
        elif self.match.is_int8(node):
            self._lower_int8(node, end)
        elif self.match.is_depthwise(node):
            self._lower_depthwise(node, end)
        else:
            self._lower_stem(node, end)

    def _lower_depthwise(self, node: Any, end: FusedEnd) -> None:
        weight, half = self.match.read_constant(node.input[1]).astype(np.float16)[:, 0], end.quantize is None
        output = end.tensor if half else str(end.quantize.output[0])
        self.done.append(
            steps.Depthwise(
                name=node.name,
                given=self._read_half(node.input[0]),
                output=output,
                weight=weight,
                bias=self._read_bias(node, end, len(weight)),
                stride=get_attribute(node, "strides", [1])[0],
                padding=tuple(get_attribute(node, "pads", [0] * 4)),
                activation=end.activation,
                half=half,
                inverse_scale=1.0 if half else 1.0 / self.match.read_scale(end.quantize),
                spare=self.match.count_spare(output),
                macs=count_node_macs(node, self.types),
            )
        )
        if half:
            self.halves.add(output)

    def _lower_int8(self, node: Any, end: FusedEnd) -> None:
        given, given_scale = self.match.find_source(node.input[0])  # type: ignore[misc]
        outputs, _ = self.match.count_channels(node)
        weight, scale, groups = self._read_layer(node, given_scale)
        bias = self._read_bias(node, end, outputs)
        flat, half = node.op_type != "Conv", end.quantize is None
        if flat and half and not end.activation and self._is_last(end.tensor):
            macs = count_node_macs(node, self.types)
            self.done.append(steps.Linear(node.name, given, end.tensor, weight[:, 0, 0], scale, bias, macs))
            self.halves.add(end.tensor)
            return
        spare = -outputs % (_ALIGNED_HALVES if half and not end.added else ALIGNED)
        if not half:
            self._convolve(node, end, given, str(end.quantize.output[0]), weight, scale, bias, groups, spare)
            return
        written = f"{end.tensor}_padded" if spare else end.tensor
        self._convolve(node, end, given, written, weight, scale, bias, groups, spare)
        self.halves.add(end.tensor)
        if spare:
            self._cut(written, end.tensor, -1 if flat else 1, outputs)

    def _read_layer(self, node: Any, given_scale: float) -> tuple[NDArray[np.int8], NDArray[np.float32], int]:
        """Weights (output channels, rows, columns, input channels of a group), scales of its sums, and the number of groups."""
        weight, scale = self.match.read_weights(node.input[1])  # type: ignore[misc]
        outputs, depth = self.match.count_channels(node)
        if node.op_type != "Conv":
            weight = weight if node.op_type == "Gemm" and get_attribute(node, "transB", 0) else weight.T
            weight = weight[:, :, None, None]
        weight = weight[:, :, None] if weight.ndim == 3 else weight
        weight = np.array(_pad(weight, 1, -depth % ALIGNED).transpose(0, 2, 3, 1), order="C")
        scale = np.resize(scale * np.float32(given_scale), outputs).astype(np.float32)
        weight, groups = _merge_groups(weight, int(get_attribute(node, "group", 1)))
        return weight, scale, groups

    def _convolve(
        self,
        node: Any,
        end: FusedEnd,
        given: str,
        output: str,
        weight: Any,
        scale: Any,
        bias: Any,
        groups: int,
        spare: int,
    ) -> None:
        """The step, with `spare` outputs of zeros; over a sequence, (samples, channels, steps), on images of one row."""
        out_scale = np.float32(1.0 if end.quantize is None else self.match.read_scale(end.quantize))
        added = None if end.added is None else self.match.find_quantized(end.added)
        pads = tuple(get_attribute(node, "pads", [0] * 4))
        line = self.match.read_weights(node.input[1])[0].ndim == 3  # type: ignore[index]
        if line:
            given, pads = self._view("Unsqueeze", given, f"{node.name}_given"), (0, pads[0], 0, pads[-1])
        self.done.append(
            steps.Convolution(
                name=node.name,
                given=given,
                output=f"{output}_row" if line else output,
                weight=_pad(weight, 0, spare),
                scale=_pad(scale / out_scale, 0, spare),
                bias=_pad(bias / out_scale, 0, spare),
                stride=get_attribute(node, "strides", [1])[0],
                padding=pads,
                activation=end.activation,
                half=end.quantize is None,
                added=added[0] if added else None,
                added_scale=float(np.float32(added[1]) / out_scale) if added else 0.0,
                macs=count_node_macs(node, self.types),
                flat=node.op_type != "Conv",
                dilation=get_attribute(node, "dilations", [1])[0],
                groups=groups,
            )
        )
        if line:
            self._view("Squeeze", f"{output}_row", output)

    def _view(self, operator: str, given: str, output: str) -> str:
        """A sequence, (samples, channels, steps), as images of one row, or back."""
        self.done.append(steps.Floating(f"{output}_{operator}", operator, (given,), output, {"axes": [2]}))
        return output

    def _cut(self, given: str, output: str, axis: int, length: int) -> None:
        """A view without the zeros behind the channels."""
        where = {"axis": axis, "start": 0, "length": length}
        self.done.append(steps.Floating(f"{output}_cut", "Split", (given,), output, where))

    def _is_last(self, tensor: str) -> bool:
        """Whether a tensor is an output of the network, or only cast to FP32 to be one."""
        readers = self.graph.consumers.get(tensor, [])
        return all(each.op_type == "Cast" and get_attribute(each, "to", 0) == _FLOAT32 for each in readers)

    def _lower_stem(self, node: Any, end: FusedEnd) -> None:
        half, weight = end.quantize is None, self.match.read_constant(node.input[1])
        output = end.tensor if half else str(end.quantize.output[0])
        self.done.append(
            steps.Stem(
                name=node.name,
                given=self.match.find_input(node.input[0]) or "",
                output=output if end.pool is None else f"{output}_before_pool",
                weight=weight.astype(np.float16),
                bias=self._read_bias(node, end, weight.shape[0]),
                padding=get_attribute(node, "pads", [0])[0],
                activation=end.activation,
                half=half,
                inverse_scale=1.0 if half else 1.0 / self.match.read_scale(end.quantize),
                macs=count_node_macs(node, self.types),
            )
        )
        if half:
            self.halves.add(output)
        if end.pool is not None:
            kernel, stride = get_attribute(end.pool, "kernel_shape", [1])[0], get_attribute(end.pool, "strides", [1])[0]
            padding = get_attribute(end.pool, "pads", [0])[0]
            given = f"{output}_before_pool"
            self.done.append(steps.MaxPool(end.pool.name, given, output, kernel, stride, padding))

    def _read_bias(self, node: Any, end: FusedEnd, channels: int) -> NDArray[np.float32]:
        name = end.bias or (node.input[2] if len(node.input) > 2 else None)
        return self.match.read_constant(name).astype(np.float32).reshape(-1) if name else np.zeros(channels, np.float32)

    def _lower_single(self, node: Any) -> None:
        """A node of its own: a conversion, or an operator in floating point."""
        output = str(node.output[0])
        if node.op_type == "QuantizeLinear":
            self._quantize(node, output)
        elif node.op_type == "DequantizeLinear":
            pass  # made where something reads it in floating point
        elif node.op_type == "Split":
            self._split(node)
        elif node.op_type == "BatchNormalization":
            self._scale_and_shift(node)
        elif node.op_type == "Mul" and (gated := self.match.find_gated_by_itself(node)) is not None:
            self.done.append(steps.Floating(node.name, "Swish", (self._read_half(gated),), output))
            self.halves.add(output)
        else:
            self._compute_floating(node, output)

    def _quantize(self, node: Any, output: str) -> None:
        """INT8, and where it is padded, a copy with zeros behind the channels."""
        inverse_scale = 1.0 / self.match.read_scale(node)
        if (gated := self.match.gated.get(node.name)) is not None:
            given, gate = self._read_half(gated.image), self._read_half(gated.gate)
            spare = self.match.count_spare(output)
            self.done.append(steps.Quantize(node.name, given, output, inverse_scale, gate, gated.activation, spare))
            return
        padded = self.match.padded.get(output)
        given, bare = self._read_half(node.input[0]), output if padded is None else f"{output}_bare"
        self.done.append(steps.Quantize(node.name, given, bare, inverse_scale))
        if padded is not None:
            axis, spare = padded
            inputs = (bare, np.array([0, spare]), None, np.array([axis]))
            self.done.append(steps.Floating(f"{output}_filled", "Pad", inputs, output))

    def _compute_floating(self, node: Any, output: str) -> None:
        import onnx

        values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        inputs, on_host = [self._read_operand(each) if each else None for each in node.input], output in self.on_host
        if node.op_type in MADE_ON_DEVICE and not on_host:
            inputs.append(self.graph.model.graph.input[0].name)
        macs = count_node_macs(node, self.types)
        self.done.append(steps.Floating(node.name, node.op_type, tuple(inputs), output, values, macs, on_host))
        self.halves.add(output)

    def _split(self, node: Any) -> None:
        """A view for each output."""
        axis, given = get_attribute(node, "axis", 0), self._read_half(node.input[0])
        shapes = [self.types.shapes.get(output, ()) for output in node.output]
        if axis == 0 or () in shapes:
            raise StageError(f"its INT8 does not take a split whose sizes depend on the batch ({node.name}); {WAY_OUT}")
        start = 0
        for index, (output, shape) in enumerate(zip(map(str, node.output), shapes, strict=True)):
            length = shape[axis]
            where = {"axis": axis, "start": start, "length": length}
            self.done.append(steps.Floating(f"{node.name}_{index}", "Split", (given,), output, where))
            self.halves.add(output)
            start += length

    def _scale_and_shift(self, node: Any) -> None:
        """Batch normalization with its statistics in the graph: value * scale + shift per channel."""
        scale, bias, mean, variance = (self.match.read_constant(each).astype(np.float64) for each in node.input[1:])
        scale = scale / np.sqrt(variance + get_attribute(node, "epsilon", 1e-5))
        constants = (each.astype(np.float16) for each in (scale, bias - mean * scale))
        given, output = self._read_half(node.input[0]), str(node.output[0])
        self.done.append(steps.Floating(node.name, node.op_type, (given, *constants), output))
        self.halves.add(output)

    def _read_operand(self, tensor: str) -> str | NDArray[Any]:
        if tensor in self.graph.weights:
            return self.match.read_constant(tensor)
        if (found := self.match.read_weights(tensor)) is not None:
            values, scale = found
            axis = get_attribute(self.graph.producers[tensor], "axis", 1)
            shape = [-1 if each == axis else 1 for each in range(values.ndim)]
            return (values.astype(np.float32) * scale.reshape(shape)).astype(np.float16)
        return self._read_half(tensor)

    def _read_half(self, tensor: str) -> str:
        """A tensor in floating point, dequantized here where it is there in INT8 alone."""
        found = self.match.find_source(tensor)
        if found is not None and tensor not in self.halves:
            given = found[0]
            if given in self.match.padded and (shape := self.types.shapes.get(tensor)):
                axis, _ = self.match.padded[given]
                given = f"{tensor}_int8"
                self._cut(found[0], given, axis, shape[axis])
            self.done.append(steps.Dequantize(f"{tensor}_half", given, tensor, found[1]))
            self.halves.add(tensor)
        return tensor


def _merge_groups(weight: NDArray[np.int8], groups: int) -> tuple[NDArray[np.int8], int]:
    """(output channels, rows, columns, input channels of a group) over fewer groups, with zeros; and their number."""
    outputs, *kernel, depth = weight.shape
    merged = 1 if groups == 1 else choose_merge(groups, outputs, depth) or 1
    wide = np.zeros((groups, outputs // groups, *kernel, merged, depth), np.int8)
    for group, part in enumerate(weight.reshape(groups, -1, *kernel, depth)):
        wide[group, ..., group % merged, :] = part
    return wide.reshape(outputs, *kernel, merged * depth), groups // merged


def _pad(values: NDArray[Any], axis: int, spare: int) -> NDArray[Any]:
    """Zeros behind `axis`."""
    return np.pad(values, [(0, spare if each == axis else 0) for each in range(values.ndim)])


def _drop_unread(done: list[steps.Step], outputs: tuple[str, ...]) -> tuple[steps.Step, ...]:
    """`done` without what nothing reads, such as a cast of what the first step reads as it came."""
    read, kept = set(outputs), []
    for step in reversed(done):
        if step.output in read:
            kept.append(step)
            read.update(steps.list_tensors_read(step))
    return tuple(reversed(kept))


def hoist_constants(model: Any) -> Any:
    """`model` with what Constant nodes hold among its weights, in place."""
    import onnx

    left = []
    for node in model.graph.node:
        if node.op_type != "Constant":
            left.append(node)
            continue
        value = onnx.helper.get_attribute_value(node.attribute[0])
        if not isinstance(value, onnx.TensorProto):
            kind = np.float32 if "float" in node.attribute[0].name else np.int64
            value = onnx.numpy_helper.from_array(np.array(value, kind))
        value.name = node.output[0]
        model.graph.initializer.append(value)
    del model.graph.node[:]
    model.graph.node.extend(left)
    return model


def find_shape_tensors(graph: OnnxGraph) -> frozenset[str]:
    """What is computed in the host's memory: all that shapes depend on, and what follows from shapes alone.

    Raises StageError where a shape depends on the values of an input.
    """
    found: set[str] = set()
    nodes = graph.model.graph.node
    waiting = [name for node in nodes for at, name in enumerate(node.input) if at in READ_ON_HOST.get(node.op_type, ())]
    while waiting:
        tensor = waiting.pop()
        if not tensor or tensor in graph.weights or tensor in found:
            continue
        if (node := graph.producers.get(tensor)) is None:
            raise StageError(
                f"its INT8 does not take shapes that depend on values, here of input '{tensor}'; {WAY_OUT}"
            )
        found.add(tensor)
        if node.op_type != "Shape":
            waiting += node.input
    for node in nodes:
        read = READ_ON_HOST.get(node.op_type, ())
        data = [name for at, name in enumerate(node.input) if name and at not in read and name not in graph.weights]
        if node.op_type == "Shape" or (data and found.issuperset(data)):
            found.update(node.output)
    return frozenset(found)
