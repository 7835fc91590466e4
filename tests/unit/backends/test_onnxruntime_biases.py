"""A bias as an addition computes the same, and ONNX Runtime leaves it one where it is told to."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from onnx import TensorProto, helper, numpy_helper

from optpipe.backends.onnxruntime import separate_biases
from optpipe.backends.onnxruntime_session import BIAS_FUSION_PASS


def network(rank: int, *, bias: bool, shared: bool, constant: bool = True, dtype: type = np.float16) -> onnx.ModelProto:
    """Two convolutions with a ReLU in between, over `rank` spatial dimensions."""
    generator = np.random.default_rng(0)
    shapes = {"w1": (8, 3, *[3] * rank), "w2": (8, 8, *[1] * rank), "b1": (8,), "b2": (8,)}
    second = "b1" if shared else "b2"
    names = ["w1", "w2", *(["b1", second] if bias and constant else [])]
    tensors = [
        numpy_helper.from_array(generator.normal(0, 0.3, shapes[n]).astype(dtype), n) for n in dict.fromkeys(names)
    ]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info("x", element, ["n", 3, *[5] * rank])]
    if bias and not constant:
        inputs += [helper.make_tensor_value_info(name, element, [8]) for name in dict.fromkeys(("b1", second))]
    nodes = [
        helper.make_node("Conv", ["x", "w1", *(["b1"] if bias else [])], ["c1"], name="first"),
        helper.make_node("Relu", ["c1"], ["r"]),
        helper.make_node("Conv", ["r", "w2", *([second] if bias else [])], ["y"], name="second"),
    ]
    output = helper.make_tensor_value_info("y", element, ["n", 8, *["side"] * rank])
    graph = helper.make_graph(nodes, "net", inputs, [output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def answers(
    model: onnx.ModelProto, rank: int, target: Path | None = None, left_out: tuple[str, ...] = (BIAS_FUSION_PASS,)
) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if target is not None:
        options.optimized_model_filepath = str(target)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(left_out)
    )
    x = np.random.default_rng(1).normal(0, 1, (2, 3, *[5] * rank)).astype(np.float16)
    answer: np.ndarray = session.run(None, {"x": x})[0]
    return answer


@settings(max_examples=12, deadline=None)
@given(rank=some.integers(1, 3), bias=some.booleans(), shared=some.booleans())
def test_additions_compute_what_the_biases_did(rank: int, *, bias: bool, shared: bool) -> None:
    before, after = network(rank, bias=bias, shared=shared), network(rank, bias=bias, shared=shared)
    assert separate_biases(after) == (2 if bias else 0)
    onnx.checker.check_model(after, full_check=True)
    assert separate_biases(after) == 0
    np.testing.assert_allclose(answers(after, rank), answers(before, rank), atol=4e-3, rtol=2e-3)


def test_the_additions_stay_and_the_old_biases_go(tmp_path: Path) -> None:
    model = network(2, bias=True, shared=False)
    separate_biases(model)
    assert {each.name for each in model.graph.initializer} == {"w1", "w2", "b1_over_4d", "b2_over_4d"}
    answers(model, 2, tmp_path / "optimized.onnx")
    written = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert written.count("Add") == 2


def test_put_back_are_only_those_that_cudnn_fuses_well(tmp_path: Path) -> None:
    """Three input channels, then eight."""
    model = network(2, bias=True, shared=False)
    separate_biases(model)
    answers(model, 2, tmp_path / "optimized.onnx", left_out=())
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert [len(node.input) for node in nodes if node.op_type == "Conv"] == [2, 3]
    assert [node.op_type for node in nodes if node.op_type in ("Conv", "Add", "Relu")] == [
        "Conv",
        "Add",
        "Relu",
        "Conv",
    ]


@pytest.mark.parametrize("left", [{"constant": False}, {"dtype": np.float32}])
def test_biases_that_are_computed_or_in_single_precision_stay(left: dict[str, object]) -> None:
    model = network(2, bias=True, shared=False, **left)  # type: ignore[arg-type]
    as_written = model.SerializeToString()
    assert separate_biases(model) == 0
    assert model.SerializeToString() == as_written


def test_names_for_convolutions_without_one() -> None:
    model = network(2, bias=True, shared=True)
    for node in model.graph.node:
        node.name = ""
    separate_biases(model)
    assert [node.name for node in model.graph.node if node.op_type == "Add"] == ["c1_bias", "y_bias"]
    assert model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16
