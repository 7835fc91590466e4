"""Operators in floating point against ONNX Runtime, as a program runs them: nothing may wait for the GPU."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.fakes.int8_emulation import emulate

from optpipe.backends.onnx_graph import infer_graph_types, name_nodes
from optpipe.backends.torch_int8.lowering import lower_graph
from optpipe.backends.torch_int8.program import Program
from optpipe.core.card import InputSpec
from optpipe.core.errors import StageError

BATCH = 3


def numbers(*values):
    return np.array(values, np.int64)


def drawn(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


DOUBLED = np.array([1, 1, 2, 2], np.float32)
PLAIN: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "average pooling, padded on one side": ("AveragePool", [], {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [1, 1]}),
    "clip without a lower bound": ("Clip", ["", np.float32(0.5)], {}),
    "convolution over a sequence": ("Conv", [drawn(5, 6, 3)], {"pads": [0, 2], "strides": [2]}),
    "convolution, padded to its size": ("Conv", [drawn(4, 6, 3, 2)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "transposed convolution": ("ConvTranspose", [drawn(6, 4, 3, 3)], {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "depth to space": ("DepthToSpace", [], {"blocksize": 2, "mode": "CRD"}),
    "division": ("Div", [np.float32(3)], {}),
    "flattened but for the last axis": ("Flatten", [], {"axis": 3}),
    "gather": ("Gather", [numbers(3, -1, 0)], {"axis": 1}),
    "gather one": ("Gather", [np.int64(2)], {"axis": 2}),
    "hard sigmoid": ("HardSigmoid", [], {}),
    "hard sigmoid as in squeeze and excitation": ("HardSigmoid", [], {"alpha": 1 / 6, "beta": 0.5}),
    "hard swish": ("HardSwish", [], {}),
    "gelu": ("Gelu", [], {"approximate": "tanh"}),
    "instance normalization": ("InstanceNormalization", [drawn(8), drawn(8)], {}),
    "layer normalization": ("LayerNormalization", [drawn(6), drawn(6)], {}),
    "leaky relu": ("LeakyRelu", [], {"alpha": 0.2}),
    "log of softmax": ("LogSoftmax", [], {"axis": 1}),
    "max pooling, padded on one side": ("MaxPool", [], {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}),
    "mean of all": ("ReduceMean", [], {}),
    "padding": ("Pad", [numbers(1, 2), np.float32(0.5), numbers(3)], {}),
    "reflected padding": ("Pad", [numbers(0, 0, 1, 2, 0, 0, 2, 1)], {"mode": "reflect"}),
    "power": ("Pow", [np.float32(2)], {}),
    "norm": ("ReduceL2", [numbers(1)], {"keepdims": 1}),
    "resizing": ("Resize", ["", DOUBLED], {"mode": "linear"}),
    "nearest resizing": ("Resize", ["", DOUBLED], {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "slice": ("Slice", [numbers(-3, 0), numbers(99, 5), numbers(1, 3), numbers(1, 2)], {}),
    "slice backward": ("Slice", [numbers(-1), numbers(-99), numbers(2), numbers(-2)], {}),
    "softmax": ("Softmax", [], {"axis": -1}),
    "softplus of large values": ("Softplus", [], {}),
    "space to depth": ("SpaceToDepth", [], {"blocksize": 2}),
    "tile": ("Tile", [numbers(1, 1, 2, 1)], {}),
    "triangle": ("Trilu", [np.int64(1)], {"upper": 1}),
    "unsqueeze": ("Unsqueeze", [numbers(0, -1)], {}),
}  # fmt: skip


def graph(nodes, weights, channels=8):
    """A network of one image of 6x6 pixels and `channels` channels."""
    made = helper.make_graph(
        nodes,
        "operators",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, 6, 6])],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def lower(model, channels=8):
    shapes = ((1, channels, 6, 6), (2, channels, 6, 6), (8, channels, 6, 6))
    return lower_graph(model, infer_graph_types(name_nodes(model), (InputSpec("x", "float32", *shapes),)))


def compare(model, channels=8):
    """The emulation against ONNX Runtime; and the program with its tensors where no value can be read."""
    given = 3 * np.random.default_rng(0).standard_normal((BATCH, channels, 6, 6)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": given})
    network = lower(model, channels)
    found = emulate(network, {"x": torch.from_numpy(given)})["y"].numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    (unread,) = Program(network, {}, "meta")(torch.empty(given.shape, device="meta"))
    assert unread.shape == expected.shape


@pytest.mark.parametrize("name", PLAIN)
def test_an_operator_computes_what_onnx_says_and_reads_nothing_back(name):
    operator, constants, attributes = PLAIN[name]
    weights = {f"c{at}": value for at, value in enumerate(constants) if not isinstance(value, str)}
    names = [value if isinstance(value, str) else f"c{at}" for at, value in enumerate(constants)]
    channels = 6 if operator in ("Conv", "ConvTranspose") else 8
    nodes = [helper.make_node(operator, ["x", *names], ["y"], **attributes)]
    if name == "convolution over a sequence":
        nodes = [
            helper.make_node("Reshape", ["x", "line"], ["l"]),
            helper.make_node("Conv", ["l", *names], ["y"], **attributes),
        ]
        weights["line"] = numbers(0, 6, 36)
    compare(graph(nodes, weights, channels), channels)


def test_shapes_of_the_batch_stay_in_the_host_s_memory():
    """A token ahead of every sample, positions that are counted, and a mask that a sample chooses."""
    make = helper.make_node
    nodes = [
        make("Reshape", ["x", "rows"], ["r"]),
        make("Shape", ["x"], ["n"], start=0, end=1),
        make("Concat", ["n", "one", "wide"], ["s"], axis=0),
        make("Expand", ["token", "s"], ["t"]),
        make("Concat", ["t", "r"], ["tokens"], axis=1),
        make("Squeeze", ["n", "first"], ["count"]),
        make("Range", ["zero", "count", "step"], ["samples"]),
        make("Gather", ["tokens", "samples"], ["same"], axis=0),
        make("ConstantOfShape", ["s"], ["blank"]),
        make("Add", ["same", "blank"], ["sum"]),
        make("Equal", ["samples", "step"], ["second"]),
        make("Unsqueeze", ["second", "last"], ["mask"]),
        make("Where", ["mask", "low", "sum"], ["w"]),
        make("Expand", ["one number", "s"], ["ceiling"]),
        make("Min", ["w", "ceiling"], ["y"]),
    ]
    weights = {
        "rows": numbers(0, 8, 36), "one": numbers(1), "wide": numbers(36), "token": drawn(1, 1, 36), "first": numbers(0),
        "zero": np.int64(0), "step": np.int64(1), "last": numbers(1, 2), "low": np.float32(-5),
        "one number": np.float32(2),
    }  # fmt: skip
    compare(graph(nodes, weights))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_with_its_own_sigmoid_is_one_step(swapped):
    operands = ["s", "x"] if swapped else ["x", "s"]
    model = graph([helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", operands, ["y"])], {})
    compare(model)
    assert [each.operator for each in lower(model).steps] == ["Swish"]


def test_a_product_with_another_sigmoid_stays():
    make = helper.make_node
    nodes = [make("Neg", ["x"], ["n"]), make("Sigmoid", ["n"], ["s"]), make("Mul", ["x", "s"], ["y"])]
    compare(graph(nodes, {}))
    assert [each.operator for each in lower(graph(nodes, {})).steps] == ["Neg", "Sigmoid", "Mul"]


@pytest.mark.parametrize("bias", [(), (drawn(4),), (drawn(3, 4),)])
def test_a_matrix_product_with_factors(bias):
    nodes = [
        helper.make_node("Flatten", ["x"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w", *["b"][: len(bias)]], ["y"], alpha=0.5, beta=2.0, transB=1),
    ]
    compare(graph(nodes, {"w": drawn(4, 288), **({"b": bias[0]} if bias else {})}))


def test_constants_among_the_nodes_are_weights():
    value = numpy_helper.from_array(drawn(8, 1, 1))
    nodes = [helper.make_node("Constant", [], ["c"], value=value), helper.make_node("Mul", ["x", "c"], ["y"])]
    compare(graph(nodes, {}))


def test_a_shape_that_depends_on_values_is_refused_in_one_line():
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["x", "whole"], ["y"]),
    ]
    with pytest.raises(
        StageError, match=r"^its INT8 does not take shapes that depend on values, here of input 'x'; use [^\n]+$"
    ):
        lower(graph(nodes, {}))


def test_what_an_operator_is_not_computed_with_is_refused_in_one_line():
    resized = helper.make_node(
        "Resize", ["x", "", "c"], ["y"], mode="cubic", coordinate_transformation_mode="asymmetric"
    )
    with pytest.raises(
        StageError, match=r"^the torch backend's INT8 does not take Resize with mode cubic and [^\n]+; use [^\n]+$"
    ):
        compare(graph([resized], {"c": DOUBLED}))
