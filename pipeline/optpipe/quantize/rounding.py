"""FP16 in chosen nodes of an FP32 graph, as any runtime can compute it: their data and results are rounded to FP16.

Products add up in FP32, as Tensor Cores do. ONNX Runtime's CPU provider cannot be asked instead: it has few FP16 kernels,
computes in FP32 without them, and drops the casts between such nodes, so that nothing would ever overflow.
"""

from collections.abc import Collection, Sequence
from typing import Any

from optpipe.backends.onnx_graph import GraphTypes, infer_graph_types, iterate_graphs, iterate_nodes
from optpipe.core.tensors import InputSpec


def round_nodes(model: Any, names: Collection[str], known: GraphTypes) -> Any:
    """A copy of `model` (FP32) in which the nodes called `names` read and write values rounded to FP16.

    `known` holds the types of its tensors.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for number, graph in enumerate(iterate_graphs(copy.graph)):
        _round_graph(graph, frozenset(names), known, f"_half{number}")
    return copy


def _round_graph(graph: Any, names: Collection[str], known: GraphTypes, suffix: str) -> None:
    nodes: list[Any] = []
    rounded: dict[str, str] = {}
    for node in graph.node:
        if node.name not in names:
            nodes.append(node)
            continue
        for position, name in enumerate(node.input):
            if known.types.get(name) != "fp32":
                continue
            if name not in rounded:
                rounded[name] = f"{name}{suffix}"
                nodes += _make_casts(name, rounded[name])
            node.input[position] = rounded[name]
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name and known.types.get(name) == "fp32":
                node.output[position] = f"{name}{suffix}_exact"
                nodes += _make_casts(node.output[position], name)
                rounded[name] = name
    del graph.node[:]
    graph.node.extend(nodes)


def _make_casts(source: str, target: str) -> list[Any]:
    from onnx import TensorProto, helper

    half = f"{target}_in_half"
    return [
        helper.make_node("Cast", [source], [half], name=f"{half}_cast", to=TensorProto.FLOAT16),
        helper.make_node("Cast", [half], [target], name=f"{target}_back_cast", to=TensorProto.FLOAT),
    ]


def find_half_nodes(converted: Any, inputs: Sequence[InputSpec]) -> frozenset[str]:
    """The nodes of a converted graph that read or write FP16, but for the casts."""
    known = infer_graph_types(converted, inputs)
    return frozenset(
        node.name
        for node in iterate_nodes(converted.graph)
        if node.op_type != "Cast" and any(known.types.get(name) == "fp16" for name in (*node.input, *node.output))
    )
