"""Forms of ONNX that ONNX Runtime runs and ONNX's own tools do not read, put into the form that they do.

Nothing is computed: the standard domain gets its short name, sparse weights are written out, and nodes stand after those whose
results they read. The reference stays the user's file as it is.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from graphlib import CycleError
from typing import Any

from optpipe.backends.graph_names import iterate_graphs
from optpipe.backends.onnx_graph import list_read_names, sort_nodes
from optpipe.core import np, onnx
from optpipe.core.errors import escape
from optpipe.models.sources.onnx_bounds import MOST_ELEMENTS

_LONG_NAME = "ai.onnx"
"""Of the standard domain, whose usual name is empty."""
_WAY_OUT = "store it as an ordinary initializer"


def has_odd_form(model: Any) -> bool:
    """Whether `state_usual_form` would change anything."""
    owners = (model, *model.functions)
    return (
        any(opset.domain == _LONG_NAME for owner in owners for opset in owner.opset_import)
        or any(node.domain == _LONG_NAME for graph in _iterate_all(model) for node in graph.node)
        or any(graph.sparse_initializer for graph in iterate_graphs(model.graph))
        or not all(map(_is_sorted, _iterate_all(model)))
    )


def state_usual_form(model: Any) -> Any:
    """`model`, changed in place. Raises ValueError for sparse weights that are none."""
    _rename_domain(model)
    for graph in iterate_graphs(model.graph):
        _write_out_sparse(graph)
    for graph in _iterate_all(model):
        if not _is_sorted(graph):
            _sort(graph)
    return model


def _iterate_all(model: Any) -> Iterator[Any]:
    for scope in (model.graph, *model.functions):
        yield from iterate_graphs(scope)


def _rename_domain(model: Any) -> None:
    for owner in (model, *model.functions):
        versions = {opset.domain: opset.version for opset in owner.opset_import}
        if (
            _LONG_NAME in versions
            and versions.get("", versions[_LONG_NAME]) == versions[_LONG_NAME]
        ):
            kept = [opset for opset in owner.opset_import if opset.domain != _LONG_NAME]
            kept += [] if "" in versions else [onnx.helper.make_opsetid("", versions[_LONG_NAME])]
            del owner.opset_import[:]
            owner.opset_import.extend(kept)
    for graph in _iterate_all(model):
        for node in graph.node:
            if node.domain == _LONG_NAME:
                node.domain = ""


def _write_out_sparse(graph: Any) -> None:
    """Replaces the sparse initializers of a graph by dense ones."""
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_make_dense(sparse))
    del graph.sparse_initializer[:]


def _make_dense(sparse: Any) -> Any:
    name = sparse.values.name
    problem = f"its sparse weight '{escape(name)[:80]}'"
    outside = onnx.TensorProto.EXTERNAL
    if outside in (sparse.values.data_location, sparse.indices.data_location):
        raise ValueError(f"{problem} lies in another file; {_WAY_OUT}")
    dims = list(sparse.dims)
    if any(size < 0 for size in dims) or math.prod(dims) > MOST_ELEMENTS:
        raise ValueError(f"{problem} has the shape {'x'.join(map(str, dims))}; {_WAY_OUT}")
    values = onnx.numpy_helper.to_array(sparse.values)
    places = onnx.numpy_helper.to_array(sparse.indices)
    if places.ndim == 1:
        fits = ((places >= 0) & (places < math.prod(dims))).all()
    else:
        fits = places.shape[1:] == (len(dims),) and ((places >= 0) & (places < dims)).all()
    if not fits or values.shape != places.shape[:1]:
        raise ValueError(f"{problem} has values at places that it does not have; {_WAY_OUT}")
    dense = np.zeros(dims, values.dtype)
    dense[np.unravel_index(places, dims) if places.ndim == 1 else tuple(places.T)] = values
    return onnx.numpy_helper.from_array(dense, name)


def _is_sorted(graph: Any) -> bool:
    """Whether no node reads what a later one, or itself, makes."""
    waiting = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        if waiting & list_read_names(node):
            return False
        waiting.difference_update(node.output)
    return True


def _sort(graph: Any) -> None:
    """Sorts the nodes; a cycle, and a result of two nodes, are left to the checker."""
    made = [name for node in graph.node for name in node.output if name]
    if len(set(made)) < len(made):
        return
    with suppress(CycleError):
        nodes = sort_nodes(graph.node)
        del graph.node[:]
        graph.node.extend(nodes)
