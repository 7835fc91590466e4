"""Reads from a graph which of its tensors have rows that TopK or NonMaxSuppression selects."""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.onnx_graph import (
    KEEPS_VALUES,
    OnnxGraph,
    iterate_nodes,
    list_read_names,
    load_onnx,
    read_constants,
)
from optpipe.backends.onnx_layers import infer_shapes
from optpipe.core import onnx
from optpipe.core.entries import ModelInfo, VerificationInfo
from optpipe.stats.selected_rows import EMPTY, MOST_ROWS, Selection
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import ONNX
from optpipe.workspace.store import Store

COUNT_INPUTS = {"TopK": 1, "NonMaxSuppression": 2}
"""Operators that select rows, and the place of the input that says how many."""
PASSES_NUMBERS = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
MOST_STEPS_BACK = 20
INTEGERS = (6, 7)
"""The types of a count in ONNX's numbers: int32 and int64."""
GATHERS = ("Gather", "GatherElements", "GatherND")
KEEPS_ORDER = {*KEEPS_VALUES, "Exp", "Log", "Sigmoid", "Sqrt", "Tanh"}
"""Operators whose result increases with their first input, and has its order."""


def read_selection(path: Path, *, inside: bool = False) -> Selection:
    """The selection of the outputs of the graph in a file, or, `inside`, of all of its tensors."""
    return selection_from_graph(load_onnx(path, weights=False), inside=inside, folder=path.parent)


def read_verified_selection(
    verifications: Iterable[VerificationInfo], model: Entry[ModelInfo], store: Store
) -> Selection:
    """The selection of an exported model, which is read only if a verification of its build names selected outputs."""
    if not any(verified.selected for verified in verifications):
        return EMPTY
    return read_selection(store.verify_entry(model, ONNX).file(ONNX))


def selection_from_graph(
    model: Any, *, inside: bool = False, folder: Path | None = None
) -> Selection:
    """The same of a `ModelProto`; empty without TopK or NonMaxSuppression. `folder` holds its external data, if it has any."""
    graph = model.graph
    if not any(map(_selects, graph.node)):
        return EMPTY
    counts = _read_counts(model, folder)
    selectors = find_selectors(graph, find_tensors_without(counts, model))
    if not inside:
        outputs = {output.name for output in graph.output}
        selectors = {name: nodes for name, nodes in selectors.items() if name in outputs}
    ranked = find_ranked_tensors(graph) & selectors.keys()
    return Selection(dict(sorted(selectors.items())), tuple(sorted(counts)), tuple(sorted(ranked)))


def find_selectors(graph: Any, without_rows: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """For each tensor that TopK or NonMaxSuppression gives, and each computed from those, the nodes that select its rows.

    Nodes are places in the graph. What is computed from rows but has none, such as their mean, has no nodes; `without_rows`
    are tensors that have none by their shape. A node with graphs inside it that select, such as Loop, selects itself.
    """
    selectors: dict[str, tuple[int, ...]] = {}
    for place, node in enumerate(graph.node):
        read = [selectors[name] for name in list_read_names(node) if name in selectors]
        if _selects(node):
            read.append((place,))
        if read:
            nodes = tuple(sorted({at for places in read for at in places}))
            selectors |= {
                name: () if name in without_rows else nodes for name in node.output if name
            }
    return selectors


def find_tensors_without(counts: Collection[int], model: Any) -> set[str]:
    """The tensors that have no rows of a selection of `counts` rows, as shape inference tells.

    All of their sizes are known, or a size of an input (such as the batch), and none is a count.
    """
    try:
        inferred = infer_shapes(model)
    except onnx.shape_inference.InferenceError:
        return set()
    inputs = {
        dim.dim_param
        for value in inferred.graph.input
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    }
    without = set()
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(
            dim.dim_param in inputs or dim.dim_value not in {0, *counts} for dim in tensor.shape.dim
        ):
            without.add(value.name)
    return without


def _selects(node: Any) -> bool:
    inner = (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))
    nodes = (node, *(inner_node for graph in inner for inner_node in iterate_nodes(graph)))
    return any(selector.op_type in COUNT_INPUTS for selector in nodes)


def find_ranked_tensors(graph: Any) -> set[str]:
    """The tensors that hold the scores by which a TopK put its rows in order, in that order.

    These are its values, the same scores gathered by its indices, and what keeps the order of either. A TopK that is not
    asked to sort (`sorted=0`) has none.
    """
    ranked: set[str] = set()
    scores: dict[str, str] = {}  # by the name of a tensor of indices, what its TopK ranked
    for node in graph.node:
        if node.op_type == "TopK":
            if all(attribute.i for attribute in node.attribute if attribute.name == "sorted"):
                ranked.add(node.output[0])
                scores[node.output[1]] = node.input[0]
        elif node.op_type in GATHERS:
            values, indices = node.input[:2]
            if scores.get(indices) == values:
                ranked.add(node.output[0])
        elif node.op_type in KEEPS_ORDER and node.input[0] in ranked:
            ranked.add(node.output[0])
        elif node.op_type in KEEPS_VALUES and node.input[0] in scores:
            scores[node.output[0]] = scores[node.input[0]]
    return ranked - {""}


def _read_counts(model: Any, folder: Path | None) -> set[int]:
    """How many rows each selection takes at most: a constant above 1, or the bounds in what computes the number, as Min(300, n)."""
    constants = {**OnnxGraph(model).weights, **read_constants(model)}
    writers = {name: node for node in iterate_nodes(model.graph) for name in node.output}
    counts: set[int] = set()
    for node in iterate_nodes(model.graph):
        place = COUNT_INPUTS.get(node.op_type)
        if place is None or len(node.input) <= place:
            continue
        for name in _list_bounds(node.input[place], writers, constants.keys()):
            stored = constants[name]
            if stored.data_type in INTEGERS and math.prod(stored.dims) == 1:
                counts.add(
                    int(onnx.numpy_helper.to_array(stored, base_dir=str(folder or "")).item())
                )
    return {count for count in counts if 1 < count <= MOST_ROWS}


def _list_bounds(name: str, writers: Mapping[str, Any], constants: Collection[str]) -> set[str]:
    """The constants that bound an integer: itself, or those that it is the smallest of, through changes of its type or shape."""
    bounds, waiting = set(), [name]
    for _ in range(MOST_STEPS_BACK):
        if not waiting:
            break
        name = waiting.pop()
        if name in constants:
            bounds.add(name)
        elif (node := writers.get(name)) is not None:
            if node.op_type == "Min":
                waiting += node.input
            elif node.op_type in PASSES_NUMBERS:
                waiting.append(node.input[0])
    return bounds
