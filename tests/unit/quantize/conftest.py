"""Small ONNX graphs with the structures that matter to placement."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper


def model(nodes, weights, inputs=(("x", ["n", 16, 8, 8]),), outputs=("y",), opset=20):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", None, None, None]) for name in outputs],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def weight(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / np.sqrt(np.prod(shape[1:]))


def residual():
    """x -> relu(conv1) -> conv2 -> + x (shortcut by `down`) -> relu -> conv3 -> y, all with biases."""
    conv = helper.make_node
    nodes = [
        conv("Conv", ["x", "w1", "b"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        conv("Relu", ["c1"], ["r1"], name="relu1"),
        conv("Conv", ["r1", "w2", "b"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        conv("Conv", ["x", "wd", "b"], ["d"], name="down"),
        conv("Add", ["c2", "d"], ["s"], name="add"),
        conv("Relu", ["s"], ["r2"], name="relu2"),
        conv("Conv", ["r2", "w3", "b"], ["y"], name="conv3", pads=[1, 1, 1, 1]),
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
