"""Which nodes a provider leaves to another one: ONNX Runtime's own record of a session that it loaded."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from optpipe.backends.onnx_graph import layers_from_onnx
from optpipe.backends.onnxruntime_session import RECORD_ASSIGNMENT, OnnxRuntimeSession, placement_from_session
from optpipe.core.card import InputSpec
from optpipe.core.precision import LayerType, PlacedNode, Placement, Precision, prove_precision
from optpipe.report.document import format_placement

SPEC = InputSpec("x", "float32", (1, 3, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8))


@pytest.fixture
def graph(tmp_path):
    """A convolution of 3 * 64 * 4 multiply-adds, an activation, and one of 4 * 64 * 5."""
    weights = {"w": (4, 3, 1, 1), "v": (5, 4, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("Erf", ["a"], ["b"], name="curve"),
        helper.make_node("Conv", ["b", "v"], ["y"], name="second"),
    ]
    made = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5, 8, 8])],
        [numpy_helper.from_array(np.ones(size, np.float32), name) for name, size in weights.items()],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def layers_of(graph):
    return layers_from_onnx(onnx.load(graph), (SPEC,))


def test_a_session_of_the_cpu_leaves_nothing_elsewhere(graph) -> None:
    layers = layers_of(graph)
    with OnnxRuntimeSession(graph, "cpu", {}) as session:
        found = session.find_placement(layers)
    assert found == Placement("CPUExecutionProvider", 3, 0, 0.0, ())
    assert prove_precision(Precision.FP32, layers, found).proven


def test_what_another_provider_runs_is_named_with_its_share_and_not_proven(graph) -> None:
    """The real record of a session whose nodes all went to the CPU, where CUDA was asked for."""
    options = ort.SessionOptions()
    options.add_session_config_entry(*RECORD_ASSIGNMENT)
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    layers = layers_of(graph)
    found = placement_from_session(session, "CUDAExecutionProvider", layers)
    assert (found.nodes, found.count) == (3, 3)
    assert found.share == pytest.approx(1.0)
    assert [(each.name, each.op, each.provider) for each in found.elsewhere] == [
        ("second", "Conv", "CPUExecutionProvider"),
        ("first", "Conv", "CPUExecutionProvider"),
        ("curve", "Erf", "CPUExecutionProvider"),
    ]
    assert [each.share for each in found.elsewhere] == pytest.approx([1280 / 2048, 768 / 2048, 0])
    proof = prove_precision(Precision.FP32, layers, found)
    assert not proof.proven
    assert proof.reason == (
        "100.0% of MACs in fp32, 100% required; 100.0% of MACs run outside CUDAExecutionProvider, 1% allowed"
    )
    assert format_placement(found).startswith(
        "3 of 3 nodes, 100.0% of MACs, do not run on CUDAExecutionProvider: second (Conv, CPUExecutionProvider, 62.5%), "
    )


def test_a_graph_without_multiply_adds_is_judged_by_its_nodes(graph) -> None:
    with OnnxRuntimeSession(graph, "cpu", {}) as session:
        found = placement_from_session(session._session, "CUDAExecutionProvider", ())
    assert (found.unit, found.count) == ("nodes", 3)
    assert found.share == pytest.approx(1.0)
    proof = prove_precision(Precision.FP32, (LayerType("curve", "Erf", "fp32", 0),), found)
    assert proof.reason.endswith("100.0% of nodes run outside CUDAExecutionProvider, 1% allowed")
    assert not proof.proven


@pytest.mark.parametrize(("share", "proven"), [(0.0, True), (0.01, True), (0.0101, False)])
def test_up_to_one_percent_of_the_multiply_adds_may_run_elsewhere(share, proven) -> None:
    layers = (LayerType("conv", "Conv", "fp16", 100),)
    placement = Placement(
        "CUDAExecutionProvider", 9, 1, share, (PlacedNode("top", "TopK", "CPUExecutionProvider", share),)
    )
    assert prove_precision(Precision.FP16, layers, placement).proven is proven
    wrong = (replace(layers[0], type="fp32"),)
    assert not prove_precision(Precision.FP16, wrong, placement).proven, "the type is judged all the same"
