"""An ONNX Q/DQ graph, FP16 around its INT8 layers, as the steps of a `Network`.

Taken in INT8 are convolutions without groups and linear layers whose data and weights are dequantized. What follows such a layer
(addition, ReLU, QuantizeLinear) joins it. A residual addition reads the INT8 tensor of its shortcut, also where the graph has
its value before quantization.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import GraphTypes, OnnxGraph, count_node_macs, name_nodes
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.operators import FLOATING
from optpipe.errors import StageError

_ALIGNED = 16
"""TMA strides are multiples of 16 bytes: so are the channels of INT8 tensors."""
_STEM_CHANNELS = 4


def lower_graph(model: Any, types: GraphTypes) -> steps.Network:
    """The steps of `model`; multiply-adds at the shapes of `types`.

    Raises `StageError` that names the first operators without a step.
    """
    graph = OnnxGraph(name_nodes(model))
    if unknown := find_unknown_operators(model):
        raise StageError(f"the torch backend's INT8 has no step for {', '.join(unknown[:5])}")
    return _Lowering(graph, types).network()


def find_unknown_operators(model: Any) -> tuple[str, ...]:
    """The operator types that no step computes, sorted."""
    known = {*FLOATING, "QuantizeLinear", "DequantizeLinear", "Cast", "Constant"}
    return tuple(sorted({node.op_type for node in model.graph.node} - known))


@dataclass(frozen=True, slots=True)
class _End:
    """What a layer ends in once everything fusable behind it is taken in."""

    tensor: str
    absorbed: tuple[str, ...]
    """The names of the nodes taken in; the last one is where the step stands."""
    added: str | None = None
    relu: bool = False
    pool: Any = None
    quantize: Any = None


@dataclass
class _Lowering:
    graph: OnnxGraph
    types: GraphTypes
    done: list[steps.Step] = field(default_factory=list)
    halves: set[str] = field(default_factory=set)
    """Floating tensors that a step has written."""

    def network(self) -> steps.Network:
        for node in self.graph.model.graph.node:
            if node.name in self._ends:
                self._lower_fused(self._ends[node.name])
            elif node.name not in self._absorbed:
                self._lower_single(node)
        model = self.graph.model.graph
        weights = self.graph.weights
        outputs = tuple(each.name for each in model.output)
        return steps.Network(
            tuple(each.name for each in model.input if each.name not in weights),
            outputs,
            _drop_unread(self.done, outputs),
        )

    @cached_property
    def _fused(self) -> list[tuple[Any, _End]]:
        """Every layer with a fused end, in graph order."""
        return [(node, self._follow(node)) for node in self.graph.model.graph.node if self._starts_step(node)]

    @cached_property
    def _ends(self) -> dict[str, tuple[Any, _End]]:
        return {end.absorbed[-1] if end.absorbed else node.name: (node, end) for node, end in self._fused}

    @cached_property
    def _absorbed(self) -> set[str]:
        return {name for node, end in self._fused for name in (node.name, *end.absorbed)} - set(self._ends)

    def _starts_step(self, node: Any) -> bool:
        return self._is_int8(node) or self._is_stem(node) or self._is_mean(node)

    def _is_int8(self, node: Any) -> bool:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or self._find_source(node.input[0]) is None:
            return False
        found = self._read_weights(node.input[1])
        if found is None or (len(node.input) > 2 and node.input[2] not in self.graph.weights):
            return False
        values, _ = found
        if node.op_type != "Conv":
            return (
                values.ndim == 2
                and self._is_plain_product(node)
                and self._count_features(node, values)[1] % _ALIGNED == 0
            )
        return (
            get_attribute(node, "group", 1) == 1
            and values.ndim == 4
            and values.shape[2] == values.shape[3]
            and values.shape[0] % _ALIGNED == 0
            and values.shape[1] % _ALIGNED == 0
            and _is_square(node)
        )

    def _is_plain_product(self, node: Any) -> bool:
        given = self.types.shapes.get(node.input[0])
        factors = get_attribute(node, "alpha", 1.0), get_attribute(node, "beta", 1.0), get_attribute(node, "transA", 0)
        return given is not None and len(given) == 2 and factors == (1.0, 1.0, 0)

    def _is_stem(self, node: Any) -> bool:
        """A convolution of an input of the network with few channels, whose ReLU is quantized."""
        if node.op_type != "Conv" or node.input[1] not in self.graph.weights or self._find_input(node.input[0]) is None:
            return False
        count, channels, height, width = self.graph.weights[node.input[1]].dims
        fits = channels <= _STEM_CHANNELS and height == width <= 7 and count in (16, 32, 64, 128)
        end = self._follow(node)
        strided = list(get_attribute(node, "strides", [1, 1])) == [2, 2]
        return fits and strided and _is_square(node) and end.relu and end.quantize is not None and end.added is None

    def _is_mean(self, node: Any) -> bool:
        if node.op_type not in ("GlobalAveragePool", "ReduceMean"):
            return False
        given = self.types.shapes.get(node.input[0])
        axes = get_attribute(node, "axes", None) or (
            list(self._read_constant(node.input[1]).reshape(-1)) if len(node.input) > 1 else []
        )
        whole = node.op_type == "GlobalAveragePool" or sorted(each % 4 for each in axes) == [2, 3]
        quantized = self._follow(node).quantize is not None and not self._follow(node).relu
        return given is not None and len(given) == 4 and given[1] % 64 == 0 and whole and quantized

    def _find_input(self, tensor: str) -> str | None:
        """The network's input that `tensor` is, cast to another type or not."""
        node = self.graph.producers.get(tensor)
        if node is not None and node.op_type == "Cast":
            return self._find_input(node.input[0])
        return tensor if node is None and tensor not in self.graph.weights else None

    def _follow(self, node: Any) -> _End:
        """Follows what only the layer feeds."""
        tensor, added, relu, pool = str(node.output[0]), None, False, None
        absorbed: list[str] = []
        mean = node.op_type in ("GlobalAveragePool", "ReduceMean")
        while tensor not in self.graph.outputs:
            readers = self.graph.consumers.get(tensor, [])
            quantize = next((each for each in readers if each.op_type == "QuantizeLinear"), None)
            if quantize is not None:
                if any(each is not quantize and not self._reads_as_shortcut(each, tensor) for each in readers):
                    break
                return _End(tensor, (*absorbed, quantize.name), added, relu, pool, quantize)
            if len(readers) != 1:
                break
            reader = readers[0]
            if reader.op_type == "Relu" and not relu and not mean and pool is None:
                relu = True
            elif reader.op_type == "Add" and added is None and not relu and self._takes_addition(node, reader, tensor):
                added = self._get_other(reader, tensor)
            elif reader.op_type == "MaxPool" and relu and self._takes_pool(node, reader):
                pool = reader
            elif not (mean and reader.op_type in ("Reshape", "Flatten", "Squeeze")):
                break
            absorbed.append(reader.name)
            tensor = str(reader.output[0])
        if pool is not None:  # not quantized behind it
            return _End(str(pool.input[0]), tuple(absorbed[: absorbed.index(pool.name)]), added, relu)
        return _End(tensor, tuple(absorbed), added, relu)

    def _reads_as_shortcut(self, reader: Any, tensor: str) -> bool:
        """An addition that takes the INT8 tensor instead."""
        return reader.op_type == "Add" and any(
            end.added == tensor for node, end in self._additions if reader.name in end.absorbed
        )

    @cached_property
    def _additions(self) -> list[tuple[Any, _End]]:
        """Layers by what they add; found without looking at who else reads a tensor."""
        found = []
        for node in self.graph.model.graph.node:
            if not self._is_int8(node):
                continue
            tensor = str(node.output[0])
            readers = self.graph.consumers.get(tensor, [])
            if len(readers) == 1 and readers[0].op_type == "Add" and self._takes_addition(node, readers[0], tensor):
                found.append((node, _End(tensor, (readers[0].name,), self._get_other(readers[0], tensor))))
        return found

    def _takes_addition(self, node: Any, addition: Any, tensor: str) -> bool:
        """Whether the layer is the one of an addition's two that runs last, and the other side is there in INT8."""
        other = self._get_other(addition, tensor)
        shapes = [self.types.shapes.get(each) for each in (tensor, other)]
        return (
            self._is_int8(node)
            and shapes[0] is not None
            and shapes[0] == shapes[1]
            and len(shapes[0]) == 4
            and self._find_quantized(other) is not None
        )

    def _get_other(self, addition: Any, tensor: str) -> str:
        left, right = addition.input
        return str(right if left == tensor else left)

    def _find_quantized(self, tensor: str) -> tuple[str, float] | None:
        """The INT8 tensor of a floating one, and its scale: what is dequantized into it, or what it is quantized to."""
        if (found := self._find_source(tensor)) is not None:
            return found
        for reader in self.graph.consumers.get(tensor, []):
            if reader.op_type == "QuantizeLinear":
                return str(reader.output[0]), self._read_scale(reader)
        return None

    def _takes_pool(self, node: Any, pool: Any) -> bool:
        kernel = list(get_attribute(pool, "kernel_shape", []))
        shapes = self.types.shapes.get(pool.input[0])
        plain = not get_attribute(pool, "ceil_mode", 0) and _is_square(pool, stride=None)
        return self._is_stem_like(node) and len(set(kernel)) == 1 and plain and shapes is not None

    def _is_stem_like(self, node: Any) -> bool:
        return node.op_type == "Conv" and self._find_input(node.input[0]) is not None

    def _find_source(self, tensor: str) -> tuple[str, float] | None:
        """The INT8 activation that a tensor is dequantized from, and its scale."""
        node = self.graph.producers.get(tensor)
        if node is None or node.op_type != "DequantizeLinear" or node.input[0] in self.graph.weights:
            return None
        return str(node.input[0]), self._read_scale(node)

    def _read_weights(self, tensor: str) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        """INT8 weights and their scales, one per output channel."""
        node = self.graph.producers.get(tensor)
        if node is None or node.op_type != "DequantizeLinear" or node.input[0] not in self.graph.weights:
            return None
        values = self._read_constant(node.input[0])
        scale = self._read_constant(node.input[1]).astype(np.float32).reshape(-1)
        return (values, scale) if values.dtype == np.int8 else None

    def _read_constant(self, name: str) -> NDArray[Any]:
        import onnx

        return np.array(onnx.numpy_helper.to_array(self.graph.weights[name]))

    def _read_scale(self, node: Any) -> float:
        return float(self._read_constant(node.input[1]).astype(np.float32))

    def _count_features(self, node: Any, values: NDArray[np.int8]) -> tuple[int, int]:
        """Output and input features of a linear layer."""
        transposed = node.op_type == "Gemm" and get_attribute(node, "transB", 0)
        return (values.shape[0], values.shape[1]) if transposed else (values.shape[1], values.shape[0])

    def _lower_fused(self, fused: tuple[Any, _End]) -> None:
        node, end = fused
        if node.op_type in ("GlobalAveragePool", "ReduceMean"):
            given = self._read_half(node.input[0])
            self.done.append(
                steps.MeanPool(node.name, given, end.quantize.output[0], 1.0 / self._read_scale(end.quantize))
            )
        elif self._is_int8(node):
            self._lower_int8(node, end)
        else:
            self._lower_stem(node, end)

    def _lower_int8(self, node: Any, end: _End) -> None:
        given, given_scale = self._find_source(node.input[0])  # type: ignore[misc]
        weight, scale = self._read_weights(node.input[1])  # type: ignore[misc]
        scale = scale * np.float32(given_scale)
        bias = self._read_bias(node, len(scale))
        macs = count_node_macs(node, self.types)
        if node.op_type != "Conv":
            outputs, _ = self._count_features(node, weight)
            weight = weight if weight.shape[0] == outputs and get_attribute(node, "transB", 0) else weight.T
            if end.quantize is None or outputs % _ALIGNED:
                self._lower_linear(node, end, given, weight, scale, bias, macs)
                return
            weight = weight[:, :, None, None]
        out_scale = np.float32(1.0 if end.quantize is None else self._read_scale(end.quantize))
        added = None if end.added is None else self._find_quantized(end.added)
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
            )
        )

    def _lower_linear(self, node: Any, end: _End, given: str, weight: Any, scale: Any, bias: Any, macs: int) -> None:
        """FP32 outputs, whatever follows on its own."""
        output = str(node.output[0])
        self.halves.add(output)
        self.done.append(
            steps.Linear(node.name, given, output, np.array(weight, order="C"), scale, bias.astype(np.float32), macs)
        )
        for name in end.absorbed:
            self._lower_single(next(each for each in self.graph.model.graph.node if each.name == name))

    def _lower_stem(self, node: Any, end: _End) -> None:
        quantized = str(end.quantize.output[0])
        weight = self._read_constant(node.input[1])
        self.done.append(
            steps.Stem(
                name=node.name,
                given=self._find_input(node.input[0]) or "",
                output=quantized if end.pool is None else f"{quantized}_before_pool",
                weight=weight.astype(np.float16),
                bias=self._read_bias(node, weight.shape[0]),
                padding=get_attribute(node, "pads", [0])[0],
                inverse_scale=1.0 / self._read_scale(end.quantize),
                macs=count_node_macs(node, self.types),
            )
        )
        if end.pool is not None:
            kernel, stride = get_attribute(end.pool, "kernel_shape", [1])[0], get_attribute(end.pool, "strides", [1])[0]
            padding = get_attribute(end.pool, "pads", [0])[0]
            given = f"{quantized}_before_pool"
            self.done.append(steps.MaxPool(end.pool.name, given, quantized, kernel, stride, padding))

    def _read_bias(self, node: Any, channels: int) -> NDArray[np.float32]:
        if len(node.input) < 3:
            return np.zeros(channels, np.float32)
        return self._read_constant(node.input[2]).astype(np.float32)

    def _lower_single(self, node: Any) -> None:
        """A node of its own: a conversion, or an operator in floating point."""
        output = str(node.output[0])
        if node.op_type == "QuantizeLinear":
            self.done.append(
                steps.Quantize(node.name, self._read_half(node.input[0]), output, 1.0 / self._read_scale(node))
            )
        elif node.op_type == "DequantizeLinear":
            pass  # made where something reads it in floating point
        elif node.op_type == "Constant":
            raise StageError(f"the graph computes a constant in {node.name}; simplify it first")
        else:
            self._compute_floating(node, output)

    def _compute_floating(self, node: Any, output: str) -> None:
        import onnx

        values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        self.done.append(
            steps.Floating(
                node.name,
                node.op_type,
                tuple(self._read_operand(each) for each in node.input if each),
                output,
                values,
                count_node_macs(node, self.types),
            )
        )
        self.halves.add(output)

    def _read_operand(self, tensor: str) -> str | NDArray[Any]:
        if tensor in self.graph.weights:
            return self._read_constant(tensor)
        if (found := self._read_weights(tensor)) is not None:
            values, scale = found
            axis = get_attribute(self.graph.producers[tensor], "axis", 1)
            shape = [-1 if each == axis else 1 for each in range(values.ndim)]
            return (values.astype(np.float32) * scale.reshape(shape)).astype(np.float16)
        return self._read_half(tensor)

    def _read_half(self, tensor: str) -> str:
        """A tensor in floating point, dequantized here where it is there in INT8 alone."""
        found = self._find_source(tensor)
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


def get_attribute(node: Any, name: str, default: Any) -> Any:
    """A node's attribute, or `default`."""
    import onnx

    return next((onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)


def _is_square(node: Any, stride: int | None = 2) -> bool:
    """The same padding on all sides, the same stride both ways (at most `stride`), no dilation."""
    pads, strides = get_attribute(node, "pads", [0]), list(get_attribute(node, "strides", [1]))
    automatic = get_attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET")
    dilated = any(each != 1 for each in get_attribute(node, "dilations", [1]))
    small = stride is None or strides[0] <= stride
    return len(set(pads)) == 1 and len(set(strides)) == 1 and small and not dilated and not automatic
