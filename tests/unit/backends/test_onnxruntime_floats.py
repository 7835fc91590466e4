"""A layer that a Q/DQ graph leaves in FP32 stays there on the CPU, whoever loads the graph; biases of other tools are still quantized."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnxruntime import OnnxRuntime, needs_weight_pass, protect_convolutions
from optpipe.backends.onnxruntime_session import optimize_graph
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision
from optpipe.quantize.placement import place_qdq
from optpipe.quantize.qdq import ActivationRange, qdq_from_onnx


@pytest.fixture
def quantized():
    """Three convolutions, the second kept in FP32."""
    rng = np.random.default_rng(0)
    names = ["x", "a", "b", "y"]
    weights = [
        numpy_helper.from_array((rng.standard_normal((16, 16, 3, 3)) / 12).astype(np.float32), f"w{index}")
        for index in range(3)
    ]
    weights.append(numpy_helper.from_array(np.zeros(16, np.float32), "bias"))
    nodes = [
        helper.make_node("Conv", [names[i], f"w{i}", "bias"], [names[i + 1]], name=f"conv{i}", pads=[1] * 4)
        for i in range(3)
    ]
    shape = ["n", 16, 8, 8]
    graph = helper.make_graph(
        nodes, "g", *([helper.make_tensor_value_info(name, 1, shape)] for name in ("x", "y")), weights
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    placed = place_qdq(model, "cpu", "conv1".__eq__)
    return qdq_from_onnx(model, placed, dict.fromkeys(placed.tensors, ActivationRange(4.0)))


def count_kernels(path, target):
    """What a plain session, as a server's, makes of a graph."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(target).graph.node)


def test_a_kept_convolution_is_not_quantized_behind_ones_back(quantized, tmp_path) -> None:
    onnx.save(quantized, tmp_path / "graph.onnx")
    optimize_graph(tmp_path / "graph.onnx", tmp_path / "optimized.onnx", "cpu")
    before = count_kernels(tmp_path / "optimized.onnx", tmp_path / "before.onnx")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert protect_convolutions(optimized) == 1
    onnx.save(optimized, tmp_path / "protected.onnx")
    after = count_kernels(tmp_path / "protected.onnx", tmp_path / "after.onnx")
    assert after["FusedConv"] == 1
    assert before["QLinearConv"] == after["QLinearConv"] + 1  # what ONNX Runtime would do with it


def test_it_computes_the_same(quantized, tmp_path) -> None:
    x = {"x": np.random.default_rng(1).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = ort.InferenceSession(quantized.SerializeToString(), options).run(None, x)
    onnx.save(quantized, tmp_path / "graph.onnx")
    optimize_graph(tmp_path / "graph.onnx", tmp_path / "optimized.onnx", "cpu")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    protect_convolutions(optimized)
    (found,) = ort.InferenceSession(optimized.SerializeToString()).run(None, x)
    assert np.square(found - expected).sum() < 1e-4 * np.square(expected).sum()


def test_biases_that_another_tool_left_in_fp32_are_quantized(quantized, tmp_path) -> None:
    assert not needs_weight_pass(quantized)
    first = next(node for node in quantized.graph.node if node.name == "conv0")
    first.input[2] = "bias"
    assert needs_weight_pass(quantized)
    onnx.save(quantized, tmp_path / "graph.onnx")
    inputs = (InputSpec("x", "float32", *((size, 16, 8, 8) for size in (1, 2, 4))),)
    card = ModelCard("small", "small.onnx", Task.OTHER, inputs)
    request = BuildRequest(card, Precision.INT8, tmp_path / "graph.onnx", None, "cpu", {}, tmp_path)
    built = OnnxRuntime().build(request)
    assert [each.op for each in built.layers].count("QLinearConv") == 2
