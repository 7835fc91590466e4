"""Inputs of an ONNX graph whose values are indices, sizes, or compared with constants; random values would not fit them."""

import math
from collections.abc import Mapping
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import KEEPS_VALUES, OnnxGraph, list_read_names, read_constants
from optpipe.core import onnx
from optpipe.core.records import group_pairs

SIZE_INPUTS = {
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


COMPUTES_SIZES = KEEPS_VALUES | {
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
    for name in (value.name for value in model.graph.input):
        ahead = [name]
        while ahead:
            tensor = ahead.pop()
            for node in graph.consumers.get(tensor, []):
                if (
                    node.op_type == "Gather"
                    and node.input[1] == tensor
                    and node.input[0] in graph.weights
                ):
                    axis = next(
                        (attribute.i for attribute in node.attribute if attribute.name == "axis"), 0
                    )
                    rows = graph.weights[node.input[0]].dims[axis]
                    bounds[name] = min(rows, bounds.get(name, rows))
                elif node.op_type in KEEPS_VALUES and node.input[0] == tensor:
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
    functions = {function.name: function for function in model.functions}
    return frozenset(
        value.name for value in model.graph.input if _is_size(value.name, readers, functions)
    )


def _is_size(name: str, readers: Mapping[str, list[Any]], functions: Mapping[str, Any]) -> bool:
    """Whether a tensor, or one that is computed from it as sizes are, is a size."""
    ahead, seen = [name], {name}
    while ahead:
        tensor = ahead.pop()
        for node in readers.get(tensor, []):
            places = [at for at, given in enumerate(node.input) if given == tensor]
            if not set(places).isdisjoint(SIZE_INPUTS.get(node.op_type, ())):
                return True
            if places and set(places).issubset(_READS_INDICES.get(node.op_type, ())):
                continue
            reached: list[str] = []
            if node.op_type in functions:
                inner = functions[node.op_type].input
                reached += [inner[at] for at in places if at < len(inner)]
            if node.op_type in COMPUTES_SIZES | {"If", "Loop", "Scan"} | functions.keys():
                reached += node.output
            ahead += [name for name in reached if name not in seen]
            seen.update(reached)
    return False


def find_compared_values(model: Any) -> dict[str, int]:
    """For each graph input that is compared with constants, such as a sampling rate: the first of them."""
    constants = read_constants(model) | {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    compared: dict[str, int] = {}
    for node in (node for node in model.graph.node if node.op_type == "Equal"):
        for name, other in (node.input, reversed(node.input)):
            if name in inputs and other in constants and math.prod(constants[other].dims) == 1:
                compared.setdefault(
                    name, int(onnx.numpy_helper.to_array(constants[other]).reshape(-1)[0])
                )
    return compared
