"""A model's ID follows from its content, and from nothing else."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.events import SilentListener
from optpipe.models.export.onnx_export import complete_card, onnx_from_torch
from optpipe.models.identity import compute_content_id

CARD = ModelCard(
    "one", "one.py:make", Task.OTHER, (InputSpec("x", "float32", (1, 4), (2, 4), (8, 4)),)
)
BODY = helper.make_graph(
    [helper.make_node("Mul", ["inner", "w"], ["scaled"])],
    "body",
    [],
    [helper.make_tensor_value_info("scaled", TensorProto.FLOAT, None)],
    [numpy_helper.from_array(np.array([3], np.float32), "inner")],
)


def make_graph(scale=2.0, bias=1.0, kind="Add", prefix="", to=1):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    names = [f"{prefix}{each}" for each in ("w", "b", "m", "s", "c")]
    nodes = [
        helper.make_node("Mul", ["x", names[0]], [names[2]], name=f"{prefix}first"),
        helper.make_node(kind, [names[2], names[1]], [names[3]]),
        helper.make_node("Cast", [names[3]], ["y"], to=to),
    ]
    weights = [
        numpy_helper.from_array(np.full(4, scale, np.float32), names[0]),
        numpy_helper.from_array(np.full(4, bias, np.float32), names[1]),
    ]
    graph = helper.make_graph(nodes, f"{prefix}graph", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


KNOWN = compute_content_id(make_graph(), CARD)


@pytest.mark.parametrize(
    "graph",
    [
        make_graph(scale=2.5),
        make_graph(bias=1.5),
        make_graph(scale=1.0, bias=2.0),
        make_graph(kind="Sub"),
        make_graph(to=10),
    ],
)
def test_another_content_has_another_id(graph) -> None:
    assert compute_content_id(graph, CARD) != KNOWN


def test_names_documentation_and_the_exporter_do_not_count() -> None:
    graph = make_graph(prefix="model.inner.")
    graph.doc_string, graph.producer_name, graph.producer_version = "text", "tool", "2"
    graph.graph.node[0].doc_string = "line 3 of /home/me/net.py"
    graph.graph.node[0].metadata_props.add(key="stack", value="/home/me/net.py")
    weights = list(graph.graph.initializer)
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(reversed(weights))
    assert compute_content_id(graph, CARD) == KNOWN
    (raw,) = (each for each in graph.graph.initializer if each.name.endswith("w"))
    listed = helper.make_tensor(raw.name, raw.data_type, raw.dims, numpy_helper.to_array(raw))
    raw.CopyFrom(listed)  # float_data instead of raw_data
    assert compute_content_id(graph, CARD) == KNOWN


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"name": "two", "source": "/srv/two.py:other"}, True),
        ({"data": {"calibration": "/srv/images"}}, True),
        ({"inputs": (InputSpec("x", "float32", (1, 4), (1, 4), (1, 4)),)}, True),
        ({"task": Task.CLASSIFICATION}, False),
        ({"labels": ("cat", "dog", "bird", "fish")}, False),
        ({"inputs": (InputSpec("x", "float16", (1, 4), (2, 4), (8, 4)),)}, False),
    ],
)
def test_of_a_card_its_values_count_and_its_places_do_not(changes, same) -> None:
    assert (compute_content_id(make_graph(), replace(CARD, **changes)) == KNOWN) is same


def test_constants_of_subgraphs_count() -> None:
    found = set()
    for value in (3, 4):
        body = onnx.GraphProto()
        body.CopyFrom(BODY)
        body.initializer[0].CopyFrom(
            numpy_helper.from_array(np.array([value], np.float32), "inner")
        )
        graph = make_graph()
        graph.graph.node.append(
            helper.make_node("If", ["flag"], ["z"], then_branch=body, else_branch=BODY)
        )
        graph.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
        found.add(compute_content_id(graph, CARD))
    assert len(found) == 2


class Net(torch.nn.Module):
    def __init__(self, seed=0, slope=0.5):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.slope = torch.nn.Linear(4, 3), slope

    def forward(self, x):
        return torch.nn.functional.leaky_relu(self.inner(x), self.slope)


class Renamed(Net):
    """The same computation by another text."""

    def forward(self, values):
        first = self.inner(values)
        return torch.nn.functional.leaky_relu(first, self.slope)


@pytest.mark.slow
def test_modules_with_the_same_computation_and_weights_are_one_model(tmp_path) -> None:
    def identify(module, name, low, usual, high):
        spec = InputSpec("x", "float32", (low, 4), (usual, 4), (high, 4))
        card = ModelCard(name, f"{name}.py:make", Task.OTHER, (spec,))
        target = tmp_path / f"{name}.onnx"
        onnx_from_torch(module.eval(), card, target, SilentListener())
        return compute_content_id(onnx.load(target), complete_card(card, target))

    known = identify(Net(), "file", 1, 1, 8)
    assert identify(Renamed(), "memory", 1, 4, 64) == known
    assert identify(Net(seed=1), "seed", 1, 1, 8) != known
    assert identify(Net(slope=0.25), "attribute", 1, 1, 8) != known
