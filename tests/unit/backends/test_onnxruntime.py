"""What ONNX Runtime makes of a graph, and what optpipe changes so that it computes what the graph says."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from onnx import TensorProto, helper
from tests.fakes.entries import artifact_info
from tests.fakes.graphs import node_of, onnx_model

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnx_layers import layers_from_onnx
from optpipe.backends.onnxruntime import (
    OnnxRuntime,
    may_use_tensor_cores,
    needs_weight_pass,
    protect_convolutions,
    separate_biases,
)
from optpipe.backends.onnxruntime_session import (
    BIAS_FUSION_PASS,
    QDQ_AS_WRITTEN,
    RECORD_ASSIGNMENT,
    OnnxRuntimeSession,
    optimize_graph,
    placement_from_session,
)
from optpipe.backends.registry import find_missing_release
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import StageError
from optpipe.core.precision import LayerType, Placement, Precision, prove_precision
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange

LEVELS = ort.GraphOptimizationLevel


def session_of(model, level=LEVELS.ORT_ENABLE_ALL, target=None, entry=None, left_out=()):
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    if entry is not None:
        options.add_session_config_entry(*entry)
    if target is not None:
        options.optimized_model_filepath = str(target)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(
        source, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(left_out)
    )


def optimized_nodes(model, folder, level=LEVELS.ORT_ENABLE_EXTENDED, **how):
    session_of(model, level, folder / "session.onnx", **how)
    return onnx.load(folder / "session.onnx").graph.node


@pytest.mark.parametrize(
    ("types", "allowed"),
    [
        ("fp16 fp16", True),
        ("bf16", True),
        ("tf32", True),
        ("int8 fp16", True),
        ("fp32", False),
        ("fp16 fp32", False),
    ],
)
def test_tensor_cores_are_allowed_where_no_fp32_product_is_rounded_unasked(types, allowed) -> None:
    products = (
        LayerType(f"conv_{index}", "Conv", kind, 10) for index, kind in enumerate(types.split())
    )
    assert may_use_tensor_cores((LayerType("scale", "Mul", "fp32", 0), *products)) is allowed


# biases as additions


def network(rank, *, bias, shared, constant=True, dtype=np.float16):
    """Two convolutions with a ReLU in between, over `rank` spatial dimensions."""
    generator, second = np.random.default_rng(0), "b1" if shared else "b2"
    shapes = {"w1": (8, 3, *[3] * rank), "w2": (8, 8, *[1] * rank), "b1": (8,), "b2": (8,)}
    biases = dict.fromkeys(("b1", second)) if bias else ()
    stored = ("w1", "w2", *(biases if constant else ()))
    constants = {name: generator.normal(0, 0.3, shapes[name]).astype(dtype) for name in stored}
    kind = TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    inputs = {"x": (kind, ["n", 3, *[5] * rank])} | (
        {} if constant else {name: (kind, [8]) for name in biases}
    )
    nodes = [
        ("Conv", "x w1 b1" if bias else "x w1", "c1"),
        ("Relu", "c1", "r"),
        ("Conv", f"r w2 {second}" if bias else "r w2", "y"),
    ]
    model = onnx_model(
        nodes, inputs, {"y": (kind, ["n", 8, *["side"] * rank])}, opset=20, **constants
    )
    onnx.checker.check_model(model)
    return model


@settings(max_examples=12, deadline=None)
@given(rank=some.integers(1, 3), bias=some.booleans(), shared=some.booleans())
def test_additions_compute_what_the_biases_did(rank, *, bias, shared) -> None:
    before, after = (network(rank, bias=bias, shared=shared) for _ in range(2))
    assert separate_biases(after) == (2 if bias else 0)
    onnx.checker.check_model(after, full_check=True)
    assert separate_biases(after) == 0
    x = np.random.default_rng(1).normal(0, 1, (2, 3, *[5] * rank)).astype(np.float16)
    sessions = (session_of(model, left_out=[BIAS_FUSION_PASS]) for model in (before, after))
    expected, found = (session.run(None, {"x": x})[0] for session in sessions)
    np.testing.assert_allclose(found, expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("left", [{"constant": False}, {"dtype": np.float32}])
def test_biases_that_are_computed_or_in_single_precision_stay(left) -> None:
    model = network(2, bias=True, shared=False, **left)
    as_written = model.SerializeToString()
    assert separate_biases(model) == 0
    assert model.SerializeToString() == as_written


def test_a_constant_that_only_a_branch_reads_stays() -> None:
    model, branch = (
        network(2, bias=True, shared=False),
        helper.make_graph([node_of("Neg", "inner", "z")], "g", [], []),
    )
    model.graph.node.append(
        helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)
    )
    model.graph.initializer.add(name="inner")
    separate_biases(model)
    assert {"w1", "inner"} <= {each.name for each in model.graph.initializer}


# layers that a Q/DQ graph leaves in FP32


@pytest.fixture
def quantized():
    """Three convolutions, the second kept in FP32."""
    rng = np.random.default_rng(0)
    weights = {
        f"w{index}": (rng.standard_normal((16, 16, 3, 3)) / 12).astype(np.float32)
        for index in range(3)
    }
    names, shape = ["x", "a", "b", "y"], ["n", 16, 8, 8]
    nodes = [
        ("Conv", f"{names[i]} w{i} bias", names[i + 1], {"name": f"conv{i}", "pads": [1] * 4})
        for i in range(3)
    ]
    model = onnx_model(
        nodes, {"x": shape}, {"y": shape}, opset=20, **weights, bias=np.zeros(16, np.float32)
    )
    placed = place_qdq(model, "cpu", "conv1".__eq__)
    return qdq_from_onnx(model, placed, dict.fromkeys(placed.tensors, TensorRange(4.0, -4.0, 4.0)))


def test_a_kept_convolution_is_not_quantized_behind_ones_back_and_computes_the_same(
    quantized, tmp_path
) -> None:
    onnx.save(quantized, tmp_path / "graph.onnx")
    optimize_graph(tmp_path / "graph.onnx", tmp_path / "optimized.onnx", "cpu")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    before = Counter(node.op_type for node in optimized_nodes(optimized, tmp_path))
    assert protect_convolutions(optimized) == 1
    after = Counter(node.op_type for node in optimized_nodes(optimized, tmp_path))
    assert after["FusedConv"] == 1
    assert before["QLinearConv"] == after["QLinearConv"] + 1  # what ONNX Runtime would do with it
    x = {"x": np.random.default_rng(1).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    expected = session_of(quantized, LEVELS.ORT_DISABLE_ALL).run(None, x)[0]
    exact = (
        "session.x64quantprecision",
        "1",
    )  # without VNNI, the faster kernels saturate INT16 sums
    found = session_of(optimized, entry=exact).run(None, x)[0]
    assert np.square(found - expected).sum() < 1e-4 * np.square(expected).sum()


def test_biases_that_another_tool_left_in_fp32_are_quantized(quantized, tmp_path) -> None:
    assert not needs_weight_pass(quantized)
    next(node for node in quantized.graph.node if node.name == "conv0").input[2] = "bias"
    assert needs_weight_pass(quantized)
    onnx.save(quantized, tmp_path / "graph.onnx")
    inputs = (InputSpec("x", "float32", *((size, 16, 8, 8) for size in (1, 2, 4))),)
    card = ModelCard("small", "small.onnx", Task.OTHER, inputs)
    built = OnnxRuntime().build(
        BuildRequest(card, Precision.INT8, tmp_path / "graph.onnx", None, "cpu", {}, tmp_path)
    )
    assert [each.op for each in built.layers].count("QLinearConv") == 2


# nodes that a provider leaves to another one


def test_what_another_provider_runs_is_named_with_its_share_and_not_proven(tmp_path) -> None:
    """Convolutions of 3 * 64 * 4 and 4 * 64 * 5 multiply-adds and an activation: all ran on the CPU, also if CUDA was asked for."""
    weights = {"w": np.ones((4, 3, 1, 1), np.float32), "v": np.ones((5, 4, 1, 1), np.float32)}
    nodes = [("Conv", "x w", "first"), ("Erf", "first", "curve"), ("Conv", "curve v", "second")]
    inputs, outputs = {"x": [1, 3, 8, 8]}, {"second": [1, 5, 8, 8]}
    model = onnx_model(nodes, inputs, outputs, path=tmp_path / "model.onnx", **weights)
    layers = layers_from_onnx(model, (InputSpec("x", "float32", *[(1, 3, 8, 8)] * 3),))
    with OnnxRuntimeSession(tmp_path / "model.onnx", "cpu", {}) as own:
        found = own.find_placement(layers)
    assert found == Placement("CPUExecutionProvider", 3, 0, 0.0, ())
    assert prove_precision(Precision.FP32, layers, found).proven
    session = session_of(model, entry=RECORD_ASSIGNMENT)
    found = placement_from_session(session, "CUDAExecutionProvider", layers)
    assert (found.nodes, found.count) == (3, 3)
    assert found.share == pytest.approx(1.0)
    assert {each.name: each.share for each in found.elsewhere} == pytest.approx(
        {"second": 1280 / 2048, "first": 768 / 2048, "curve": 0}
    )
    proof = prove_precision(Precision.FP32, layers, found)
    assert (proof.proven, "MACs run outside CUDAExecutionProvider" in proof.reason) == (False, True)
    by_nodes = placement_from_session(
        session, "CUDAExecutionProvider", ()
    )  # as of a graph without multiply-adds
    assert (by_nodes.unit, by_nodes.count) == ("nodes", 3)
    assert by_nodes.share == pytest.approx(1.0)
    assert not prove_precision(
        Precision.FP32, (LayerType("curve", "Erf", "fp32", 0),), by_nodes
    ).proven
    for share, proven in ((0.01, True), (0.0101, False)):  # one percent of the multiply-adds
        for kind in ("fp16", "fp32"):  # the type is judged all the same
            proof = prove_precision(
                Precision.FP16, (LayerType("c", "Conv", kind, 100),), replace(found, share=share)
            )
            assert proof.proven is (proven and kind == "fp16")


def test_outputs_are_those_of_the_graph_as_written_and_weights_are_dequantized_once(
    tmp_path,
) -> None:
    """A 1x1 convolution of 4 channels with Q/DQ around it, FP16 scales of usual size, and a bias."""
    generator = np.random.default_rng(0)
    constants = {
        "w": generator.integers(-127, 128, (4, 4, 1, 1)).astype(np.int8),
        "ws": np.full(4, 4e-4, np.float16),
        "wz": np.zeros(4, np.int8),
        "s": np.float16(2e-3),
        "z": np.int8(0),
        "b": generator.normal(0, 0.2, 4).astype(np.float16),
    }
    nodes = [
        *(("QuantizeLinear", "x s z", "q"), ("DequantizeLinear", "q s z", "d")),
        *(("DequantizeLinear", "w ws wz", "dw", {"axis": 0}), ("Conv", "d dw b", "c")),
        *(("QuantizeLinear", "c s z", "cq"), ("DequantizeLinear", "cq s z", "y")),
    ]
    shape = ("FLOAT16", ["n", 4, 2, 2])
    model = onnx_model(nodes, {"x": shape}, {"y": shape}, opset=20, **constants)
    x = {"x": np.random.default_rng(1).normal(0, 0.1, (8, 4, 2, 2)).astype(np.float16)}

    def run(level, entry):
        return session_of(model, level, entry=entry).run(None, x)[0].astype(np.float64)

    expected = run(LEVELS.ORT_DISABLE_ALL, QDQ_AS_WRITTEN)
    assert (
        np.abs(run(LEVELS.ORT_ENABLE_ALL, QDQ_AS_WRITTEN) - expected).max() <= 1.01 * 2e-3
    )  # one quantization step
    wrong = np.abs(run(LEVELS.ORT_ENABLE_ALL, None) - expected).max()
    assert wrong > 10 * 2e-3, (
        "ONNX Runtime mended it: are its Q/DQ passes useful now? (onnxruntime_session.py)"
    )
    for entry, count in ((QDQ_AS_WRITTEN, 0), (None, 1)):
        session_of(model, LEVELS.ORT_ENABLE_BASIC, tmp_path / "optimized.onnx", entry)
        written = onnx.load(tmp_path / "optimized.onnx").graph
        constant = {each.name for each in written.initializer}
        assert (
            sum(
                node.op_type == "DequantizeLinear" and node.input[0] in constant
                for node in written.node
            )
            == count
        )


def test_a_type_without_a_kernel_is_said_with_the_way_out(tmp_path) -> None:
    values = ({name: ("BFLOAT16", ["n", 8])} for name in "xy")
    onnx_model([("Sigmoid", "x", "y", {"name": "s"})], *values, path=tmp_path / "bf16.onnx")
    with pytest.raises(
        StageError, match=r"bf16\.onnx: .*Sigmoid\(13\) node with name 's'\n.*float32"
    ):
        OnnxRuntimeSession(tmp_path / "bf16.onnx", "cpu", {})


def test_a_runtime_that_no_triton_release_carries_is_named():
    own = artifact_info(backend="onnxruntime")
    assert "has ONNX Runtime 99.1.0" in str(find_missing_release(own, "99.1.0"))
    assert find_missing_release(own, "1.20.0") is None
