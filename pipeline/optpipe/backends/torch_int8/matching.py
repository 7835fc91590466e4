"""Which nodes of a Q/DQ graph become one INT8 step, and what such a step reads from the graph."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_graph import GraphTypes, OnnxGraph

ALIGNED = 16
"""TMA strides are multiples of 16 bytes: so are the channels of INT8 tensors, with zeros behind them where need be."""
_LEAST_DEPTH = 32
"""Bytes of the smallest block of input channels: fewer are filled up with zeros."""
_STEM_CHANNELS = 4


@dataclass(frozen=True, slots=True)
class FusedEnd:
    """What a layer ends in once everything fusable behind it is taken in."""

    tensor: str
    absorbed: tuple[str, ...]
    """The names of the nodes taken in; the last one is where the step stands."""
    added: str | None = None
    bias: str | None = None
    """Constants that an addition behind a matrix product adds to each row."""
    activation: str = ""
    """One of `steps.ACTIVATIONS`."""
    pool: Any = None
    quantize: Any = None


@dataclass(frozen=True, slots=True)
class GatedImage:
    """The product of an image and a gate, a factor for each of its channels."""

    image: str
    gate: str
    activation: str
    """Of the gate: one of `steps.GATES`."""
    taken: tuple[Any, ...]
    """The nodes that compute it."""


@dataclass
class GraphMatcher:
    """Finds layers with what can be fused behind them."""

    graph: OnnxGraph
    types: GraphTypes

    @cached_property
    def fused(self) -> list[tuple[Any, FusedEnd]]:
        """Every layer with a fused end, in graph order."""
        return [(node, self._follow(node)) for node in self.graph.model.graph.node if self._starts_step(node)]

    @cached_property
    def ends(self) -> dict[str, tuple[Any, FusedEnd]]:
        """The same by the name of the node where the step stands: the last that it takes in."""
        return {end.absorbed[-1] if end.absorbed else node.name: (node, end) for node, end in self.fused}

    @cached_property
    def absorbed(self) -> set[str]:
        """The names of nodes that a step takes in and that are not where it stands."""
        taken = {each.name for gated in self.gated.values() for each in gated.taken}
        return ({name for node, end in self.fused for name in (node.name, *end.absorbed)} - set(self.ends)) | taken

    @cached_property
    def gated(self) -> dict[str, GatedImage]:
        """By the name of the QuantizeLinear that alone reads it."""
        found = {}
        for node in self.graph.model.graph.node:
            product = self._find_only_source(node.input[0], "Mul") if node.op_type == "QuantizeLinear" else None
            along_channels = product is not None and self.padded.get(str(node.output[0]), (1, 0))[0] == 1
            if along_channels and (gated := self._read_gated(product)) is not None:
                found[node.name] = gated
        return found

    def _read_gated(self, product: Any) -> GatedImage | None:
        for image, gate in (tuple(product.input), tuple(product.input)[::-1]):
            wide, narrow = (self.types.shapes.get(each, ()) for each in (image, gate))
            computed = image not in self.graph.weights and gate not in self.graph.weights
            if not computed or len(wide) != 4 or narrow != (*wide[:2], 1, 1) or narrow == wide:
                continue
            bend = self._find_only_source(gate, "Sigmoid", "HardSigmoid")
            if bend is None or (bend.op_type == "HardSigmoid" and not _is_torchs_hard_sigmoid(bend)):
                return GatedImage(str(image), str(gate), "", (product,))
            return GatedImage(str(image), str(bend.input[0]), bend.op_type.lower(), (product, bend))
        return None

    def _find_only_source(self, tensor: str, *operators: str) -> Any:
        """The node, one of `operators`, that makes a tensor which one node reads; else None."""
        node = self.graph.producers.get(tensor)
        alone = tensor not in self.graph.outputs and len(self.graph.consumers.get(tensor, [])) == 1
        return node if node is not None and node.op_type in operators and alone else None

    def _starts_step(self, node: Any) -> bool:
        return self.is_int8(node) or self._is_stem(node) or self.is_depthwise(node) or self._is_mean(node)

    def is_depthwise(self, node: Any) -> bool:
        """Whether a convolution has one input and one output for each group, and floating-point weights."""
        if node.op_type != "Conv" or any(each not in self.graph.weights for each in node.input[1:]):
            return False
        dims, group = list(self.graph.weights[node.input[1]].dims), int(get_attribute(node, "group", 1))
        dense = set(get_attribute(node, "dilations", [1])) == {1}
        whole = len(dims) == 4 and dims[:2] == [group, 1] and group > 1 and self.find_input(node.input[0]) is None
        return whole and dense and _is_regular(node)

    def is_int8(self, node: Any) -> bool:
        """Whether a convolution or linear layer can be computed in INT8: data and weights dequantized, shapes that the kernels take."""
        if node.op_type not in ("Conv", "Gemm", "MatMul") or self.find_source(node.input[0]) is None:
            return False
        found = self.read_weights(node.input[1])
        if found is None or (len(node.input) > 2 and node.input[2] not in self.graph.weights):
            return False
        values, _ = found
        if node.op_type != "Conv":
            return values.ndim == 2 and self._is_plain_product(node, values)
        return values.ndim in (3, 4) and _is_regular(node) and self._takes_groups(node, values)

    def _takes_groups(self, node: Any, values: NDArray[np.int8]) -> bool:
        """A tile's columns are of one group, so that all of it reads the same channels."""
        groups, (outputs, depth) = int(get_attribute(node, "group", 1)), values.shape[:2]
        return groups == 1 or (depth * groups % ALIGNED == 0 and choose_merge(groups, outputs, depth) is not None)

    def _is_plain_product(self, node: Any, values: NDArray[np.int8]) -> bool:
        given = self.types.shapes.get(node.input[0])
        factors = get_attribute(node, "alpha", 1.0), get_attribute(node, "beta", 1.0), get_attribute(node, "transA", 0)
        features, depth = self.count_features(node, values)
        plain_bias = len(node.input) < 3 or self._is_row(node.input[2], features)
        clear = given is not None and (len(given) in (2, 3) or (len(given) > 3 and depth % ALIGNED == 0))
        return clear and factors == (1.0, 1.0, 0) and plain_bias

    def _is_row(self, tensor: str, features: int) -> bool:
        """Whether a constant has one value for each of `features`."""
        dims = list(self.graph.weights[tensor].dims) if tensor in self.graph.weights else []
        return bool(dims) and prod(dims) == dims[-1] == features

    def _is_stem(self, node: Any) -> bool:
        """A convolution of an input of the network with few channels and stride 2."""
        if node.op_type != "Conv" or node.input[1] not in self.graph.weights or self.find_input(node.input[0]) is None:
            return False
        if len(dims := self.graph.weights[node.input[1]].dims) != 4:
            return False
        count, channels, height, width = dims
        fits = channels <= _STEM_CHANNELS and height == width <= 7 and count in (16, 32, 64, 128)
        end = self._follow(node)
        strided = list(get_attribute(node, "strides", [1, 1])) == [2, 2]
        return fits and strided and _is_square(node) and end.added is None

    def _is_mean(self, node: Any) -> bool:
        if node.op_type not in ("GlobalAveragePool", "ReduceMean"):
            return False
        given = self.types.shapes.get(node.input[0])
        axes = get_attribute(node, "axes", None) or (
            list(self.read_constant(node.input[1]).reshape(-1)) if len(node.input) > 1 else []
        )
        whole = node.op_type == "GlobalAveragePool" or sorted(each % 4 for each in axes) == [2, 3]
        quantized = self._follow(node).quantize is not None and not self._follow(node).activation
        return given is not None and len(given) == 4 and whole and quantized

    @cached_property
    def padded(self) -> dict[str, tuple[int, int]]:
        """INT8 tensors whose channels are filled up to a multiple of ALIGNED: the axis, and how many zeros."""
        found = {}
        for node, end in self.fused:
            if not self.is_int8(node):
                continue
            axis, (outputs, depth) = 1 if node.op_type == "Conv" else -1, self.count_channels(node)
            read, _ = self.find_source(node.input[0])  # type: ignore[misc]
            found[read] = (axis, -depth % ALIGNED)
            if end.added is not None:
                found[self.find_quantized(end.added)[0]] = (axis, -outputs % ALIGNED)  # type: ignore[index]
            if end.quantize is not None:
                found[str(end.quantize.output[0])] = (axis, -outputs % ALIGNED)
        return {name: (axis, spare) for name, (axis, spare) in found.items() if spare}

    def count_spare(self, tensor: str) -> int:
        """The zeros behind the channels of an INT8 tensor."""
        return self.padded.get(tensor, (1, 0))[1]

    def count_channels(self, node: Any) -> tuple[int, int]:
        """Output and input channels, or features, of an INT8 layer."""
        values, _ = self.read_weights(node.input[1])  # type: ignore[misc]
        if node.op_type != "Conv":
            return self.count_features(node, values)
        return values.shape[0], values.shape[1] * get_attribute(node, "group", 1)

    def find_input(self, tensor: str) -> str | None:
        """The network's input that `tensor` is, cast to another type or not."""
        node = self.graph.producers.get(tensor)
        if node is not None and node.op_type == "Cast":
            return self.find_input(node.input[0])
        return tensor if node is None and tensor not in self.graph.weights else None

    def _follow(self, node: Any) -> FusedEnd:
        """Follows what only the layer feeds."""
        tensor, added, bias, activation, pool = str(node.output[0]), None, None, "", None
        absorbed: list[str] = []
        mean = node.op_type in ("GlobalAveragePool", "ReduceMean")
        while tensor not in self.graph.outputs:
            readers = self.graph.consumers.get(tensor, [])
            quantize = next((each for each in readers if each.op_type == "QuantizeLinear"), None)
            if quantize is not None:
                if any(each is not quantize and not self._reads_as_shortcut(each, tensor) for each in readers):
                    break
                return FusedEnd(tensor, (*absorbed, quantize.name), added, bias, activation, pool, quantize)
            if not activation and (found := self._find_smooth_activation(node, tensor)) is not None:
                activation, names, tensor = found
                absorbed += names
                continue
            if len(readers) != 1:
                break
            reader = readers[0]
            if reader.op_type == "Relu" and not activation and not mean and pool is None:
                activation = "relu"
            elif reader.op_type == "Add" and not absorbed and self._takes_bias(node, self._get_other(reader, tensor)):
                bias = self._get_other(reader, tensor)
            elif (
                reader.op_type == "Add"
                and added is None
                and not activation
                and self._takes_addition(node, reader, tensor)
            ):
                added = self._get_other(reader, tensor)
            elif reader.op_type == "MaxPool" and activation == "relu" and self._takes_pool(node, reader):
                pool = reader
            elif not (mean and reader.op_type in ("Reshape", "Flatten", "Squeeze")):
                break
            absorbed.append(reader.name)
            tensor = str(reader.output[0])
        if pool is not None:  # not quantized behind it
            return FusedEnd(str(pool.input[0]), tuple(absorbed[: absorbed.index(pool.name)]), added, bias, activation)
        return FusedEnd(tensor, tuple(absorbed), added, bias, activation)

    def _find_smooth_activation(self, node: Any, tensor: str) -> tuple[str, list[str], str] | None:
        """SiLU or HardSwish of a layer's output: its name, the nodes, and the tensor behind; None where an INT8 layer's is quantized,
        whose end has no steps for it.
        """
        readers = self.graph.consumers.get(tensor, [])
        kinds = sorted(each.op_type for each in readers)
        if kinds not in (["HardSwish"], ["Mul", "Sigmoid"]):
            return None
        *gates, last = sorted(readers, key=lambda each: each.op_type == "Mul")
        if gates and self.find_gated_by_itself(last) != tensor:
            return None
        output = str(last.output[0])
        quantized = any(each.op_type == "QuantizeLinear" for each in self.graph.consumers.get(output, []))
        if not (self.is_depthwise(node) or self._is_stem_like(node) or (self.is_int8(node) and not quantized)):
            return None
        return "silu" if gates else "hardswish", [each.name for each in (*gates, last)], output

    def find_gated_by_itself(self, product: Any) -> str | None:
        """What a product multiplies by its own sigmoid: SiLU, which is one kernel instead of two."""
        for gate, value in (tuple(product.input), tuple(product.input)[::-1]):
            sigmoid = self.graph.producers.get(gate)
            if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.input[0] == value:
                return str(value)
        return None

    def _takes_bias(self, node: Any, other: str) -> bool:
        found = self.read_weights(node.input[1]) if node.op_type == "MatMul" else None
        return found is not None and self._is_row(other, self.count_features(node, found[0])[0])

    def _reads_as_shortcut(self, reader: Any, tensor: str) -> bool:
        """An addition that takes the INT8 tensor instead."""
        return reader.op_type == "Add" and any(
            end.added == tensor for node, end in self._additions if reader.name in end.absorbed
        )

    @cached_property
    def _additions(self) -> list[tuple[Any, FusedEnd]]:
        """Layers by what they add; found without looking at who else reads a tensor."""
        found = []
        for node in self.graph.model.graph.node:
            if not self.is_int8(node):
                continue
            tensor = str(node.output[0])
            readers = self.graph.consumers.get(tensor, [])
            if len(readers) == 1 and readers[0].op_type == "Add" and self._takes_addition(node, readers[0], tensor):
                found.append((node, FusedEnd(tensor, (readers[0].name,), self._get_other(readers[0], tensor))))
        return found

    def _takes_addition(self, node: Any, addition: Any, tensor: str) -> bool:
        """Whether the layer is the one of an addition's two that runs last, and the other side is there in INT8."""
        other = self._get_other(addition, tensor)
        shapes = [self.types.shapes.get(each) for each in (tensor, other)]
        return (
            node.op_type == "Conv"
            and self.is_int8(node)
            and shapes[0] is not None
            and shapes[0] == shapes[1]
            and len(shapes[0]) == 4
            and self.find_quantized(other) is not None
        )

    def _get_other(self, addition: Any, tensor: str) -> str:
        left, right = addition.input
        return str(right if left == tensor else left)

    def find_quantized(self, tensor: str) -> tuple[str, float] | None:
        """The INT8 tensor of a floating one, and its scale: what is dequantized into it, or what it is quantized to."""
        if (found := self.find_source(tensor)) is not None:
            return found
        for reader in self.graph.consumers.get(tensor, []):
            if reader.op_type == "QuantizeLinear":
                return str(reader.output[0]), self.read_scale(reader)
        return None

    def _takes_pool(self, node: Any, pool: Any) -> bool:
        kernel = list(get_attribute(pool, "kernel_shape", []))
        shapes = self.types.shapes.get(pool.input[0])
        plain = not get_attribute(pool, "ceil_mode", 0) and _is_square(pool, stride=None)
        return self._is_stem_like(node) and len(set(kernel)) == 1 and plain and shapes is not None

    def _is_stem_like(self, node: Any) -> bool:
        return node.op_type == "Conv" and self.find_input(node.input[0]) is not None

    def find_source(self, tensor: str) -> tuple[str, float] | None:
        """The INT8 activation that a tensor is dequantized from, and its scale."""
        node = self.graph.producers.get(tensor)
        if node is None or node.op_type != "DequantizeLinear" or node.input[0] in self.graph.weights:
            return None
        return str(node.input[0]), self.read_scale(node)

    def read_weights(self, tensor: str) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        """INT8 weights and their scales, one per output channel."""
        node = self.graph.producers.get(tensor)
        if node is None or node.op_type != "DequantizeLinear" or node.input[0] not in self.graph.weights:
            return None
        values = self.read_constant(node.input[0])
        scale = self.read_constant(node.input[1]).astype(np.float32).reshape(-1)
        return (values, scale) if values.dtype == np.int8 else None

    def read_constant(self, name: str) -> NDArray[Any]:
        """A weight of the graph by its name."""
        import onnx

        return np.array(onnx.numpy_helper.to_array(self.graph.weights[name]))

    def read_scale(self, node: Any) -> float:
        """The scale of a QuantizeLinear or DequantizeLinear, per tensor."""
        return float(self.read_constant(node.input[1]).astype(np.float32))

    def count_features(self, node: Any, values: NDArray[np.int8]) -> tuple[int, int]:
        """Output and input features of a linear layer."""
        transposed = node.op_type == "Gemm" and get_attribute(node, "transB", 0)
        return (values.shape[0], values.shape[1]) if transposed else (values.shape[1], values.shape[0])


def choose_merge(groups: int, outputs: int, depth: int) -> int | None:
    """How many groups of a convolution with `outputs` outputs and `depth` inputs a group become one, with zeros between them: so that
    its outputs are a multiple of ALIGNED and, where that can be, its inputs fill a block. None where no number does.
    """
    fitting = [each for each in (1, 2, 4, 8) if groups % each == 0 and outputs // groups * each % ALIGNED == 0]
    return next((each for each in fitting if depth * each >= _LEAST_DEPTH), fitting[-1] if fitting else None)


def get_attribute(node: Any, name: str, default: Any) -> Any:
    """A node's attribute, or `default`."""
    import onnx

    return next((onnx.helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)


def _is_torchs_hard_sigmoid(node: Any) -> bool:
    """ONNX's default is another: min(max(0.2 x + 0.5, 0), 1)."""
    slope, offset = float(get_attribute(node, "alpha", 0.2)), float(get_attribute(node, "beta", 0.5))
    return abs(slope - 1 / 6) < 1e-4 and offset == 0.5


def _is_regular(node: Any) -> bool:
    """The same stride and the same dilation both ways."""
    strides, dilations = (set(get_attribute(node, name, [1])) for name in ("strides", "dilations"))
    automatic = get_attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET")
    return len(strides) == len(dilations) == 1 and not automatic


def _is_square(node: Any, stride: int | None = 2) -> bool:
    """The same padding on all sides, the same stride both ways (at most `stride`), no dilation."""
    pads, strides = get_attribute(node, "pads", [0]), list(get_attribute(node, "strides", [1]))
    automatic = get_attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", "NOTSET")
    dilated = any(each != 1 for each in get_attribute(node, "dilations", [1]))
    small = stride is None or strides[0] <= stride
    return len(set(pads)) == 1 and len(set(strides)) == 1 and small and not dilated and not automatic
