"""Takes sequences of tensors out of a graph: TensorRT has none, and no INT8 kernel reads one.

torch's exporter writes `split`, `chunk` and `unbind` as SplitToSequence and SequenceAt. Its own optimizer makes one Split of
them, but is left out for large graphs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.graph_names import NameGiver, iterate_graphs
from optpipe.backends.onnx_graph import iterate_nodes, list_read_names
from optpipe.core import onnx

END = int(np.iinfo(np.int64).max)
STANDARD = ("", "ai.onnx")


def has_split_sequences(model: Any) -> bool:
    return any(node.op_type == "SplitToSequence" for node in iterate_nodes(model.graph))


def split_without_sequences(model: Any) -> Any:
    """`model` with a Slice for each part of a SplitToSequence that is read at constant places only, in place."""
    constants, names = _read_constants(model), NameGiver(model)
    for graph in iterate_graphs(model.graph):
        _split_graph(graph, constants, names)
    return model


def _read_constants(model: Any) -> dict[str, NDArray[Any]]:
    """The values of small constants of all graphs, by name: initializers and Constant nodes."""
    values = {}
    for graph in iterate_graphs(model.graph):
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in STANDARD:
                (held,) = node.attribute
                if held.name == "value":
                    tensors[node.output[0]] = held.t
                elif held.name in ("value_int", "value_ints"):
                    values[node.output[0]] = np.array(onnx.helper.get_attribute_value(held))
        for name, tensor in tensors.items():
            if tensor.data_type in (onnx.TensorProto.INT32, onnx.TensorProto.INT64):
                values[name] = onnx.numpy_helper.to_array(tensor)
    return values


def _split_graph(graph: Any, constants: Mapping[str, NDArray[Any]], names: NameGiver) -> None:
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in list_read_names(node):
            readers.setdefault(name, []).append(node)
    kept = {output.name for output in graph.output}

    replaced: dict[int, list[Any]] = {}
    for at, node in enumerate(graph.node):
        if node.op_type != "SplitToSequence" or node.domain not in STANDARD:
            continue
        sequence = node.output[0]
        parts = readers.get(sequence, [])
        if sequence in kept or not all(
            reader.op_type == "SequenceAt" and reader.input[1] in constants for reader in parts
        ):
            continue
        places = [int(constants[reader.input[1]]) for reader in parts]
        made = _split(node, parts, places, constants, names)
        if made is not None:
            replaced[at] = made
            taken = {reader.output[0] for reader in parts}
            replaced |= {
                place: [] for place, node in enumerate(graph.node) if taken & set(node.output)
            }
    if not replaced:
        return
    nodes = [
        _copy_node(copied)
        for at, node in enumerate(graph.node)
        for copied in replaced.get(at, [node])
    ]
    del graph.node[:]
    graph.node.extend(nodes)


def _copy_node(node: Any) -> Any:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _split(
    node: Any,
    parts: Sequence[Any],
    places: Sequence[int],
    constants: Mapping[str, NDArray[Any]],
    names: NameGiver,
) -> list[Any] | None:
    """The nodes that compute the `parts` of a SplitToSequence at their `places`; None if sizes are not known."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    axis, keeps = attributes.get("axis", 0), attributes.get("keepdims", 1)
    data, given = node.input[0], node.input[1] if len(node.input) > 1 else ""
    if given and given not in constants:
        return None
    sizes = constants[given] if given else np.array(1)
    if sizes.ndim == 1:
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        if any(not -len(sizes) <= place < len(sizes) for place in places):
            return None
        spans = [(int(bounds[:-1][place]), int(bounds[1:][place])) for place in places]
    elif any(place < 0 and int(sizes) != 1 for place in places):
        return None  # where the last part begins depends on the size of the tensor
    else:
        step = int(sizes)
        spans = [(place * step, (place + 1) * step or END) for place in places]

    made = []
    for part, (start, stop) in zip(parts, spans, strict=True):
        result = part.output[0]
        squeezes = not given and not keeps
        whole = names.give(f"{result}_part") if squeezes else result
        first, last, along = (names.give(f"{result}_{what}") for what in ("start", "stop", "axis"))
        for name, value in ((first, start), (last, stop), (along, axis)):
            made.append(
                onnx.helper.make_node("Constant", [], [name], name=name, value_ints=[value])
            )
        made.append(
            onnx.helper.make_node("Slice", [data, first, last, along], [whole], name=part.name)
        )
        if squeezes:
            made.append(onnx.helper.make_node("Squeeze", [whole, along], [result], name=whole))
    return made
