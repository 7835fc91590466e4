"""What an ONNX graph computes, layer by layer; the 2:4 pattern of its weights; and the causes of slow INT8 that `lint_graph` names."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_graph import (
    find_index_bounds,
    has_pattern,
    layers_from_onnx,
    list_sparse_products,
    separate_int8_constants,
)
from optpipe.backends.onnx_lint import lint_graph
from optpipe.core.card import InputSpec
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange

IMAGE = InputSpec("x", "float32", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
QUANTIZE, DEQUANTIZE = ("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "d")


@pytest.mark.parametrize(
    ("nodes", "weight", "operator", "macs"),
    [
        ([("Conv", "x w", "y", {"kernel_shape": [3, 3]})], (5, 3, 3, 3), "Conv", 2 * 5 * 6 * 6 * 3 * 3 * 3),
        ([("Conv", "x w", "y", {"kernel_shape": [1, 1], "group": 3})], (3, 1, 1, 1), "Conv", 2 * 3 * 8 * 8),
        ([("Flatten", "x", "f"), ("Gemm", "f w", "y", {"transB": 1})], (10, 192), "Gemm", 2 * 192 * 10),
        # computed as it stands behind the pair: in FP32
        ([QUANTIZE, DEQUANTIZE, ("Conv", "d w", "y")], (5, 3, 3, 3), "Conv", 2 * 5 * 6 * 6 * 3 * 3 * 3),
    ],
)
def test_multiply_adds_by_hand(nodes, weight, operator, macs) -> None:
    constants = {"w": np.zeros(weight, np.float32), "s": np.float32(0.1), "z": np.int8(0)}
    output = [None] * (2 if operator == "Gemm" else 4)
    layers = layers_from_onnx(onnx_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": output}, **constants), [IMAGE])
    assert [(each.name, each.op, each.type, each.macs) for each in layers if each.macs] == [
        ("y", operator, "fp32", macs)
    ]


def test_no_two_nodes_read_one_int8_constant() -> None:
    nodes = [("DequantizeLinear", "w s z", "d"), ("MatMul", "x d", "h"), ("MatMul", "h d", "y")]
    model = onnx_model(nodes, {"x": [2, 4]}, {"y": [2, 4]}, w=np.eye(4, dtype=np.int8), s=np.float32(1), z=np.int8(0))
    separate_int8_constants(model)
    onnx.checker.check_model(model, full_check=True)
    stored = {each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.INT8}
    assert sorted(name for node in model.graph.node for name in node.input if name in stored) == sorted(stored)
    assert len(stored) == 4


def test_a_product_inside_a_loop_counts_once() -> None:
    def value(name, *shape, kind=onnx.TensorProto.FLOAT):
        return onnx.helper.make_tensor_value_info(name, kind, shape)

    more, again = (value(name, kind=onnx.TensorProto.BOOL) for name in ("more", "again"))
    nodes = [
        onnx.helper.make_node(*each) for each in (("MatMul", ["h", "w"], ["next"]), ("Identity", ["more"], ["again"]))
    ]
    given = [value("i", kind=onnx.TensorProto.INT64), more, value("h", "n", 8)]
    body = onnx.helper.make_graph(nodes, "body", given, [again, value("next", "n", 8)])
    constants = {"w": np.zeros((8, 8), np.float32), "count": np.array(3)}
    model = onnx_model(
        [("Loop", ["count", "", "x"], ["y"], {"body": body})], {"x": ["n", 8]}, {"y": ["n", 8]}, **constants
    )
    layers = layers_from_onnx(model, [InputSpec("x", "float32", (1, 8), (2, 8), (4, 8))])
    assert [each.macs for each in layers if each.op == "MatMul"] == [2 * 8 * 8]


def test_how_far_an_index_may_go_is_that_of_the_smallest_table() -> None:
    nodes = [
        ("Cast", "ids", "cast", {"to": onnx.TensorProto.INT32}),
        ("Gather", "a ids", "x"),
        ("Gather", "b cast", "y"),
        ("Add", "x y", "z"),
    ]
    inputs, tables = dict.fromkeys(("ids", "other"), ("INT64", ["n", 5])), {"a": 10, "b": 7}
    constants = {name: np.zeros((rows, 4), np.float32) for name, rows in tables.items()}
    assert find_index_bounds(onnx_model(nodes, inputs, {"z": ["n", 5, 4]}, **constants)) == {"ids": 7}


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
    assert has_pattern(-3 * pruned, axis)
    assert has_pattern(np.round(pruned / (np.abs(pruned).max() / 127)).astype(np.int8), axis)
    assert not has_pattern(np.zeros((8, 6)), 1), "a length that is no multiple of four"


@pytest.mark.parametrize(("op", "axis"), [("Conv", 1), ("Gemm", 0), ("MatMul", 0)])
def test_sparse_products_are_found_through_casts_and_quantization(op, axis) -> None:
    size = (8, 16, 1, 1) if op == "Conv" else (16, 8)
    quantized = np.round(prune(np.random.default_rng(0).normal(size=size), axis) * 40).astype(np.int8)
    nodes = [
        ("DequantizeLinear", "q scale", "w"),
        (op, "x w", "sparse"),
        ("Cast", "dense", "d", {"to": onnx.TensorProto.FLOAT}),
        (op, "x d", "full"),
    ]
    constants = {"q": quantized, "scale": np.float32(0.025), "dense": np.ones(size, np.float16)}
    assert list_sparse_products(onnx_model(nodes, {"x": None}, dict.fromkeys(("sparse", "full")), **constants)) == (
        "sparse",
    )


def graph(nodes, weights):
    """From x with 16 channels to y; "w", "w1" and "w2" are INT8 behind DequantizeLinear where `weights` has no such name."""
    read = {name for node in nodes for name in node[1].split()}
    constants = {"s": np.float32(0.1), "z": np.int8(0), **weights}
    made = []
    for name in sorted({"w", "w1", "w2"} & read - weights.keys()):
        scale = weights.get(f"{name}_s", np.full(16, 0.01, np.float32))
        constants |= {
            f"{name}_i": np.ones((16, 16, 1, 1), np.int8),
            f"{name}_s": scale,
            f"{name}_z": np.zeros(scale.shape, np.int8),
        }
        constants |= {key: value for key, value in weights.items() if key.startswith(name)}
        made.append(("DequantizeLinear", f"{name}_i {name}_s {name}_z", name, {"axis": 0}))
    return onnx_model([*made, *nodes], {"x": ["n", 16, 8, 8]}, {"y": ["n", None, None, None]}, opset=20, **constants)


def pair(name):
    return ("QuantizeLinear", f"{name} s z", f"{name}_q"), ("DequantizeLinear", f"{name}_q s z", f"{name}_dq")


def node(kind, read, made, name):
    return kind, read, made, {"name": name}


def shortcut(added):
    """A convolution to which `added` is added, and another one."""
    first = node("Conv", "x_dq w1", "a", "c1"), node("Add", f"a {added}", "b", "add"), node("Relu", "b", "r", "relu")
    return [*pair("x"), *first, *pair("r"), node("Conv", "r_dq w2", "y", "c2")]


ODD = {"w_i": np.ones((20, 16, 1, 1), np.int8), "w_s": np.full(20, 0.01, np.float32)}
ALONE = [node("Conv", "x w", "y", "c")]
QUANTIZED = [*pair("x"), node("Conv", "x_dq w", "y", "c")]
SPLIT = [*pair("x"), node("Conv", "x_dq w", "a", "c"), *pair("a"), node("Relu", "a_dq", "y", "r")]
BETWEEN = [
    *pair("x"),
    *(node("Conv", "x_dq w1", "a", "c1"), node("Relu", "a", "b", "r1"), node("Conv", "b wf", "c", "middle")),
    *pair("c"),
    node("Conv", "c_dq w2", "y", "c2"),
]
CAUSES = {
    "int8, 16 channels": (QUANTIZED, {}, set()),
    "int8, 20 channels": (QUANTIZED, ODD, {("channels", "c")}),
    "fp16, 12 channels": (ALONE, {"w": np.ones((12, 16, 1, 1), np.float32)}, {("channels", "c")}),
    "fp16, 24 channels": (ALONE, {"w": np.ones((24, 16, 1, 1), np.float32)}, set()),
    "a pair between convolution and relu": (SPLIT, {}, {("split-fusion", "c"), ("lonely-pair", "a_dq")}),
    "a pair that no INT8 kernel reads": ([*pair("x"), node("Softmax", "x_dq", "y", "s")], {}, {("lonely-pair", "x_dq")}),
    "one scale for all weights": (QUANTIZED, {"w_s": np.float32(0.01)}, {("per-tensor-weights", "c")}),
    "a shortcut in INT8": (shortcut("x_dq"), {}, set()),
    "a shortcut in floating point": (shortcut("x"), {}, {("floating-shortcut", "add")}),
    "floating point between": (BETWEEN, {"wf": np.ones((16, 16, 1, 1), np.float32)}, {("reformat", "middle")}),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_planted_alone_is_named_at_its_layer(cause) -> None:
    nodes, weights, expected = CAUSES[cause]
    assert {(each.rule, each.layer) for each in lint_graph(graph(nodes, weights))} == expected


def test_our_own_placement_is_clean() -> None:
    weights = {f"w{i}": np.random.default_rng(i).random((16, 16, 1, 1), np.float32) for i in (1, 2)}
    nodes = node("Conv", "x w1", "a", "c1"), node("Add", "a x", "b", "add"), node("Relu", "b", "r", "relu")
    plain = graph([*nodes, node("Conv", "r w2", "y", "c2")], weights)
    placed = place_qdq(plain, "tensorrt")
    quantized = qdq_from_onnx(plain, placed, {name: TensorRange(1.0, -1.0, 1.0) for name in placed.tensors})
    assert list(lint_graph(quantized)) == []
    onnx.checker.check_model(quantized)
