"""An export that differs from its module names the first tensor that does, in the order of the graph."""

import numpy as np
import onnx
import pytest
import torch

from optpipe.backends.onnx_graph import load_onnx
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.models.export.divergence import find_first_divergence
from optpipe.models.export.onnx_export import convert_program

LIMIT = 1e-3
SHAPE = (2, 4)
CARD = ModelCard(
    "net", "net.py:make", Task.OTHER, (InputSpec("x", "float32", SHAPE, SHAPE, SHAPE),)
)
FEEDS = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}

pytestmark = pytest.mark.slow


class Net(torch.nn.Module):
    """A tanh, a sigmoid, and an exponential one after the other, and the two largest values of the last."""

    def forward(self, x):
        return torch.exp(torch.sigmoid(torch.tanh(x))).topk(2).values


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "net.onnx"
    convert_program(Net().eval(), CARD).save(str(path), external_data=False)
    return path


def plant(exported, folder, change):
    """The exported graph after `change`, in a file."""
    graph = load_onnx(exported)
    change({node.op_type: node for node in graph.graph.node})
    onnx.save(graph, folder / "wrong.onnx")
    return folder / "wrong.onnx"


def test_a_faithful_export_has_no_divergence(exported) -> None:
    assert find_first_divergence(Net().eval(), CARD, exported, FEEDS, LIMIT) is None


@pytest.mark.parametrize("operator", ["Tanh", "Sigmoid", "Exp"])
def test_the_first_wrong_operator_is_named_and_not_those_that_read_it(
    exported, tmp_path, operator
) -> None:
    def change(nodes) -> None:
        nodes[operator].op_type = "Neg"

    wrong = plant(exported, tmp_path, change)
    right = {node.op_type: node.output[0] for node in load_onnx(exported).graph.node}
    first = find_first_divergence(Net().eval(), CARD, wrong, FEEDS, LIMIT)
    assert first is not None
    assert (first.operator, first.tensor) == ("Neg", right[operator])
    assert first.relative > LIMIT


def test_a_wrong_selection_is_named(exported, tmp_path) -> None:
    def change(nodes) -> None:
        (largest,) = (each for each in nodes["TopK"].attribute if each.name == "largest")
        largest.i = 0

    first = find_first_divergence(
        Net().eval(), CARD, plant(exported, tmp_path, change), FEEDS, LIMIT
    )
    assert first is not None
    assert first.operator == "TopK"


def test_a_graph_or_a_module_that_does_not_run_is_not_explained(exported, tmp_path) -> None:
    def change(nodes) -> None:
        nodes["Exp"].op_type = "NoOperator"

    class Broken(torch.nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    wrong = plant(exported, tmp_path, change)
    assert find_first_divergence(Net().eval(), CARD, wrong, FEEDS, LIMIT) is None
    assert find_first_divergence(Broken().eval(), CARD, exported, FEEDS, LIMIT) is None
