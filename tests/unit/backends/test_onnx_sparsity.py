"""The 2:4 pattern of weights: pruned to it they have it, dense they do not, and quantizing keeps it."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from optpipe.backends.onnx_graph import has_pattern, list_sparse_products


def prune(weight, axis):
    """The two smallest of each four along `axis` set to zero."""
    moved = np.moveaxis(weight, axis, -1)
    groups = moved.reshape(-1, 4).copy()
    np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1)[:, :2], 0, axis=1)
    return np.moveaxis(groups.reshape(moved.shape), -1, axis)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0, 1]))
def test_pruned_weights_have_the_pattern_and_dense_ones_do_not(rows, groups, seed, axis) -> None:
    weight = np.random.default_rng(seed).normal(size=(rows, 4 * groups))
    weight = weight if axis == 1 else weight.T
    assert not has_pattern(weight, axis)
    pruned = prune(weight, axis)
    assert has_pattern(pruned, axis)
    assert has_pattern(-3 * pruned, axis)
    scale = np.abs(pruned).max() / 127
    assert has_pattern(np.round(pruned / scale).astype(np.int8), axis)


def test_a_length_that_is_no_multiple_of_four_has_no_pattern() -> None:
    assert not has_pattern(np.zeros((8, 6)), 1)
    assert not has_pattern(np.zeros(8), 0)


@pytest.mark.parametrize(("op", "axis"), [("Conv", 1), ("Gemm", 0), ("MatMul", 0)])
def test_products_are_found_through_casts_and_quantization(op, axis) -> None:
    size = (8, 16, 1, 1) if op == "Conv" else (16, 8)
    weight = prune(np.random.default_rng(0).normal(size=size), axis)
    quantized = np.round(weight * 40).astype(np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"], name="dequantize"),
        helper.make_node(op, ["x", "w"], ["y"], name="sparse"),
        helper.make_node("Cast", ["dense"], ["d"], name="cast", to=TensorProto.FLOAT),
        helper.make_node(op, ["x", "d"], ["z"], name="full"),
    ]
    dense = np.ones(size, np.float16)
    weights = {"q": quantized, "scale": np.float32(0.025), "dense": dense}
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    assert list_sparse_products(model) == ("sparse",)
