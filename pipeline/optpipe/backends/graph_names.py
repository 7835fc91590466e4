"""Names in ONNX graphs: new ones that collide with none, and plain ones for tools that make names by suffix."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optpipe.core import onnx


def iterate_graphs(graph: Any) -> Iterator[Any]:
    """A graph and the graphs inside its nodes: branches of If, bodies of Loop and Scan.

    `graph` may also be a function of a model, which has nodes too.
    """
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from iterate_graphs(inner)


def collect_names(model: Any) -> set[str]:
    """Every name in a model, at every depth: of nodes, values, constants, sizes, graphs, and functions."""
    names: set[str] = set()
    for scope in (model.graph, *model.functions):
        for graph in iterate_graphs(scope):
            names.add(graph.name)
            for node in graph.node:
                names.update((node.name, *node.input, *node.output))
            if graph in model.functions:
                names.update((*graph.input, *graph.output))
                continue
            values = *graph.input, *graph.output, *graph.value_info
            names.update(value.name for value in values)
            names.update(
                dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim
            )
            names.update(tensor.name for tensor in graph.initializer)
            names.update(tensor.values.name for tensor in graph.sparse_initializer)
    return names


class NameGiver:
    """Gives names that nothing in a model has, and never gives one twice.

    Every rewrite that adds nodes or values takes their names from one NameGiver, and remembers them: a name is for the
    reader, and an edge is never derived from it.

    >>> names = NameGiver(model)  # a model that has a constant `x_scale`
    >>> names.give("x_scale"), names.give("x_zero_point")
    ('x_scale_2', 'x_zero_point')
    """

    def __init__(self, model: Any) -> None:
        self._taken = collect_names(model)
        self._last: dict[str, int] = {}

    def give(self, wish: str) -> str:
        """`wish`, or `wish_2`, `wish_3` … if it is taken."""
        name, number = wish, self._last.get(wish, 1)
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._last[wish] = number
        self._taken.add(name)
        return name


def rename_values(graph: Any, new_name: Callable[[str], str]) -> None:
    """Gives every value of a graph, and of the graphs inside its nodes, another name, in place; an absent input stays absent."""
    for scope in iterate_graphs(graph):
        for node in scope.node:
            for names in (node.input, node.output):
                names[:] = [name and new_name(name) for name in names]
        for value in (*scope.input, *scope.output, *scope.value_info, *scope.initializer):
            value.name = new_name(value.name)
        for sparse in scope.sparse_initializer:
            sparse.values.name = new_name(sparse.values.name)
        for note in scope.quantization_annotation:
            note.tensor_name = new_name(note.tensor_name)
            for entry in note.quant_parameter_tensor_names:
                entry.value = new_name(entry.value)


def rename_some_values(graph: Any, renamed: Mapping[str, str]) -> None:
    """`rename_values` for the values in `renamed`; the others keep their names."""
    rename_values(graph, lambda name: renamed.get(name, name))


class PlainNames:
    """A copy of a model whose values, nodes and sizes are named `v1`, `n2`, `d3` …, and the way back.

    A converter that makes names by suffix, writes them into a log, or takes regular expressions for them, can then neither
    collide with a name of the model nor misread one.
    """

    _PLAIN = re.compile(r"([vnd]\d+)(_.*)?", re.DOTALL)

    def __init__(self, model: Any) -> None:
        self._source = model
        self._plain: dict[tuple[str, str], str] = {}
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self._rename(self.model, self.hide)

    def hide(self, kind: str, name: str) -> str:
        """The plain name of a value (`v`), a node (`n`), or a size (`d`)."""
        return self._plain.setdefault((kind, name), f"{kind}{len(self._plain) + 1}")

    def restore(self, converted: Any) -> Any:
        """Gives a graph that was made from `model` the names of the source, in place.

        What the converter added keeps its suffix, behind the source's name.
        """
        names = NameGiver(self._source)
        known = {plain: name for (_, name), plain in self._plain.items()}

        def show(kind: str, plain: str) -> str:
            key = f"{kind} {plain}"
            if plain in known and plain[0] == kind:
                return known[plain]
            if key not in known:
                parts = self._PLAIN.fullmatch(plain)
                stem = known.get(parts[1]) if parts else None
                known[key] = names.give(
                    plain if parts is None or stem is None else stem + (parts[2] or "")
                )
            return known[key]

        self._rename(converted, show)
        return converted

    def restore_text(self, text: str) -> str:
        """A message about `model` with the source's names."""
        known = {plain: name for (_, name), plain in self._plain.items()}
        return re.sub(
            r"\b[vnd]\d+(?![a-zA-Z0-9])", lambda match: known.get(match[0], match[0]), text
        )

    def list_nodes(self) -> dict[str, str]:
        """The source's names of nodes by their plain ones."""
        return {plain: name for (kind, name), plain in self._plain.items() if kind == "n"}

    @staticmethod
    def _rename(model: Any, new_name: Callable[[str, str], str]) -> None:
        rename_values(model.graph, lambda name: new_name("v", name))
        for scope in iterate_graphs(model.graph):
            for node in scope.node:
                node.name = node.name and new_name("n", node.name)
            for value in (*scope.input, *scope.output, *scope.value_info):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param:
                        dim.dim_param = new_name("d", dim.dim_param)
