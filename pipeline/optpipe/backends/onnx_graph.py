"""An ONNX graph's layers, their types and their MACs."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.card import InputSpec
from optpipe.core.precision import LayerType, Precision

if TYPE_CHECKING:
    import numpy as np
    import onnx

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that Q/DQ pairs are put around: their second input are weights."""
_CONVOLUTIONS = {"Conv", "FusedConv", "QLinearConv", "ConvInteger", "NhwcFusedConv", "QLinearConvTranspose"}
_PRODUCTS = {
    "MatMul",
    "FusedMatMul",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QGemm",
    "Gemm",
    "FusedGemm",
    "DynamicQuantizeMatMul",
}
_RECURRENT = {"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"}
_QUANTIZES_ITS_DATA = {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
"""Operators that turn floating-point data into INT8 themselves and compute in it."""
QUANTIZED = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
    "MatMulIntegerToFloat", "QLinearAdd", "QGemm", *_QUANTIZES_ITS_DATA,
}  # fmt: skip
"""A graph with any of these was quantized before it came here."""
HALF_TYPES = {"fp16": 10, "bf16": 16}
"""ONNX's numbers of the half-precision types."""
_NO_ARITHMETIC = {
    "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "QuantizeLinear",
    "DequantizeLinear", "ReorderInput", "ReorderOutput", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip
_KEEPS_VALUES = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
_WEIGHT_POSITION = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}


@dataclass(frozen=True)
class OnnxGraph:
    """An ONNX graph with its constants, producers and consumers at hand, each looked up once."""

    model: Any

    @cached_property
    def weights(self) -> "dict[str, onnx.TensorProto]":
        """Its initializers by name."""
        return {each.name: each for each in self.model.graph.initializer}

    @cached_property
    def producers(self) -> "dict[str, onnx.NodeProto]":
        """The node that writes each tensor."""
        return {output: node for node in self.model.graph.node for output in node.output}

    @cached_property
    def consumers(self) -> dict[str, list[Any]]:
        """The nodes that read each tensor."""
        found: dict[str, list[Any]] = {}
        for node in self.model.graph.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(each.name for each in self.model.graph.output)


def iterate_graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside its nodes: the branches of If, the bodies of Loop and Scan."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from iterate_graphs(inner)


def list_read_names(node: Any) -> set[str]:
    """What a node reads: its inputs, and what the graphs inside it take from around them."""
    inner = (each for attribute in node.attribute for each in (attribute.g, *attribute.graphs))
    return {*node.input, *(name for graph in inner for each in iterate_nodes(graph) for name in each.input)}


def iterate_nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph, and after them those of the graphs inside its nodes."""
    for each in iterate_graphs(graph):
        yield from each.node


def drop_unknown_sizes(model: Any) -> Any:
    """`model` without what ModelOpt states of sizes that it could not infer: it calls each of them `unk`.

    Sizes with one name are equal by ONNX's rules, and ONNX Runtime gives such tensors the same memory.
    """
    for graph in iterate_graphs(model.graph):
        del graph.value_info[:]  # every runtime infers these itself
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "unk":
                    dim.Clear()
    return model


def find_quantized_operators(model: Any) -> list[str]:
    """The operators that show that a graph is quantized already, each once."""
    return sorted({node.op_type for node in iterate_nodes(model.graph)} & QUANTIZED)


def is_quantized_dynamically(path: Path) -> bool:
    """Whether the scales of a graph come from the data of each batch."""
    import onnx

    found = find_quantized_operators(onnx.load(path, load_external_data=False))
    return bool({"DynamicQuantizeLinear", *_QUANTIZES_ITS_DATA} & set(found))


def rename_inner_twins(model: Any) -> None:
    """Gives what is written in two graphs under one name, an outer one and a branch, names of their own, in place.

    onnx's version converter numbers what it adds in each graph from one on, which is one name too often.
    """
    seen: set[str] = set()
    for number, graph in enumerate(iterate_graphs(model.graph)):
        twins = {name for node in graph.node for name in node.output if name and name in seen}
        for inner in iterate_graphs(graph) if twins else ():
            for node in inner.node:
                for names in (node.input, node.output):
                    for index, name in enumerate(names):
                        if name in twins:
                            names[index] = f"{name}_in_{number}"
        for value in (*graph.output, *graph.value_info) if twins else ():
            if value.name in twins:
                value.name = f"{value.name}_in_{number}"
        seen |= {name for node in graph.node for name in node.output}


def find_own_precision(graph: Any) -> Precision | None:
    """INT8 for a graph with operators of quantization, FP16 or BF16 for one whose weights are; None for FP32."""
    if find_quantized_operators(graph):
        return Precision.INT8
    sizes: dict[str, int] = {}
    for tensor in _iterate_float_weights(graph):
        kind = type_name_from_onnx(tensor.data_type)
        sizes[kind] = sizes.get(kind, 0) + tensor.ByteSize()
    largest = max(sizes, key=lambda kind: sizes[kind], default="fp32")
    return Precision(largest) if largest in HALF_TYPES else None


def _iterate_float_weights(graph: Any) -> Iterator[Any]:
    for each in iterate_graphs(graph.graph):
        for tensor in each.initializer:
            if tensor.data_type in (1, *HALF_TYPES.values()):
                yield tensor


def name_nodes(model: Any) -> Any:
    """`model` after giving every node a name of its own, in place: layers are referred to by it."""
    seen: set[str] = set()
    for index, node in enumerate(iterate_nodes(model.graph)):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_{index}"
        seen.add(node.name)
    return model


def find_index_bounds(model: Any) -> dict[str, int]:
    """For each graph input that picks rows of a table of constants: how many rows the smallest such table has."""
    graph = OnnxGraph(model)
    bounds: dict[str, int] = {}
    for name in (each.name for each in model.graph.input):
        ahead = [name]
        while ahead:
            tensor = ahead.pop()
            for node in graph.consumers.get(tensor, []):
                if node.op_type == "Gather" and node.input[1] == tensor and node.input[0] in graph.weights:
                    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
                    rows = graph.weights[node.input[0]].dims[axis]
                    bounds[name] = min(rows, bounds.get(name, rows))
                elif node.op_type in _KEEPS_VALUES and node.input[0] == tensor:
                    ahead += node.output
    return bounds


@dataclass(frozen=True)
class GraphTypes:
    """Element types and shapes by tensor name, at the profile's `opt` shapes."""

    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def type_name_from_onnx(element_type: int) -> str:
    """`fp32` for `TensorProto.FLOAT`, and so on; other types by ONNX's own name."""
    import onnx

    short = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16", "INT8": "int8", "UINT8": "int8", "DOUBLE": "fp64"}
    name: str = onnx.TensorProto.DataType.Name(element_type)
    return short.get(name, "fp8" if name.startswith("FLOAT8") else name.lower())


def infer_graph_types(model: Any, inputs: Iterable[InputSpec]) -> GraphTypes:
    """Types and shapes of all tensors, by ONNX's shape inference on the graph with its inputs at `opt`."""
    import onnx

    fixed = _copy_for_inference(model)
    by_name = {each.name: each for each in inputs}
    open_sizes: dict[str, int] = {}
    for value in fixed.graph.input:
        if (spec := by_name.get(value.name)) is None:
            continue
        for size, dim in zip(spec.opt, value.type.tensor_type.shape.dim, strict=True):
            if dim.dim_param:
                open_sizes[dim.dim_param] = size
            dim.dim_value = size
    for value in (*fixed.graph.output, *fixed.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in open_sizes:
                dim.dim_value = open_sizes[dim.dim_param]
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    types, shapes = {}, {}
    for graph in iterate_graphs(inferred.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            types[value.name] = type_name_from_onnx(tensor.elem_type)
            if tensor.HasField("shape") and all(dim.dim_value > 0 for dim in tensor.shape.dim):
                shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    for name, tensor in _iterate_constants(model.graph):
        types[name] = type_name_from_onnx(tensor.data_type)
        shapes[name] = tuple(tensor.dims)
    return GraphTypes(types, shapes)


def _iterate_constants(graph: Any) -> Iterator[tuple[str, Any]]:
    """Constants by name: initializers, and what Constant nodes hold, also of inner graphs."""
    for each in iterate_graphs(graph):
        yield from ((tensor.name, tensor) for tensor in each.initializer)
        for node in each.node:
            if node.op_type == "Constant":
                yield from ((node.output[0], held.t) for held in node.attribute if held.HasField("t"))


def _copy_for_inference(model: Any) -> Any:
    """A copy without the bytes of large weights: shape inference needs their shapes, and copies what it is given."""
    import onnx

    copy = onnx.ModelProto()
    if model.ByteSize() < 1 << 20:
        copy.CopyFrom(model)
        return copy
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    copy.graph.name = model.graph.name
    copy.graph.node.extend(model.graph.node)
    copy.graph.input.extend(model.graph.input)
    copy.graph.output.extend(model.graph.output)
    copy.graph.value_info.extend(model.graph.value_info)
    declared = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 1024:  # small ones may be shapes, axes or pads that inference has to read
            copy.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            copy.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return copy


def count_node_macs(node: Any, known: GraphTypes) -> int:
    """MACs of one node; 0 for those without a matrix product or whose shapes are unknown."""
    shapes = known.shapes
    output = shapes.get(node.output[0])
    if node.op_type in _CONVOLUTIONS:
        weight = shapes.get(node.input[_WEIGHT_POSITION.get(node.op_type, 1)])
        return math.prod(output) * math.prod(weight[1:]) if output and weight else 0
    if node.op_type == "ConvTranspose":
        weight, data = shapes.get(node.input[1]), shapes.get(node.input[0])
        return math.prod(data) * math.prod(weight[1:]) if data and weight else 0
    if node.op_type in _PRODUCTS:
        left = shapes.get(node.input[0])
        transposed = any(each.name == "transA" and each.i for each in node.attribute)
        return math.prod(output) * left[-2 if transposed else -1] if output and left else 0
    if node.op_type in _RECURRENT:  # every step multiplies each sample with the weights of inputs and of state
        data, weights = shapes.get(node.input[0]), [shapes.get(name) for name in node.input[1:3]]
        return math.prod(data[:2]) * sum(math.prod(each) for each in weights if each) if data and all(weights) else 0
    return 0


def layers_from_onnx(model: Any, inputs: Iterable[InputSpec], source: Any = None) -> tuple[LayerType, ...]:
    """The layers of a graph, executed as its nodes stand, by the type of their data input.

    `source` is the graph that a runtime made `model` of: shapes that get lost behind a runtime's own operators are found there.
    """
    inputs = tuple(inputs)
    known = infer_graph_types(model, inputs)
    if source is not None:
        before = infer_graph_types(source, inputs)
        known = GraphTypes({**before.types, **known.types}, {**before.shapes, **known.shapes})
    layers = []
    for node in iterate_nodes(model.graph):
        if node.op_type in _NO_ARITHMETIC or not node.input or not node.output:
            continue
        kind = "int8" if node.op_type in _QUANTIZES_ITS_DATA else known.types.get(node.input[0], "unknown")
        layers.append(LayerType(node.name or node.output[0], node.op_type, kind, count_node_macs(node, known)))
    return tuple(
        layer for layer in layers if layer.type in ("fp32", "fp16", "bf16", "int8", "fp8", "fp64") or layer.macs
    )


# 2:4 structured sparsity: at most two values other than zero in each four along the axis that a product sums over.
#
# Source: NVIDIA TensorRT documentation, "Structured Sparsity"; Mishra et al., Accelerating Sparse Deep Neural Networks, 2021.


GROUP, KEPT = 4, 2
_SAME_ZEROS = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")
"""Operators between a weight and its product that keep zeros: quantization of weights is symmetric."""


def list_sparse_products(model: Any) -> tuple[str, ...]:
    """The names of the convolutions and matrix products whose constant weights have the pattern."""
    from onnx import numpy_helper

    graph = OnnxGraph(model)
    found = []
    for node in iterate_nodes(model.graph):
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        name = node.input[1]
        while name in graph.producers and graph.producers[name].op_type in _SAME_ZEROS:
            name = graph.producers[name].input[0]
        if name in graph.weights:
            transposed = any(each.name == "transB" and each.i for each in node.attribute)
            axis = 1 if node.op_type == "Conv" or transposed else -2
            if has_pattern(numpy_helper.to_array(graph.weights[name]), axis):
                found.append(node.name or node.output[0])
    return tuple(found)


def has_pattern(weight: "np.ndarray", axis: int) -> bool:
    """Whether `weight` has the pattern along `axis`, whose length has to be a multiple of four."""
    if weight.ndim < 2 or weight.shape[axis] % GROUP:
        return False
    import numpy as np

    groups = np.moveaxis(weight, axis, -1).reshape(-1, GROUP)
    return bool((np.count_nonzero(groups, axis=1) <= KEPT).all())
