"""ONNX graphs: their nodes, constants, names, and outputs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from optpipe.backends.graph_names import NameGiver, iterate_graphs
from optpipe.core import onnx
from optpipe.core.records import group_pairs

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that get Q/DQ pairs; their second input is the weight."""


NO_ARITHMETIC = {
    "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Pad", "QuantizeLinear",
    "DequantizeLinear", "ReorderInput", "ReorderOutput", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip


KEEPS_VALUES = {
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
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def producers(self) -> "dict[str, onnx.NodeProto]":
        return {output: node for node in self.model.graph.node for output in node.output}

    @cached_property
    def consumers(self) -> dict[str, list[Any]]:
        return group_pairs((name, node) for node in self.model.graph.node for name in node.input)

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(output.name for output in self.model.graph.output)


def list_read_names(node: Any) -> set[str]:
    """The tensors that a node and the graphs inside it read."""
    inner = (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))
    return {
        *node.input,
        *(name for graph in inner for reader in iterate_nodes(graph) for name in reader.input),
    }


def sort_nodes(nodes: Sequence[Any]) -> list[Any]:
    """`nodes` sorted so that each comes after its inputs. Raises CycleError, a ValueError, if there is no such order."""
    writers = {output: index for index, node in enumerate(nodes) for output in node.output}
    needs = {
        index: [writers[name] for name in list_read_names(node) if name and name in writers]
        for index, node in enumerate(nodes)
    }
    return [nodes[index] for index in TopologicalSorter(needs).static_order()]


def replace_nodes(graph: Any, nodes: Sequence[Any], constants: Iterable[Any] = ()) -> None:
    """Gives a graph other nodes and drops the constants that these do not read, in place; `constants` are new ones."""
    read = {output.name for output in graph.output}.union(*map(list_read_names, nodes))
    kept = [constant for constant in (*graph.initializer, *constants) if constant.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)


def iterate_nodes(graph: Any) -> Iterator[Any]:
    for inner in iterate_graphs(graph):
        yield from inner.node


def find_unread_inputs(model: Any) -> frozenset[str]:
    """The inputs of a graph that no output depends on."""
    graph = model.graph
    needed = {output.name for output in graph.output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed |= list_read_names(node)
    constants = {tensor.name for tensor in graph.initializer}
    return frozenset(value.name for value in graph.input) - needed - constants


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


def read_constants(model: Any) -> dict[str, Any]:
    """The tensors of Constant nodes by name."""
    nodes = (node for node in iterate_nodes(model.graph) if node.op_type == "Constant")
    return {
        node.output[0]: held.t for node in nodes for held in node.attribute if held.HasField("t")
    }


def expose_tensors(model: Any, tensors: Iterable[str]) -> Any:
    present = {value.name for value in (*model.graph.output, *model.graph.input)}
    new = [
        onnx.helper.make_empty_tensor_value_info(name) for name in tensors if name not in present
    ]
    model.graph.output.extend(new)
    return model
