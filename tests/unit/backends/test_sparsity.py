"""2:4 sparse weights, through casts, transposes and quantization, and the kernels that the engine inspector names."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.sparsity import find_sparsity, has_pattern, list_sparse_kernels


def prune(weight, axis):
    """The two smallest of each four along `axis` become 0."""
    moved = np.moveaxis(weight, axis, -1)
    groups = moved.reshape(-1, 4).copy()
    np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1)[:, :2], 0, axis=1)
    return np.moveaxis(groups.reshape(moved.shape), -1, axis)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0, 1]))
def test_pruned_weights_have_the_pattern_and_dense_ones_do_not(rows, groups, seed, axis):
    weight = np.random.default_rng(seed).normal(size=(rows, 4 * groups))
    weight = weight if axis == 1 else weight.T
    assert not has_pattern(weight, axis)
    pruned = prune(weight, axis)
    assert has_pattern(-3 * pruned, axis)
    assert has_pattern(np.round(pruned / (np.abs(pruned).max() / 127)).astype(np.int8), axis)


def test_what_is_no_pattern():
    assert not has_pattern(np.eye(8, 6), 1), "a length that is no multiple of four"
    assert not has_pattern(np.zeros((8, 8)), 1), "weights without a value"
    assert not has_pattern(np.ones(8), 0)


@pytest.mark.parametrize(("op", "axis"), [("Conv", 1), ("Gemm", 0), ("MatMul", 0)])
def test_sparse_products_are_found_through_casts_and_quantization(op, axis):
    size = (8, 16, 1, 1) if op == "Conv" else (16, 8)
    weight = prune(np.random.default_rng(0).normal(size=size), axis)
    nodes = [
        ("DequantizeLinear", "q scale", "w"),
        (op, "x w", "sparse"),
        ("Cast", "dense", "d", {"to": onnx.TensorProto.FLOAT}),
        (op, "x d", "full"),
    ]
    constants = {
        "q": np.round(weight * 40).astype(np.int8),
        "scale": np.float32(0.025),
        "dense": np.ones(size, np.float16),
    }
    model = onnx_model(nodes, {"x": None}, dict.fromkeys(("sparse", "full")), **constants)
    found = find_sparsity(model)
    assert (found.sparse, found.products) == (("sparse",), 2)
    assert found.describe().startswith("1 of 2 convolutions and matrix products have 2:4 sparse")


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_the_axis_follows_transposes(turns):
    weight = prune(np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32), 0)
    nodes = [("Transpose", f"w{turn}", f"w{turn + 1}", {"perm": [1, 0]}) for turn in range(turns)]
    nodes.append(("Gemm", f"x w{turns}", "y", {"transB": turns % 2}))
    model = onnx_model(nodes, {"x": None}, {"y": None}, w0=weight)
    assert find_sparsity(model).sparse == ("y",)


def test_sparse_kernels_are_read_from_the_inspectors_json():
    """JSON of the form in NVIDIA's documentation; none was recorded by us."""
    layers = [
        {"Name": "a", "TacticName": "sm90_xmma_fprop_sparse_conv_f16"},
        {"Name": "b", "TacticName": "cutlass_80_sptensorop_i16864gemm"},
        {"Name": "c", "TacticName": "sm90_xmma_fprop_implicit_gemm"},
        "a name alone",
    ]
    assert list_sparse_kernels(json.dumps({"Layers": layers})) == ["a", "b"]
