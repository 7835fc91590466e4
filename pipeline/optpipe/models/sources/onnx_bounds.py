"""Bounds of an ONNX file, checked before anything that is recursive, or takes long, reads its graph."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.core import onnx
from optpipe.core.errors import BadInputError, escape

MOST_NODES = 10**5
"""Of a graph, with the nodes inside its nodes, and each call of a function counted as the nodes of that function."""
DEEPEST_CALLS = 64
MOST_AXES = 64
LONGEST_LOOP = 10**5
"""The most rounds of a Loop, and of the Loops inside it together."""
MOST_ENTRIES = 10**6
"""Of any other list in a file: inputs, constants, shapes, metadata, imports."""
_SMALLER_WAY_OUT = "export a smaller model, or a part of this one"
_FIELDS = {
    "FLOAT": "float_data",
    "INT32": "int32_data",
    "INT64": "int64_data",
    "DOUBLE": "double_data",
    "UINT64": "uint64_data",
    "UINT32": "uint64_data",
}
"""Where types are stored that are not in `raw_data`, one number each."""
_LESS_THAN_A_BYTE = re.compile("(INT|FLOAT)([24])")


def require_bounded_lists(model: Any, path: Path) -> None:
    """Raises BadInputError for a list longer than any model has; the lists are not read, so that this takes no time."""
    graph = model.graph
    if len(graph.node) > MOST_NODES:
        _refuse_nodes(len(graph.node), path)
    for part in (model, graph):
        for field, value in part.ListFields():
            if field.is_repeated and len(value) > MOST_ENTRIES:
                raise BadInputError(
                    f"{path}: its list '{field.name}' has {len(value)} entries; {MOST_ENTRIES} is the most\n{_SMALLER_WAY_OUT}"
                )


def _refuse_nodes(count: int, path: Path) -> None:
    raise BadInputError(
        f"{path}: its graph has {count} nodes, with functions inlined; {MOST_NODES} is the most\n{_SMALLER_WAY_OUT}"
    )


def require_bounded_graph(model: Any, path: Path) -> None:
    """Raises BadInputError for more nodes, calls, or rounds than any model has, with the place and a way out."""
    calls = {(each.domain, each.name): each for each in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def count(scope: Any, depth: int) -> int:
        if depth > DEEPEST_CALLS:
            raise BadInputError(
                f"{path}: its functions call each other more than {DEEPEST_CALLS} deep, or without end\n"
                "inline them before the export"
            )
        total = 0
        for graph in iterate_graphs(scope):
            total += len(graph.node)
            for node in graph.node:
                if (ends := max(len(node.input), len(node.output))) > MOST_NODES:
                    raise BadInputError(
                        f"{path}: a {escape(node.op_type)[:80]} reads or makes {ends} tensors; {MOST_NODES} is the most\n"
                        f"{_SMALLER_WAY_OUT}"
                    )
                key = node.domain, node.op_type
                if key in calls and key not in sizes:
                    sizes[key] = count(calls[key], depth + 1)
                total += sizes.get(key, 0)
        return total

    if (nodes := count(model.graph, 0)) > MOST_NODES:
        _refuse_nodes(nodes, path)
    if (rounds := max(_iterate_rounds(model.graph, {}, 1), default=0)) > LONGEST_LOOP:
        raise BadInputError(
            f"{path}: a Loop in it runs {rounds} times, with the Loops around it; {LONGEST_LOOP} is the most\n"
            "give it fewer rounds, or split the model before the Loop"
        )


def _iterate_rounds(graph: Any, outer: Mapping[str, Any], around: int) -> Iterator[int]:
    """Yields the rounds of each Loop whose trip count a constant of its graph or of an outer one fixes, times `around`."""
    known = {**outer, **{each.name: each for each in graph.initializer}}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute:
            known |= dict.fromkeys(node.output, node.attribute[0].t)
        rounds = around
        if node.op_type == "Loop" and node.input:
            trip = known.get(node.input[0])
            if trip is not None and len(trip.dims) < 2:
                for value in onnx.numpy_helper.to_array(trip).reshape(-1)[:1]:
                    rounds = around * max(int(value), 1)
            yield rounds
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _iterate_rounds(attribute.g, known, rounds)


def require_complete_data(tensors: Iterator[Any], path: Path) -> None:
    """Raises BadInputError for a tensor whose dimensions declare other data than the file has.

    `tensors` are those of the file, with their external data loaded.
    """
    for tensor in tensors:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type)
        count, present = math.prod(tensor.dims), None
        if tensor.HasField("raw_data"):
            bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            small = _LESS_THAN_A_BYTE.search(kind)
            bits = int(small.group(2)) if small and small.group(2) + "E" not in kind else bits
            wanted, present, unit = -(-count * bits // 8), len(tensor.raw_data), "bytes"
        elif kind in _FIELDS:
            wanted, present, unit = count, len(getattr(tensor, _FIELDS[kind])), "numbers"
        if present is not None and present != wanted:
            shown = "x".join(map(str, tensor.dims)) or "scalar"
            name = escape(tensor.name)[:80]
            raise BadInputError(
                f"{path}: tensor '{name}' ({kind.lower()} {shown}) declares {wanted} {unit}, and the file has {present}\n"
                "it may be truncated, or a weight file may belong to another export; export the model again"
            )
