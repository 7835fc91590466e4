"""An ONNX Q/DQ graph, FP16 around its INT8 layers, as the steps of a `Network`.

Taken in INT8 are convolutions without groups, and linear layers over the last axis, whose data and weights are dequantized.
What follows such a layer (bias, addition, ReLU, QuantizeLinear) joins it. A residual addition reads the INT8 tensor of its
shortcut, also where the graph has its value before quantization.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import GraphTypes, OnnxGraph, count_node_macs, name_nodes
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.matching import ALIGNED, FusedEnd, GraphMatcher, get_attribute
from optpipe.backends.torch_int8.movements import MADE_ON_DEVICE, READ_ON_HOST
from optpipe.backends.torch_int8.operators import FLOATING
from optpipe.errors import StageError

WAY_OUT = "use --backend onnxruntime"
_FLOAT32, _FLOAT16 = 1, 10
"""`TensorProto.FLOAT` and `TensorProto.FLOAT16`."""


def lower_graph(model: Any, types: GraphTypes) -> steps.Network:
    """The steps of `model`; MACs at the shapes of `types`.

    Raises `StageError` that names the operators without a step.
    """
    graph = OnnxGraph(_hoist_constants(name_nodes(model)))
    if unknown := find_unknown_operators(model):
        raise StageError(explain_unknown(unknown))
    return _Lowering(graph, types, GraphMatcher(graph, types), _find_shape_tensors(graph)).network()


def _hoist_constants(model: Any) -> Any:
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


def _find_shape_tensors(graph: OnnxGraph) -> frozenset[str]:
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
            raise StageError(f"its INT8 takes no shapes that depend on values, here of input '{tensor}'; {WAY_OUT}")
        found.add(tensor)
        if node.op_type != "Shape":
            waiting += node.input
    for node in nodes:
        read = READ_ON_HOST.get(node.op_type, ())
        data = [name for at, name in enumerate(node.input) if name and at not in read and name not in graph.weights]
        if node.op_type == "Shape" or (data and found.issuperset(data)):
            found.update(node.output)
    return frozenset(found)


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
            given, inverse_scale = self._read_half(node.input[0]), 1.0 / self.match.read_scale(end.quantize)
            keepdims = len(self.types.shapes.get(end.tensor, ())) == 4
            self.done.append(steps.MeanPool(node.name, given, str(end.quantize.output[0]), inverse_scale, keepdims))
        elif self.match.is_int8(node):
            self._lower_int8(node, end)
        else:
            self._lower_stem(node, end)

    def _lower_int8(self, node: Any, end: FusedEnd) -> None:
        given, given_scale = self.match.find_source(node.input[0])  # type: ignore[misc]
        weight, scale = self.match.read_weights(node.input[1])  # type: ignore[misc]
        scale = scale * np.float32(given_scale)
        macs, flat = count_node_macs(node, self.types), node.op_type != "Conv"
        if flat:
            outputs, _ = self.match.count_features(node, weight)
            scale = np.resize(scale, outputs).astype(np.float32)
            weight = weight if node.op_type == "Gemm" and get_attribute(node, "transB", 0) else weight.T
        bias = self._read_bias(node, end, len(scale))
        if flat and (outputs % ALIGNED or (end.quantize is None and not end.relu and self._is_last(end.tensor))):
            self._lower_linear(node, end, given, weight, scale, bias, macs)
            return
        weight = weight[:, :, None, None] if flat else weight
        out_scale = np.float32(1.0 if end.quantize is None else self.match.read_scale(end.quantize))
        added = None if end.added is None else self.match.find_quantized(end.added)
        output = end.tensor if end.quantize is None else str(end.quantize.output[0])
        if end.quantize is None:
            self.halves.add(output)
        self.done.append(
            steps.Convolution(
                name=node.name,
                given=given,
                output=output,
                weight=np.array(weight.transpose(0, 2, 3, 1), order="C"),
                scale=scale / out_scale,
                bias=bias / out_scale,
                stride=get_attribute(node, "strides", [1, 1])[0],
                padding=get_attribute(node, "pads", [0])[0],
                relu=end.relu,
                half=end.quantize is None,
                added=added[0] if added else None,
                added_scale=float(np.float32(added[1]) / out_scale) if added else 0.0,
                macs=macs,
                flat=flat,
            )
        )

    def _lower_linear(
        self, node: Any, end: FusedEnd, given: str, weight: Any, scale: Any, bias: Any, macs: int
    ) -> None:
        """FP32 outputs, in FP16 where they are not the network's; whatever follows on its own."""
        by_name = {each.name: each for each in self.graph.model.graph.node}
        behind = [by_name[name] for name in end.absorbed]
        last = behind.pop(0) if end.bias else node
        output, wide = str(last.output[0]), f"{last.output[0]}_fp32"
        is_last = self._is_last(output)
        self.halves.add(output)
        name, weight = node.name, np.array(weight, order="C")
        self.done.append(steps.Linear(name, given, output if is_last else wide, weight, scale, bias, macs))
        if not is_last:
            self.done.append(steps.Floating(f"{name}_fp16", "Cast", (wide,), output, {"to": _FLOAT16}))
        for each in behind:
            self._lower_single(each)

    def _is_last(self, tensor: str) -> bool:
        """Whether a tensor is an output of the network, or only cast to FP32 to be one."""
        readers = self.graph.consumers.get(tensor, [])
        return all(each.op_type == "Cast" and get_attribute(each, "to", 0) == _FLOAT32 for each in readers)

    def _lower_stem(self, node: Any, end: FusedEnd) -> None:
        quantized = str(end.quantize.output[0])
        weight = self.match.read_constant(node.input[1])
        self.done.append(
            steps.Stem(
                name=node.name,
                given=self.match.find_input(node.input[0]) or "",
                output=quantized if end.pool is None else f"{quantized}_before_pool",
                weight=weight.astype(np.float16),
                bias=self._read_bias(node, end, weight.shape[0]),
                padding=get_attribute(node, "pads", [0])[0],
                inverse_scale=1.0 / self.match.read_scale(end.quantize),
                macs=count_node_macs(node, self.types),
            )
        )
        if end.pool is not None:
            kernel, stride = get_attribute(end.pool, "kernel_shape", [1])[0], get_attribute(end.pool, "strides", [1])[0]
            padding = get_attribute(end.pool, "pads", [0])[0]
            given = f"{quantized}_before_pool"
            self.done.append(steps.MaxPool(end.pool.name, given, quantized, kernel, stride, padding))

    def _read_bias(self, node: Any, end: FusedEnd, channels: int) -> NDArray[np.float32]:
        name = end.bias or (node.input[2] if len(node.input) > 2 else None)
        return self.match.read_constant(name).astype(np.float32).reshape(-1) if name else np.zeros(channels, np.float32)

    def _lower_single(self, node: Any) -> None:
        """A node of its own: a conversion, or an operator in floating point."""
        output = str(node.output[0])
        if node.op_type == "QuantizeLinear":
            self.done.append(
                steps.Quantize(node.name, self._read_half(node.input[0]), output, 1.0 / self.match.read_scale(node))
            )
        elif node.op_type == "DequantizeLinear":
            pass  # made where something reads it in floating point
        elif node.op_type == "Split":
            self._split(node)
        elif node.op_type == "BatchNormalization":
            self._scale_and_shift(node)
        else:
            self._compute_floating(node, output)

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
            raise StageError(f"its INT8 takes no split whose sizes depend on the batch ({node.name}); {WAY_OUT}")
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
            self.done.append(steps.Dequantize(f"{tensor}_half", found[0], tensor, found[1]))
            self.halves.add(tensor)
        return tensor


def _drop_unread(done: list[steps.Step], outputs: tuple[str, ...]) -> tuple[steps.Step, ...]:
    """`done` without what nothing reads, such as a cast of what the first step reads as it came."""
    read, kept = set(outputs), []
    for step in reversed(done):
        if step.output in read:
            kept.append(step)
            read.update(steps.list_tensors_read(step))
    return tuple(reversed(kept))
