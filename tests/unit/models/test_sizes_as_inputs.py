"""Inputs that are sizes of other tensors get small noise: no probe of a graph may outgrow memory."""

import numpy as np
import pytest
from tests.fakes.graphs import node_of, onnx_model, value_of

from optpipe.backends.onnx_size_inputs import find_index_bounds, find_size_inputs
from optpipe.core.card import InputSpec
from optpipe.core.entries import WeightsRequest
from optpipe.models.inputs.samples import SIZE_BOUND, bound_noise, make_noise_rows
from optpipe.models.sources.onnx_file import OnnxFileSource

SIZED = [
    ("Reshape", "x n"),
    ("Expand", "x n"),
    ("Tile", "x n"),
    ("Pad", "x n"),
    ("CenterCropPad", "x n"),
    ("TopK", "x n"),
    ("AffineGrid", "x n"),
    ("MaxUnpool", "x i n"),
    ("Col2Im", "x n b"),
    ("ConstantOfShape", "n"),
    ("HannWindow", "n"),
    ("Range", "a n d"),
]
COMPUTED = {
    "as it is": [],
    "cast": [("Cast", "n", "m", {"to": 7})],
    "at least one": [("Max", "n one", "m", {})],
    "twice as large": [("Mul", "n two", "k", {}), ("Cast", "k", "m", {"to": 7})],
    "two sizes": [("Gather", "n zero", "k", {}), ("Concat", "k one", "m", {"axis": 0})],
    "lengths summed": [("ReduceSum", "n", "k", {}), ("Unsqueeze", "k zero", "m", {})],
    "one or the other": [("Where", "c n two", "m", {})],
}
NUMBERS = {name: np.array([at], np.int64) for at, name in enumerate(("zero", "one", "two"))}


def build_graph(operator, inputs, computed=()):
    read = inputs.replace("n", "m") if computed else inputs
    return onnx_model(
        [*computed, (operator, read, "y", {})],
        {"x": [2, 3], "n": ("INT64", [2])},
        {"y": None},
        **NUMBERS,
    )


@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.parametrize(("operator", "inputs"), SIZED)
def test_noise_for_an_input_that_is_a_size_is_bounded(operator, inputs, computed):
    model = build_graph(operator, inputs, COMPUTED[computed])
    assert find_size_inputs(model) == {"n"}
    size = InputSpec("n", "int64", (64,), (64,), (64,))
    (bounded,) = bound_noise([size], model)
    assert bounded.below == SIZE_BOUND


def test_an_input_that_is_data_is_not_a_size():
    nodes = [
        ("Reshape", "x s", "r", {}),
        ("Gather", "s i", "g", {}),
        ("Expand", "r g", "y", {}),
        ("MatMul", "t y", "z", {}),
        ("Cast", "z", "c", {"to": 7}),
        ("Tile", "x c", "w", {}),
    ]
    values = {"x": [2, 3], "i": ("INT64", [2]), "t": [2, 2]}
    model = onnx_model(nodes, values, {"w": None}, s=np.array([3, 2]))
    assert find_size_inputs(model) == frozenset()


@pytest.mark.parametrize("kind", ["branch", "trip count", "body", "function"])
def test_a_size_inside_of_a_node_is_one(kind):
    import onnx
    from onnx import helper

    inner = helper.make_graph([node_of("Expand", "x n", "e")], "inner", [], [value_of("e", [2, 3])])
    body = helper.make_graph(
        [node_of("Identity", "go", "on"), node_of("Range", "zero n one", "e")],
        "body",
        [value_of("at", ("INT64", [])), value_of("go", ("BOOL", []))],
        [value_of("on", ("BOOL", [])), value_of("e", ("INT64", [None]))],
    )
    function = helper.make_function(
        "own", "grow", ["a", "b"], ["r"], [node_of("Expand", "a b", "r")],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    nodes = {
        "branch": helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
        "trip count": helper.make_node("Loop", ["n", ""], ["y"], body=body),
        "body": helper.make_node("Loop", ["two", ""], ["y"], body=body),
        "function": helper.make_node("grow", ["x", "n"], ["y"], domain="own"),
    }
    values = {"x": [2, 3], "n": ("INT64", [2]), "c": ("BOOL", [])}
    model = onnx_model([nodes[kind]], values, {"y": None}, **NUMBERS)
    model.functions.append(function)
    assert isinstance(model, onnx.ModelProto)
    assert find_size_inputs(model) == {"n"}


def test_sizes_of_the_user_may_be_larger_than_noise(tmp_path):
    """The bound is no rule of the model: a size of 300 is no index beyond a table of 8 rows."""
    path = tmp_path / "net.onnx"
    nodes = [("Expand", "x n", "y", {})]
    model = onnx_model(nodes, {"x": [1, 3], "n": ("INT64", [2])}, {"y": None}, path=path)
    assert find_index_bounds(model) == {}
    card = OnnxFileSource(path).load(WeightsRequest("default")).card
    assert [each.below for each in card.inputs] == [None, None]
    assert make_noise_rows(card, 4, model)["n"].max() < SIZE_BOUND
