"""Small ONNX graphs with the structures that matter to placement."""

import numpy as np
import pytest
from tests.fakes import graphs


def model(nodes, weights, inputs=(("x", ["n", 16, 8, 8]),), outputs=("y",), opset=20):
    constants = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    made = {name: ["n", None, None, None] for name in outputs}
    return graphs.onnx_model(nodes, dict(inputs), made, opset=opset, **constants)


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / np.sqrt(
        np.prod(shape[1:])
    )


def residual():
    """x -> relu(conv1) -> conv2 -> + x (shortcut by `down`) -> relu -> conv3 -> y, all with biases."""
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        ("Conv", "x w1 b", "c1", {"name": "conv1", **same}),
        ("Relu", "c1", "r1", {"name": "relu1"}),
        ("Conv", "r1 w2 b", "c2", {"name": "conv2", **same}),
        ("Conv", "x wd b", "d", {"name": "down"}),
        ("Add", "c2 d", "s", {"name": "add"}),
        ("Relu", "s", "r2", {"name": "relu2"}),
        ("Conv", "r2 w3 b", "y", {"name": "conv3", **same}),
    ]
    weights = {
        "w1": weight(16, 16, 3, 3, seed=1),
        "w2": weight(16, 16, 3, 3, seed=2),
        "wd": weight(16, 16, 1, 1, seed=3),
        "w3": weight(16, 16, 3, 3, seed=4),
        "b": weight(16, 1, seed=5)[:, 0],
    }
    return model(nodes, weights)


@pytest.fixture
def residual_model():
    return residual()


@pytest.fixture
def onnx_model():
    return model


@pytest.fixture
def random_weight():
    return weight
