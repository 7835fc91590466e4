"""What ONNX Runtime's passes over Q/DQ pairs do to a graph for its CUDA provider, and that the session setting leaves them out."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from optpipe.backends.onnxruntime_session import QDQ_AS_WRITTEN, OnnxRuntimeSession, find_graph_refusal
from optpipe.core.errors import StageError


@pytest.fixture(scope="module")
def quantized_in_fp16(tmp_path_factory):
    """1x1 convolution of 4 channels with Q/DQ around it, FP16 scales of usual size, and a bias."""
    generator = np.random.default_rng(0)
    scale, weight_scale, zero = np.float16(2e-3), np.full(4, 4e-4, np.float16), np.zeros(4, np.int8)
    tensors = {
        "w": generator.integers(-127, 128, (4, 4, 1, 1)).astype(np.int8),
        "ws": weight_scale, "wz": zero, "s": scale, "z": np.int8(0), "b": generator.normal(0, 0.2, 4).astype(np.float16),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["dw"], axis=0),
        helper.make_node("Conv", ["d", "dw", "b"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["y"]),
    ]
    shape = ["n", 4, 2, 2]
    graph = helper.make_graph(
        nodes, "conv",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("graph") / "conv.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def session(path, level, *, as_written, target=None):
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    if as_written:
        options.add_session_config_entry(*QDQ_AS_WRITTEN)
    if target is not None:
        options.optimized_model_filepath = str(target)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def answers(path, level, *, as_written):
    x = np.random.default_rng(1).normal(0, 0.1, (8, 4, 2, 2)).astype(np.float16)
    return session(path, level, as_written=as_written).run(None, {"x": x})[0].astype(np.float64)


def test_the_answers_are_those_of_the_graph_as_written(quantized_in_fp16):
    levels = ort.GraphOptimizationLevel
    expected = answers(quantized_in_fp16, levels.ORT_DISABLE_ALL, as_written=True)
    steps = np.abs(answers(quantized_in_fp16, levels.ORT_ENABLE_ALL, as_written=True) - expected) / 2e-3
    assert steps.max() <= 1.01  # one quantization step
    wrong = np.abs(answers(quantized_in_fp16, levels.ORT_ENABLE_ALL, as_written=False) - expected) / 2e-3
    assert wrong.max() > 10, "ONNX Runtime mended it: are its Q/DQ passes of use now? (backends/onnxruntime_session.py)"


@pytest.mark.parametrize(("as_written", "count"), [(True, 0), (False, 1)])
def test_weights_are_constants_not_dequantized_in_every_call(quantized_in_fp16, tmp_path, *, as_written, count):
    target = tmp_path / "optimized.onnx"
    session(quantized_in_fp16, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, as_written=as_written, target=target)
    written = onnx.load(target).graph
    constants = {each.name for each in written.initializer}
    assert sum(node.op_type == "DequantizeLinear" and node.input[0] in constants for node in written.node) == count


def test_a_type_without_a_kernel_is_said_with_the_way_out(tmp_path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", 8]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Sigmoid", ["x"], ["y"], name="s")], "g", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "bf16.onnx"
    )
    refusal = "Could not find an implementation for Sigmoid(13) node with name 's'"
    with pytest.raises(StageError) as refused:
        OnnxRuntimeSession(tmp_path / "bf16.onnx", "cpu", {})
    assert str(refused.value).splitlines() == [
        f"ONNX Runtime rejected bf16.onnx: {refusal}",
        "it has no kernel on cpu for this operator with these types; export the model in float32",
    ]
    assert find_graph_refusal(tmp_path / "bf16.onnx", "cpu") == refusal
