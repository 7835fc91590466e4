"""Inputs that are sizes of other tensors get small noise: no probe of a graph may outgrow memory."""

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_graph import SIZE_BOUND, find_index_bounds
from optpipe.models.inputs.samples import make_synthetic_tensor


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("Reshape", "x n"),
        ("Expand", "x n"),
        ("Tile", "x n"),
        ("Pad", "x n"),
        ("CenterCropPad", "x n"),
        ("TopK", "x n"),
        ("ConstantOfShape", "n"),
    ],
)
@pytest.mark.parametrize("cast", [False, True])
def test_an_input_that_is_a_size_is_bounded(operator, inputs, cast):
    nodes = [("Cast", "n", "m", {"to": 7})] if cast else []
    read = inputs.replace("n", "m") if cast else inputs
    nodes.append((operator, read, "y", {}))
    model = onnx_model(nodes, {"x": [2, 3], "n": [2]}, {"y": None})

    bounds = find_index_bounds(model)

    assert bounds == {"n": SIZE_BOUND}
    noise = make_synthetic_tensor((64,), np.int64, below=bounds["n"])
    assert noise.max() < SIZE_BOUND


def test_an_input_that_is_data_is_not_a_size():
    model = onnx_model([("Reshape", "x s", "y", {})], {"x": [2, 3]}, {"y": [3, 2]}, s=[3, 2])
    assert find_index_bounds(model) == {}
