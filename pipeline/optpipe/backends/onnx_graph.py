"""Layers of ONNX graphs with their types and MACs, and quantized layers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.backends.base import MarkedNetwork, Run
from optpipe.backends.graph_names import NameGiver, iterate_graphs, rename_some_values
from optpipe.backends.onnx_products import (
    QUANTIZES_ITS_DATA,
    GraphTypes,
    count_node_macs,
    describe_stored_weights,
    find_product_type,
    standardize_for_inference,
)
from optpipe.core import np, onnx
from optpipe.core.card import InputSpec
from optpipe.core.precision import LayerType, Precision
from optpipe.core.records import group_pairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that get Q/DQ pairs; their second input is the weight."""
QUANTIZED = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
    "MatMulIntegerToFloat", "QLinearAdd", "QGemm", "QAttention", "MatMulInteger16", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "QLinearConcat", "QLinearLeakyRelu", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearWhere",
    "QLinearReduceMean", *QUANTIZES_ITS_DATA,
}  # fmt: skip
"""Operators of quantized graphs. One whose only such operator dequantizes weights is not quantized: `is_weight_only`."""
HALF_TYPES = {"fp16": 10, "bf16": 16}
"""ONNX's numbers for the half-precision types."""
_NO_ARITHMETIC = {
    "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "QuantizeLinear",
    "DequantizeLinear", "ReorderInput", "ReorderOutput", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip
_KEEPS_VALUES = {
    "Cast",
    "Expand",
    "Flatten",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}


@dataclass(frozen=True)
class OnnxGraph:
    """An ONNX graph with lookup tables for its constants, producers, and consumers."""

    model: Any

    @cached_property
    def weights(self) -> "dict[str, onnx.TensorProto]":
        return {each.name: each for each in self.model.graph.initializer}

    @cached_property
    def producers(self) -> "dict[str, onnx.NodeProto]":
        return {output: node for node in self.model.graph.node for output in node.output}

    @cached_property
    def consumers(self) -> dict[str, list[Any]]:
        return group_pairs((name, node) for node in self.model.graph.node for name in node.input)

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(each.name for each in self.model.graph.output)


def list_read_names(node: Any) -> set[str]:
    """The tensors that a node and the graphs inside it read."""
    inner = (each for attribute in node.attribute for each in (attribute.g, *attribute.graphs))
    return {
        *node.input,
        *(name for graph in inner for each in iterate_nodes(graph) for name in each.input),
    }


def replace_nodes(graph: Any, nodes: Sequence[Any], constants: Iterable[Any] = ()) -> None:
    """Gives a graph other nodes and drops the constants that these do not read, in place; `constants` are new ones."""
    read = {each.name for each in graph.output}.union(*map(list_read_names, nodes))
    kept = [each for each in (*graph.initializer, *constants) if each.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)


def iterate_nodes(graph: Any) -> Iterator[Any]:
    for each in iterate_graphs(graph):
        yield from each.node


def drop_unknown_sizes(model: Any) -> Any:
    """Removes the name `unk`, which ModelOpt gives each size that it could not infer, in place.

    In ONNX, sizes with the same name are equal, and ONNX Runtime lets such tensors share memory.
    """
    for graph in iterate_graphs(model.graph):
        del graph.value_info[:]  # every runtime infers these itself
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "unk":
                    dim.Clear()
    return model


def find_quantized_operators(model: Any) -> list[str]:
    return sorted({node.op_type for node in iterate_nodes(model.graph)} & QUANTIZED)


def find_selected_outputs(path: Path) -> frozenset[str]:
    """The outputs of a graph whose rows NonMaxSuppression or TopK selects, and anything computed from those."""
    graph = load_onnx(path, weights=False).graph
    selected: set[str] = set()
    for node in graph.node:
        if node.op_type in ("NonMaxSuppression", "TopK") or selected & list_read_names(node):
            selected.update(node.output)
    return frozenset(each.name for each in graph.output if each.name in selected)


def is_quantized_dynamically(path: Path) -> bool:
    found = find_quantized_operators(load_onnx(path, weights=False))
    return bool({"DynamicQuantizeLinear", *QUANTIZES_ITS_DATA} & set(found))


def find_unread_inputs(model: Any) -> frozenset[str]:
    """The inputs of a graph that no output depends on."""
    graph = model.graph
    needed = {each.name for each in graph.output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed |= list_read_names(node)
    constants = {each.name for each in graph.initializer}
    return frozenset(each.name for each in graph.input) - needed - constants


def rename_inner_twins(model: Any) -> None:
    """Renames tensors of inner graphs that have the name of a tensor in an outer graph, in place.

    onnx's version converter makes such names: it numbers the tensors that it adds from one in each graph.
    """
    seen: set[str] = set()
    names = NameGiver(model)
    for graph in iterate_graphs(model.graph):
        twins = {name for node in graph.node for name in node.output if name and name in seen}
        if twins:
            renamed = {name: names.give(f"{name}_inside") for name in sorted(twins)}
            rename_some_values(graph, renamed)
        seen |= {name for node in graph.node for name in node.output}


def is_weight_only(model: Any) -> bool:
    """Whether a graph has quantized weights that are dequantized for floating-point products, and no quantized data.

    Such products compute in floating point, whatever the weights are stored in.
    """
    if find_quantized_operators(model) != ["DequantizeLinear"]:
        return False
    constants = {each.name for inner in iterate_graphs(model.graph) for each in inner.initializer}
    constants |= {
        name
        for node in iterate_nodes(model.graph)
        if node.op_type == "Constant"
        for name in node.output
    }
    return all(
        node.input[0] in constants
        for node in iterate_nodes(model.graph)
        if node.op_type == "DequantizeLinear"
    )


def find_own_precision(graph: Any) -> Precision | None:
    """INT8 for a quantized graph, FP16 or BF16 if most of its weight bytes have that type, None for FP32.

    A graph of which only weights are quantized has the type of its scales, which is that of its products.
    """
    weight_only = is_weight_only(graph)
    if find_quantized_operators(graph) and not weight_only:
        return Precision.INT8
    sizes: dict[str, int] = {}
    for tensor in (each for inner in iterate_graphs(graph.graph) for each in inner.initializer):
        if tensor.data_type in (1, *HALF_TYPES.values()):
            kind = type_name_from_onnx(tensor.data_type)
            sizes[kind] = sizes.get(kind, 0) + tensor.ByteSize()
    largest = max(sizes, key=lambda kind: sizes[kind], default="fp32")
    return Precision(largest) if largest in HALF_TYPES else None


def load_onnx(path: Path, *, weights: bool = True) -> Any:
    """The model in a file; external data are left out without `weights`."""
    return onnx.load(path, load_external_data=weights)


def name_nodes(model: Any) -> Any:
    """Gives every node a unique name, in place, which identifies its layer; returns `model`."""
    seen: set[str] = set()
    names = None
    for index, node in enumerate(iterate_nodes(model.graph)):
        if not node.name or node.name in seen:
            names = names or NameGiver(model)
            node.name = names.give(f"{node.op_type}_{index}")
        seen.add(node.name)
    return model


def separate_int8_constants(model: Any) -> None:
    """Copies INT8 weights and zero points that several nodes read, in place, so that each node reads its own.

    onnxslim merges equal ones, and layers may share weights. On a CPU without VNNI, ONNX Runtime 1.31 converts signed weights and
    their zero points to unsigned for each layer (see `EXACT_SUMS`), and refuses one that it has converted before.
    """
    stored = {
        each.name: each
        for each in model.graph.initializer
        if each.data_type == onnx.TensorProto.INT8
    }
    if not stored:
        return
    names = NameGiver(model)
    nodes, seen, own = list(model.graph.node), set[str](), []
    weights = {
        each.output[0]: each
        for each in nodes
        if each.op_type == "DequantizeLinear" and each.input[0] in stored
    }
    for node in nodes:
        for at, name in enumerate(node.input):
            if name in weights and name in seen:
                own.append(onnx.NodeProto())
                own[-1].CopyFrom(weights[name])
                own[-1].name = own[-1].output[0] = node.input[at] = names.give(name)
            seen.add(name)
        own.append(node)
    del model.graph.node[:]
    model.graph.node.extend(own)
    read: set[str] = set()
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name in read and (len(stored[name].dims) < 2 or node.op_type == "DequantizeLinear"):
                copy = model.graph.initializer.add()
                copy.CopyFrom(stored[name])
                copy.name = node.input[at] = names.give(name)
            elif name in stored:
                read.add(name)


def state_zero_points(model: Any) -> None:
    """Gives each DequantizeLinear of INT8 constants its zero point of 0, in place, in the shape of its scales.

    On a CPU without VNNI, ONNX Runtime 1.31 converts such constants to unsigned (see `EXACT_SUMS`) and adds the zero point
    itself, as a single number, which it then refuses beside scales by channel or by block.
    """
    names = NameGiver(model)
    for graph in iterate_graphs(model.graph):
        stored = {each.name: each for each in graph.initializer}
        for node in graph.node:
            if node.op_type != "DequantizeLinear" or (len(node.input) > 2 and node.input[2]):
                continue
            weight, scale = (stored.get(name) for name in node.input[:2])
            if weight is None or scale is None or weight.data_type != onnx.TensorProto.INT8:
                continue
            zeros = np.zeros(tuple(scale.dims), np.int8)
            name = names.give(f"{scale.name}_zero_point")
            graph.initializer.append(onnx.numpy_helper.from_array(zeros, name))
            node.input[:] = [*node.input[:2], name]


_SIZES = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1,),
    "ConstantOfShape": (0,),
    "DFT": (1,),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "Loop": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "STFT": (1, 3),
    "Tile": (1,),
    "TopK": (1,),
}
"""The inputs of operators that are sizes of their outputs (ONNX operators, version 1.23)."""
_COMPUTES_SIZES = _KEEPS_VALUES | {
    "Abs",
    "Add",
    "CastLike",
    "Clip",
    "Concat",
    "CumSum",
    "Div",
    "Gather",
    "GatherElements",
    "GatherND",
    "Max",
    "Mean",
    "Min",
    "Mod",
    "Mul",
    "Neg",
    "Pow",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ScatterElements",
    "ScatterND",
    "Split",
    "Sub",
    "Sum",
    "Where",
}
"""Operators that compute sizes: if one of them reads an input, its outputs grow with the input's values."""
_READS_INDICES = {"Gather": (1,), "GatherElements": (1,), "GatherND": (1,), "Where": (0,)}
"""The inputs of these that choose values and are none."""


def find_index_bounds(model: Any) -> dict[str, int]:
    """For each graph input that indexes constant tables, the number of rows of the smallest."""
    graph = OnnxGraph(model)
    bounds: dict[str, int] = {}
    for name in (each.name for each in model.graph.input):
        ahead = [name]
        while ahead:
            tensor = ahead.pop()
            for node in graph.consumers.get(tensor, []):
                if (
                    node.op_type == "Gather"
                    and node.input[1] == tensor
                    and node.input[0] in graph.weights
                ):
                    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
                    rows = graph.weights[node.input[0]].dims[axis]
                    bounds[name] = min(rows, bounds.get(name, rows))
                elif node.op_type in _KEEPS_VALUES and node.input[0] == tensor:
                    ahead += node.output
    return bounds


def find_size_inputs(model: Any) -> frozenset[str]:
    """The graph inputs that sizes of tensors are computed from, also in branches, loops, and functions."""
    readers = group_pairs(
        (name, node)
        for scope in (model.graph, *model.functions)
        for graph in iterate_graphs(scope)
        for node in graph.node
        for name in list_read_names(node)
    )
    functions = {each.name: each for each in model.functions}
    return frozenset(
        each.name for each in model.graph.input if _is_size(each.name, readers, functions)
    )


def _is_size(name: str, readers: Mapping[str, list[Any]], functions: Mapping[str, Any]) -> bool:
    """Whether a tensor, or one that is computed from it as sizes are, is a size."""
    ahead, seen = [name], {name}
    while ahead:
        tensor = ahead.pop()
        for node in readers.get(tensor, []):
            places = [at for at, given in enumerate(node.input) if given == tensor]
            if not set(places).isdisjoint(_SIZES.get(node.op_type, ())):
                return True
            if places and set(places).issubset(_READS_INDICES.get(node.op_type, ())):
                continue
            reached: list[str] = []
            if node.op_type in functions:
                inner = functions[node.op_type].input
                reached += [inner[at] for at in places if at < len(inner)]
            if node.op_type in _COMPUTES_SIZES | {"If", "Loop", "Scan"} | functions.keys():
                reached += node.output
            ahead += [each for each in reached if each not in seen]
            seen.update(reached)
    return False


def find_compared_values(model: Any) -> dict[str, int]:
    """For each graph input that is compared with constants, such as a sampling rate: the first of them."""
    constants = _read_constants(model) | {each.name: each for each in model.graph.initializer}
    inputs, found = {each.name for each in model.graph.input}, dict[str, int]()
    for node in (each for each in model.graph.node if each.op_type == "Equal"):
        for name, other in (node.input, reversed(node.input)):
            if name in inputs and other in constants and math.prod(constants[other].dims) == 1:
                found.setdefault(
                    name, int(onnx.numpy_helper.to_array(constants[other]).reshape(-1)[0])
                )
    return found


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
    fixed = _copy_for_inference(model)
    for graph in iterate_graphs(fixed.graph):
        standardize_for_inference(graph)
    by_name = {each.name: each for each in inputs}
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
    for name, tensor in _read_constants(model).items():
        types[name] = type_name_from_onnx(tensor.data_type)
        shapes[name] = tuple(tensor.dims)
    return GraphTypes(types, shapes)


def _copy_for_inference(model: Any) -> Any:
    """A copy of `model` in which large weights are inputs: shape inference copies the model and needs only their shapes."""
    copy = onnx.ModelProto()
    if (
        sum(math.prod(each.dims) for each in model.graph.initializer) < 1 << 18
    ):  # ByteSize() takes 0.15 s for 100 MB
        copy.CopyFrom(model)
        return copy
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    copy.graph.name = model.graph.name
    for part in ("node", "input", "output", "value_info"):
        getattr(copy.graph, part).extend(getattr(model.graph, part))
    declared = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 1024:  # shapes, axes, or pads that inference reads
            copy.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            copy.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return copy


def _read_constants(model: Any) -> dict[str, Any]:
    """The tensors of Constant nodes by name."""
    nodes = (each for each in iterate_nodes(model.graph) if each.op_type == "Constant")
    return {
        node.output[0]: held.t for node in nodes for held in node.attribute if held.HasField("t")
    }


def count_graph_macs(model: Any, known: GraphTypes) -> dict[str, int | None]:
    """The MACs of each node by its name, or by its first output if it has none: see `count_node_macs`.

    None also for calls of the model's own functions, and for products inside If, Loop, and Scan: how often these run is unknown.
    """
    functions = {(each.domain, each.name) for each in model.functions}
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
    constants = {**graph.weights, **_read_constants(model)}
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
        if macs == 0 and (node.op_type in _NO_ARITHMETIC or not node.input or not node.output):
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


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A convolution or linear layer of a Q/DQ graph. A quantized number stands for itself times its scale."""

    name: str
    weight: "NDArray[Any]"
    """INT8 or E4M3: (output channels, input channels of a group, kernel …) or (output features, input features)."""
    weight_scale: "NDArray[np.float32]"
    """One scale per output."""
    scale: float
    """Scale of the input."""
    output_scale: float | None = None
    """Scale of the output before any activation, if the graph quantizes it, such as the shortcut of an addition."""
    kept: bool = False
    """Whether the layer stays in floating point and only shares its weight with a quantized one."""


def layers_from_qdq(
    model: Any, have_same_weights: "Callable[[NDArray[Any], QuantizedLayer], bool]"
) -> tuple[QuantizedLayer, ...]:
    """The layers of a Q/DQ graph whose data and weights are dequantized, in the graph's order.

    They include the floating-point layers that share a weight with one of them, by `have_same_weights(weights, layer)`.
    """
    graph = OnnxGraph(name_nodes(model))

    def read(name: str) -> "NDArray[Any]":
        return np.array(onnx.numpy_helper.to_array(graph.weights[name]))

    found: dict[str, QuantizedLayer] = {}
    wide = {}
    for node in (each for each in model.graph.node if each.op_type in ("Conv", "Gemm", "MatMul")):
        straight = node.op_type == "Conv" or any(
            each.name == "transB" and each.i for each in node.attribute
        )
        data, held = (graph.producers.get(name) for name in node.input[:2])
        if data is None or held is None or {data.op_type, held.op_type} != {"DequantizeLinear"}:
            if node.input[1] in graph.weights:
                wide[node.name] = read(node.input[1]) if straight else read(node.input[1]).T
            continue
        weight = read(held.input[0]) if straight else np.ascontiguousarray(read(held.input[0]).T)
        weight_scale = np.resize(read(held.input[1]).astype(np.float32).reshape(-1), len(weight))
        after = [
            each
            for each in graph.consumers.get(node.output[0], [])
            if each.op_type == "QuantizeLinear"
        ]
        output_scale = float(read(after[0].input[1])) if after else None
        found[node.name] = QuantizedLayer(
            node.name, weight, weight_scale, float(read(data.input[1])), output_scale
        )
    for name, values in wide.items():
        if (
            twin := next((each for each in found.values() if have_same_weights(values, each)), None)
        ) is not None:
            found[name] = replace(twin, name=name, kept=True)
    return tuple(found[node.name] for node in model.graph.node if node.name in found)


# Intermediate tensors, as outputs of a graph and as inputs of its layers.


_FLOATS = {"fp32": "float32", "fp16": "float16"}


def expose_tensors(model: Any, tensors: Iterable[str]) -> Any:
    present = {each.name for each in (*model.graph.output, *model.graph.input)}
    new = [
        onnx.helper.make_empty_tensor_value_info(name) for name in tensors if name not in present
    ]
    model.graph.output.extend(new)
    return model


class _Place(NamedTuple):
    """The tensor that holds a value, with its type; an integer is value / scale + zero."""

    tensor: str
    dtype: str = "float32"
    scale: float = 1.0
    zero: int = 0


REPRODUCER = """# {tensor}: by ONNX Runtime without optimizations, and compiled.

from pathlib import Path

import numpy as np
import onnxruntime as ort

graph, held = str(Path(__file__).with_name("subgraph.onnx")), np.load(Path(__file__).with_name("inputs.npz"))
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
inputs = dict(zip([each.name for each in session.get_inputs()], held.values()))
expected = session.run(None, inputs)[0].astype("f8") - {zero}
{reproduce}
difference = found.astype("f8") - {zero} - expected
print(version, f"SNR {{10 * np.log10(np.square(expected).sum() / np.square(difference).sum()):.1f}} dB",
      f"largest difference {{np.abs(difference).max():.3g}}")
"""


class MarkedGraph(MarkedNetwork):
    """A `MarkedNetwork` of the graph `model`, which a runtime optimized from `written`.

    `open_graph` returns the function that runs a graph, for example inputs; `reproduce` does the same in a `REPRODUCER`. A tensor
    that is only read in INT8 is read through its Q/DQ pair in `written`.
    """

    def __init__(
        self,
        model: Any,
        written: Any,
        inputs: Iterable[InputSpec],
        open_graph: Callable[[Any, Any], Run],
        reproduce: str = "",
    ) -> None:
        self._model, self._open, self._reproduce, inputs = (
            model,
            open_graph,
            reproduce,
            tuple(inputs),
        )
        known, stored = infer_graph_types(written, inputs), OnnxGraph(written).weights
        produced, fed = OnnxGraph(model).producers.keys(), {each.name for each in inputs}
        wide = {
            name
            for node in written.graph.node
            if node.op_type != "QuantizeLinear"
            for name in node.input
        }
        self._places: dict[str, _Place] = {}
        self.layers, self.ranges = {}, {}
        for node in written.graph.node:
            if not fed & list_read_names(node):
                continue
            fed.update(node.output)
            for name in node.output if node.op_type not in _NO_ARITHMETIC else ():
                if (kind := known.types.get(name)) in _FLOATS:
                    self.layers[name], self._places[name] = (
                        node.op_type,
                        _Place(name, _FLOATS[kind]),
                    )
            if (
                node.op_type == "QuantizeLinear"
                and len(node.input) > 2
                and {*node.input[1:]} <= stored.keys()
            ):
                source = node.input[0]
                scale, zero = (onnx.numpy_helper.to_array(stored[each]) for each in node.input[1:])
                if scale.size == 1 and zero.dtype.kind in "iu":
                    place, ends = (
                        _Place(node.output[0], str(zero.dtype), float(scale), int(zero)),
                        np.iinfo(zero.dtype),
                    )
                    low, high = ((each - place.zero) * place.scale for each in (ends.min, ends.max))
                    self.ranges[source] = low, high
                    if source not in produced & self._places.keys() or (
                        source not in wide and place.tensor in produced
                    ):
                        self._places[source] = place
        self.layers = {
            name: op for name, op in self.layers.items() if self._places[name].tensor in produced
        }
        self.sizes = {name: math.prod(known.shapes.get(name, (0,))) for name in self.layers}
        inner = sum(len(each.node) for each in iterate_graphs(model.graph)) - len(model.graph.node)
        self.hidden = f"{inner} operators inside If, Loop or Scan" if inner else ""
        self.outputs = tuple(each.name for each in model.graph.output)

    def _cut_model(
        self, tensors: Iterable[str], given: Iterable[str]
    ) -> tuple[Any, list[str], dict[str, tuple[str, _Place]]]:
        """The graph that computes `tensors`, the names of `given` that it needs, and the output with the place of each tensor."""
        inner, nodes = {self._places[name].tensor: name for name in given}, []
        places = {name: self._places.get(name, _Place(name)) for name in tensors}
        names = NameGiver(self._model)
        recomputed = {tensor: names.give(f"{tensor}_recomputed") for tensor in inner}
        outputs = {
            name: (recomputed.get(place.tensor, place.tensor), place)
            for name, place in places.items()
        }
        read = {output for output, _ in outputs.values()}
        for node in reversed(self._model.graph.node):
            own = onnx.NodeProto()
            own.CopyFrom(node)
            own.output[:] = [recomputed.get(name, name) for name in node.output]
            if read & {*own.output}:
                read |= list_read_names(node)
                nodes.append(own)
        needed = [name for tensor, name in inner.items() if tensor in read]
        inputs = [each for each in self._model.graph.input if each.name in read]
        weights = [each for each in self._model.graph.initializer if each.name in read]
        graph = onnx.helper.make_graph(nodes[::-1], "cut", inputs, [], weights)
        made = {"opset_imports": self._model.opset_import, "functions": self._model.functions}
        model = onnx.helper.make_model(graph, ir_version=self._model.ir_version, **made)
        return expose_tensors(model, [output for output, _ in outputs.values()]), needed, outputs

    def _feed(
        self, model: Any, needed: Iterable[str], values: "Mapping[str, NDArray[Any]]"
    ) -> "dict[str, NDArray[Any]]":
        """The inputs of a cut graph, which are added to it if they are intermediate tensors."""
        known = {each.name for each in model.graph.input}
        feeds = {name: values[name] for name in known & values.keys()}
        for place, value in ((self._places[name], values[name]) for name in needed):
            if place.dtype not in _FLOATS.values():
                ends = np.iinfo(place.dtype)
                value = np.clip(
                    np.rint(value / np.float32(place.scale)) + place.zero, ends.min, ends.max
                )
            feeds[place.tensor] = value.astype(place.dtype, copy=False)
            if place.tensor not in known:
                kind = onnx.helper.np_dtype_to_tensor_dtype(feeds[place.tensor].dtype)
                model.graph.input.append(
                    onnx.helper.make_tensor_value_info(place.tensor, kind, [None] * value.ndim)
                )
        return feeds

    def cut(self, tensors: Iterable[str], given: Iterable[str] = ()) -> tuple[tuple[str, ...], Run]:
        model, needed, outputs = self._cut_model(tensors, given)
        opened: list[Run] = []

        def run(values: "Mapping[str, NDArray[Any]]") -> "dict[str, NDArray[Any]]":
            feeds = self._feed(model, needed, values)
            if not opened:
                opened.append(self._open(model, feeds))
            found, read = opened[0](feeds), {}
            for name, (output, place) in outputs.items():
                read[name] = found[output].astype(np.float32, copy=False)
                if place.scale != 1:
                    read[name] = (read[name] - np.float32(place.zero)) * np.float32(place.scale)
            return read

        return (*needed,), run

    def save(
        self, tensor: str, given: Iterable[str], values: "Mapping[str, NDArray[Any]]", folder: Path
    ) -> None:
        model, needed, outputs = self._cut_model((tensor,), given)
        feeds = self._feed(model, needed, values)
        for each in model.graph.input:
            kind = each.type.tensor_type.elem_type
            each.CopyFrom(
                onnx.helper.make_tensor_value_info(each.name, kind, feeds[each.name].shape)
            )
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(onnx.shape_inference.infer_shapes(model), folder / "subgraph.onnx")
        np.savez(folder / "inputs.npz", *[feeds[each.name] for each in model.graph.input])
        text = REPRODUCER.format(
            tensor=tensor, reproduce=self._reproduce, zero=outputs[tensor][1].zero
        )
        (folder / "reproduce.py").write_text(text, encoding="utf-8")
