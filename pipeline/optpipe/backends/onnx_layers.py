"""The layers of an ONNX graph with their types and multiply-adds, by shape inference."""

import math
from collections.abc import Iterable
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import NO_ARITHMETIC, OnnxGraph, iterate_nodes, read_constants
from optpipe.backends.onnx_products import (
    GraphTypes,
    count_node_macs,
    describe_stored_weights,
    find_product_type,
    standardize_for_inference,
)
from optpipe.core import onnx
from optpipe.core.card import InputSpec
from optpipe.core.precision import LayerType


def type_name_from_onnx(element_type: int) -> str:
    """`fp32` for `TensorProto.FLOAT`, and so on; other types keep ONNX's name in lower case."""
    short = {
        "FLOAT": "fp32",
        "FLOAT16": "fp16",
        "BFLOAT16": "bf16",
        "INT8": "int8",
        "UINT8": "int8",
        "DOUBLE": "fp64",
    }
    name: str = onnx.TensorProto.DataType.Name(element_type)
    return short.get(name, "fp8" if name.startswith("FLOAT8") else name.lower())


def infer_graph_types(model: Any, inputs: Iterable[InputSpec]) -> GraphTypes:
    """Types and shapes of all tensors, by ONNX's shape inference for inputs of `opt` shapes."""
    fixed = copy_for_inference(model)
    by_name = {spec.name: spec for spec in inputs}
    open_sizes: dict[str, int] = {}
    ambiguous: set[str] = set()
    for value in fixed.graph.input:
        if (spec := by_name.get(value.name)) is None:
            continue
        shape = value.type.tensor_type.shape
        if not value.type.tensor_type.HasField("shape"):
            shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in spec.opt)
        for size, dim in zip(spec.opt, shape.dim, strict=True):
            # two sizes under one name, such as `?` for every open size
            if dim.dim_param and open_sizes.setdefault(dim.dim_param, size) != size:
                ambiguous.add(dim.dim_param)
            dim.dim_value = size
    for name in ambiguous:
        del open_sizes[name]
    for graph in iterate_graphs(fixed.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
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
    for graph in iterate_graphs(model.graph):
        for tensor in graph.initializer:
            types[tensor.name] = type_name_from_onnx(tensor.data_type)
            shapes[tensor.name] = tuple(tensor.dims)
    for name, tensor in read_constants(model).items():
        types[name] = type_name_from_onnx(tensor.data_type)
        shapes[name] = tuple(tensor.dims)
    return GraphTypes(types, shapes)


def infer_shapes(model: Any) -> Any:
    """A `ModelProto` with the types and shapes of its tensors, open sizes by name; large weights are inputs in it."""
    return onnx.shape_inference.infer_shapes(copy_for_inference(model), data_prop=True)


def copy_for_inference(model: Any) -> Any:
    """A copy of `model` without contributed operators, in which large weights are inputs.

    Shape inference knows neither these operators nor more of a weight than its shape, and copies the model.
    """
    copy = onnx.ModelProto()
    if (
        sum(math.prod(tensor.dims) for tensor in model.graph.initializer) < 1 << 18
    ):  # ByteSize() takes 0.15 s for 100 MB
        copy.CopyFrom(model)
    else:
        copy.ir_version = model.ir_version
        copy.opset_import.extend(model.opset_import)
        copy.functions.extend(model.functions)
        copy.graph.name = model.graph.name
        for part in ("node", "input", "output", "value_info"):
            getattr(copy.graph, part).extend(getattr(model.graph, part))
        _add_weights_by_shape(model.graph.initializer, copy.graph)
    for graph in iterate_graphs(copy.graph):
        standardize_for_inference(graph)
    return copy


def _add_weights_by_shape(weights: Iterable[Any], graph: Any) -> None:
    """Adds large weights to `graph` as inputs, and small ones as they are: shapes, axes, or pads that inference reads."""
    declared = {value.name for value in graph.input}
    for tensor in weights:
        if math.prod(tensor.dims) <= 1024:
            graph.initializer.append(tensor)
        elif tensor.name not in declared:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )


def count_graph_macs(model: Any, known: GraphTypes) -> dict[str, int | None]:
    """The MACs of each node by its name, or by its first output if it has none: see `count_node_macs`.

    None also for calls of the model's own functions, and for products inside If, Loop, and Scan: how often these run is unknown.
    """
    functions = {(function.domain, function.name) for function in model.functions}
    counted: dict[str, int | None] = {}
    for depth, graph in enumerate(iterate_graphs(model.graph)):
        for node in graph.node:
            if not node.output:
                continue
            macs = count_node_macs(node, known)
            if (macs and depth) or (node.domain, node.op_type) in functions:
                macs = None
            counted[node.name or node.output[0]] = macs
    return counted


def describe_graph_weights(model: Any) -> dict[str, str]:
    """How the weights of products are stored, by node: `{"fc1": "int4 (block 32)"}`. Others are as they are computed."""
    graph = OnnxGraph(model)
    constants = {**graph.weights, **read_constants(model)}
    forms = {
        node.name or node.output[0]: describe_stored_weights(node, graph.producers, constants)
        for node in model.graph.node
        if node.output
    }
    return {name: form for name, form in forms.items() if form}


def layers_from_onnx(
    model: Any, inputs: Iterable[InputSpec], source: Any = None
) -> tuple[LayerType, ...]:
    """The nodes of a graph that compute, each with the type of its data input and its MACs.

    The MACs are None if they are unknown: see `count_graph_macs`.

    `source` is the graph that a runtime optimized to `model`: it has the shapes that inference loses at the runtime's operators.
    """
    inputs = tuple(inputs)
    known = infer_graph_types(model, inputs)
    if source is not None:
        before = infer_graph_types(source, inputs)
        known = GraphTypes({**before.types, **known.types}, {**before.shapes, **known.shapes})
    counted, forms = count_graph_macs(model, known), describe_graph_weights(model)
    layers = []
    for node in iterate_nodes(model.graph):
        name = node.name or next(iter(node.output), "")
        macs = counted.get(name, 0)
        if macs == 0 and (node.op_type in NO_ARITHMETIC or not node.input or not node.output):
            continue
        if macs == 0:
            kind, form = known.types.get(node.input[0], "unknown"), ""
        else:
            kind, form = find_product_type(node, known), forms.get(name, "")
        layers.append(LayerType(name, node.op_type, kind, macs, form))
    return tuple(
        layer
        for layer in layers
        if layer.type in ("fp32", "fp16", "bf16", "int8", "fp8", "fp64") or layer.macs != 0
    )
