"""Each cause planted alone is named at its layer; our own graphs have none of the causes that placement can avoid."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from optpipe.backends.onnx_lint import lint_graph
from optpipe.quantize.placement import place_qdq
from optpipe.quantize.qdq import ActivationRange, qdq_from_onnx


def graph(nodes, weights, channels=16):
    made = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, ["n", channels, 8, 8])],
        [value("y", 1, ["n", None, None, None])],
        [*made, numpy_helper.from_array(np.float32(0.1), "s"), numpy_helper.from_array(np.int8(0), "z")],
    )
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def pair(name):
    return [
        helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}_q"], name=f"{name}_q"),
        helper.make_node("DequantizeLinear", [f"{name}_q", "s", "z"], [f"{name}_dq"], name=f"{name}_dq"),
    ]


def int8_weights(name, shape, per_channel=True):
    scale = np.full(shape[0] if per_channel else (), 0.01, np.float32)
    return {f"{name}_i": np.ones(shape, np.int8), f"{name}_s": scale, f"{name}_z": np.zeros(scale.shape, np.int8)}, (
        helper.make_node("DequantizeLinear", [f"{name}_i", f"{name}_s", f"{name}_z"], [name], axis=0)
    )


def rules(model):
    return [(each.rule, each.layer) for each in lint_graph(model)]


def node(kind, inputs, output, name):
    return helper.make_node(kind, inputs, [output], name=name)


@pytest.mark.parametrize(("shape", "expected"), [((16, 16, 1, 1), []), ((20, 16, 1, 1), [("channels", "c")])])
def test_int8_channels(shape, expected) -> None:
    weights, dequantize = int8_weights("w", shape)
    model = graph([*pair("x"), dequantize, node("Conv", ["x_dq", "w"], "y", "c")], weights)
    assert rules(model) == expected


def test_fp16_channels_only_where_nothing_is_quantized() -> None:
    odd = np.ones((12, 16, 1, 1), np.float32)
    assert rules(graph([node("Conv", ["x", "w"], "y", "c")], {"w": odd})) == [("channels", "c")]
    even = np.ones((24, 16, 1, 1), np.float32)
    assert rules(graph([node("Conv", ["x", "w"], "y", "c")], {"w": even})) == []


def test_a_pair_between_convolution_and_relu() -> None:
    weights, dequantize = int8_weights("w", (16, 16, 1, 1))
    nodes = [
        *pair("x"),
        dequantize,
        node("Conv", ["x_dq", "w"], "a", "c"),
        *pair("a"),
        node("Relu", ["a_dq"], "y", "r"),
    ]
    found = lint_graph(graph(nodes, weights))
    assert ("split-fusion", "c") in [(each.rule, each.layer) for each in found]
    assert "quantize the output of Relu" in next(each.advice for each in found if each.rule == "split-fusion")


def test_a_pair_that_no_int8_kernel_reads() -> None:
    assert rules(graph([*pair("x"), node("Softmax", ["x_dq"], "y", "s")], {})) == [("lonely-pair", "x_dq")]


def test_one_scale_for_all_weights() -> None:
    weights, dequantize = int8_weights("w", (16, 16, 1, 1), per_channel=False)
    model = graph([*pair("x"), dequantize, node("Conv", ["x_dq", "w"], "y", "c")], weights)
    assert rules(model) == [("per-tensor-weights", "c")]


def residual_pieces(quantize_shortcut):
    one, dq1 = int8_weights("w1", (16, 16, 1, 1))
    two, dq2 = int8_weights("w2", (16, 16, 1, 1))
    nodes = [
        *pair("x"),
        dq1,
        dq2,
        node("Conv", ["x_dq", "w1"], "a", "c1"),
        node("Add", ["a", "x_dq" if quantize_shortcut else "x"], "b", "add"),
        node("Relu", ["b"], "r", "relu"),
        *pair("r"),
        node("Conv", ["r_dq", "w2"], "y", "c2"),
    ]
    return graph(nodes, {**one, **two})


def test_a_shortcut_in_floating_point() -> None:
    assert rules(residual_pieces(quantize_shortcut=True)) == []
    assert rules(residual_pieces(quantize_shortcut=False)) == [("floating-shortcut", "add")]


def test_floating_point_between_int8_layers() -> None:
    one, dq1 = int8_weights("w1", (16, 16, 1, 1))
    two, dq2 = int8_weights("w2", (16, 16, 1, 1))
    nodes = [
        *pair("x"),
        dq1,
        dq2,
        node("Conv", ["x_dq", "w1"], "a", "c1"),
        node("Relu", ["a"], "b", "r1"),
        node("Conv", ["b", "wf"], "c", "middle"),
        *pair("c"),
        node("Conv", ["c_dq", "w2"], "y", "c2"),
    ]
    model = graph(nodes, {**one, **two, "wf": np.ones((16, 16, 1, 1), np.float32)})
    assert rules(model) == [("reformat", "middle")]


def test_our_own_placement_is_clean() -> None:
    weights = {f"w{i}": np.random.default_rng(i).random((16, 16, 1, 1), np.float32) for i in (1, 2)}
    nodes = [
        node("Conv", ["x", "w1"], "a", "c1"),
        node("Add", ["a", "x"], "b", "add"),
        node("Relu", ["b"], "r", "relu"),
        node("Conv", ["r", "w2"], "y", "c2"),
    ]
    plain = graph(nodes, weights)
    placed = place_qdq(plain, "tensorrt")
    quantized = qdq_from_onnx(plain, placed, {name: ActivationRange(1.0) for name in placed.tensors})
    assert rules(quantized) == []
    onnx.checker.check_model(quantized)
