"""A model's ID, computed from what it is: its exported graph with all tensors, and its card. Names and places do not count.

The same content has the same ID whichever door it came through: `file.py:make`, a module in memory, a card, an ONNX file.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from optpipe.core import onnx
from optpipe.core.card import ModelCard
from optpipe.core.files import hash_value
from optpipe.workspace.entry import ID_LENGTH

_PLACES = ("name", "source", "data")
"""Parts of a card that tell how a model is called and where its files lie."""
_PROFILE = ("min", "opt", "max")
"""Parts of an input that a build chooses."""


def compute_content_id(graph: Any, card: ModelCard) -> str:
    """The ID of the model whose exported ONNX graph is `graph`, an `onnx.ModelProto` with its weights, and whose card is `card`.

    It covers operators, their attributes and order, all constants and weights with type, shape and bytes, the names and types of
    inputs and outputs, preprocessing, labels, and task. It does not cover: the names of nodes and inner tensors, documentation,
    the exporter's version, the model's name and source, the places of data, and the profile of batch sizes and shapes.
    Returns `ID_LENGTH` hexadecimal digits.

    >>> compute_content_id(onnx.load("model.onnx"), card_from_file(Path("card.json")))  # doctest: +SKIP
    'b94d27b9934d'
    """
    opsets = sorted((opset.domain, opset.version) for opset in graph.opset_import)
    functions = [
        [
            function.domain,
            function.name,
            _describe_nodes(function.node, _Numbers([*function.input])),
        ]
        for function in graph.functions
    ]
    described = {
        "opsets": opsets,
        "graph": _describe_graph(graph.graph, _Numbers([])),
        "functions": functions,
        "card": _describe_card(card),
    }
    return hash_value(described)[:ID_LENGTH]


class _Numbers:
    """Numbers in place of tensors' names, in the order in which the graph defines them; an inner graph sees those of the outer."""

    def __init__(self, names: Iterable[str], outer: "_Numbers | None" = None) -> None:
        self._outer, self._known = outer, dict[str, str]()
        self._count: list[int] = outer._count if outer else [0]
        for name in names:
            self.define(name)

    def define(self, name: str) -> str:
        if name:
            self._count[0] += 1
            self._known[name] = f"#{self._count[0]}"
        return self._known.get(name, "")

    def read(self, name: str) -> str:
        """The number of a tensor; the name itself of one that nothing defines."""
        if name in self._known:
            return self._known[name]
        return self._outer.read(name) if self._outer else name


def _describe_card(card: ModelCard) -> Mapping[str, Any]:
    values = {key: value for key, value in card.to_dict().items() if key not in _PLACES}
    inputs = [
        {key: value for key, value in spec.items() if key not in _PROFILE}
        for spec in values["inputs"]
    ]
    return {**values, "inputs": inputs}


def _describe_graph(graph: Any, numbers: _Numbers) -> list[Any]:
    """Inputs, weights, nodes and outputs; the weights in the order in which the nodes read them."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    for value in inputs:
        numbers.define(value.name)
    read: list[Any] = []

    def define_weights(names: Iterable[str]) -> None:
        for name in names:
            if (tensor := weights.pop(name, None)) is not None:
                numbers.define(name)
                read.append(_describe_tensor(tensor))

    for node in graph.node:
        define_weights(_list_read(node))
    define_weights([value.name for value in graph.output])
    nodes = _describe_nodes(graph.node, numbers)
    outputs = [[*_describe_value(value), numbers.read(value.name)] for value in graph.output]
    sparse = [
        [_describe_tensor(tensor.values), _describe_tensor(tensor.indices), list(tensor.dims)]
        for tensor in graph.sparse_initializer
    ]
    return [list(map(_describe_value, inputs)), read, nodes, outputs, sparse]


def _list_read(node: Any) -> list[str]:
    """The tensors that a node reads, also inside of its subgraphs."""
    names = [*node.input]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                names += _list_read(inner)
            names += [value.name for value in graph.output]
    return names


def _describe_nodes(nodes: Iterable[Any], numbers: _Numbers) -> list[Any]:
    described = []
    for node in nodes:
        inputs = [numbers.read(name) for name in node.input]
        attributes = sorted(
            (_describe_attribute(attribute, numbers) for attribute in node.attribute), key=str
        )
        outputs = [numbers.define(name) for name in node.output]
        described.append([node.domain, node.op_type, inputs, attributes, outputs])
    return described


def _describe_attribute(attribute: Any, numbers: _Numbers) -> list[Any]:
    graphs = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    if graphs:
        inner = [_describe_graph(graph, _Numbers([], numbers)) for graph in graphs]
        return [attribute.name, "graph", inner]
    tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    if tensors:
        return [attribute.name, "tensor", list(map(_describe_tensor, tensors))]
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    return [attribute.name, "value", plain.SerializeToString(deterministic=True).hex()]


def _describe_value(value: Any) -> list[Any]:
    kind = value.type.tensor_type
    rank = len(kind.shape.dim) if kind.HasField("shape") else None
    return [value.name, kind.elem_type, rank]


def _describe_tensor(tensor: Any) -> list[Any]:
    """Type, shape and the hash of the values, however the file stores them."""
    values = onnx.numpy_helper.to_array(tensor)
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    return [tensor.data_type, list(tensor.dims), digest]
