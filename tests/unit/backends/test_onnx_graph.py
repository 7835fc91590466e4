"""What an ONNX graph computes, layer by layer."""

import numpy as np
import onnx
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnx_mends import separate_int8_constants
from optpipe.backends.onnx_size_inputs import find_index_bounds
from optpipe.core.card import InputSpec

IMAGE = InputSpec("x", "float32", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
QUANTIZE, DEQUANTIZE = ("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "d")


@pytest.mark.parametrize(
    ("nodes", "weight", "operator", "macs"),
    [
        (
            [("Conv", "x w", "y", {"kernel_shape": [3, 3]})],
            (5, 3, 3, 3),
            "Conv",
            2 * 5 * 6 * 6 * 3 * 3 * 3,
        ),
        (
            [("Conv", "x w", "y", {"kernel_shape": [1, 1], "group": 3})],
            (3, 1, 1, 1),
            "Conv",
            2 * 3 * 8 * 8,
        ),
        (
            [("Flatten", "x", "f"), ("Gemm", "f w", "y", {"transB": 1})],
            (10, 192),
            "Gemm",
            2 * 192 * 10,
        ),
        # computed as it stands behind the pair: in FP32
        (
            [QUANTIZE, DEQUANTIZE, ("Conv", "d w", "y")],
            (5, 3, 3, 3),
            "Conv",
            2 * 5 * 6 * 6 * 3 * 3 * 3,
        ),
    ],
)
def test_multiply_adds_by_hand(nodes, weight, operator, macs) -> None:
    constants = {"w": np.zeros(weight, np.float32), "s": np.float32(0.1), "z": np.int8(0)}
    output = [None] * (2 if operator == "Gemm" else 4)
    layers = layers_from_onnx(
        onnx_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": output}, **constants), [IMAGE]
    )
    (layer,) = (each for each in layers if each.macs)
    assert (layer.name, layer.op, layer.type, layer.macs) == ("y", operator, "fp32", macs)


def test_no_two_nodes_read_one_int8_constant() -> None:
    nodes = [("DequantizeLinear", "w s z", "d"), ("MatMul", "x d", "h"), ("MatMul", "h d", "y")]
    model = onnx_model(
        nodes,
        {"x": [2, 4]},
        {"y": [2, 4]},
        w=np.eye(4, dtype=np.int8),
        s=np.float32(1),
        z=np.int8(0),
    )
    separate_int8_constants(model)
    onnx.checker.check_model(model, full_check=True)
    stored = {
        each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.INT8
    }
    assert sorted(
        name for node in model.graph.node for name in node.input if name in stored
    ) == sorted(stored)
    assert len(stored) == 4


def test_how_often_a_product_inside_a_loop_runs_is_unknown() -> None:
    def value(name, *shape, kind=onnx.TensorProto.FLOAT):
        return onnx.helper.make_tensor_value_info(name, kind, shape)

    more, again = (value(name, kind=onnx.TensorProto.BOOL) for name in ("more", "again"))
    nodes = [
        onnx.helper.make_node(*each)
        for each in (("MatMul", ["h", "w"], ["next"]), ("Identity", ["more"], ["again"]))
    ]
    given = [value("i", kind=onnx.TensorProto.INT64), more, value("h", "n", 8)]
    body = onnx.helper.make_graph(nodes, "body", given, [again, value("next", "n", 8)])
    constants = {"w": np.zeros((8, 8), np.float32), "count": np.array(3)}
    loop = ("Loop", ["count", "", "x"], ["y"], {"body": body})
    model = onnx_model([loop], {"x": ["n", 8]}, {"y": ["n", 8]}, **constants)
    layers = layers_from_onnx(model, [InputSpec("x", "float32", (1, 8), (2, 8), (4, 8))])
    assert [(each.macs, each.type) for each in layers if each.op == "MatMul"] == [(None, "fp32")]


def test_how_far_an_index_may_go_is_that_of_the_smallest_table() -> None:
    nodes = [
        ("Cast", "ids", "cast", {"to": onnx.TensorProto.INT32}),
        ("Gather", "a ids", "x"),
        ("Gather", "b cast", "y"),
        ("Add", "x y", "z"),
    ]
    inputs, tables = dict.fromkeys(("ids", "other"), ("INT64", ["n", 5])), {"a": 10, "b": 7}
    constants = {name: np.zeros((rows, 4), np.float32) for name, rows in tables.items()}
    assert find_index_bounds(onnx_model(nodes, inputs, {"z": ["n", 5, 4]}, **constants)) == {
        "ids": 7
    }
