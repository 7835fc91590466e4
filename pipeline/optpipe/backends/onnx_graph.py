"""An ONNX graph's layers, their types and their multiply-adds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from optpipe.core.precision import LayerType
from optpipe.core.tensors import InputSpec

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
}
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
    def weights(self) -> dict[str, Any]:
        """Its initializers by name."""
        return {each.name: each for each in self.model.graph.initializer}

    @cached_property
    def producers(self) -> dict[str, Any]:
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
        """The graph's outputs."""
        return frozenset(each.name for each in self.model.graph.output)


def name_nodes(model: Any) -> Any:
    """`model` after giving every node a name of its own, in place: layers are referred to by it."""
    seen: set[str] = set()
    for index, node in enumerate(model.graph.node):
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
    for value in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info):
        tensor = value.type.tensor_type
        types[value.name] = type_name_from_onnx(tensor.elem_type)
        if tensor.HasField("shape") and all(dim.dim_value > 0 for dim in tensor.shape.dim):
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    for tensor in model.graph.initializer:
        types[tensor.name] = type_name_from_onnx(tensor.data_type)
        shapes[tensor.name] = tuple(tensor.dims)
    return GraphTypes(types, shapes)


def _copy_for_inference(model: Any) -> Any:
    """A copy without the bytes of large weights: shape inference needs their shapes, and copies what it is given."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model) if model.ByteSize() < 1 << 20 else _copy_without_weights(copy, model)
    return copy


def _copy_without_weights(copy: Any, model: Any) -> None:
    import onnx

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


def count_node_macs(node: Any, known: GraphTypes) -> int:
    """Multiply-adds of one node; 0 for those without a matrix product or whose shapes are unknown."""
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
    return 0


def layers_from_onnx(model: Any, inputs: Iterable[InputSpec], *, dequantized_is_int8: bool) -> tuple[LayerType, ...]:
    """The layers of a graph by the type of their data input.

    With `dequantized_is_int8` a product whose data comes out of DequantizeLinear counts as INT8, as TensorRT runs it; a
    runtime that executes the nodes as they stand must be asked without it.
    """
    known = infer_graph_types(model, inputs)
    producers = OnnxGraph(model).producers
    layers = []
    for node in model.graph.node:
        if node.op_type in _NO_ARITHMETIC or not node.input or not node.output:
            continue
        kind = known.types.get(node.input[0], "unknown")
        source = producers.get(node.input[0])
        macs = count_node_macs(node, known)
        if dequantized_is_int8 and macs and source is not None and source.op_type == "DequantizeLinear":
            kind = "int8"
        layers.append(LayerType(node.name or node.output[0], node.op_type, kind, macs))
    return tuple(
        layer for layer in layers if layer.type in ("fp32", "fp16", "bf16", "int8", "fp8", "fp64") or layer.macs
    )
