"""Q/DQ graphs: where pairs are placed, and their INT8 and FP8 scales."""

from collections import Counter
from math import frexp

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper, numpy_helper
from tests.fakes.graphs import onnx_model

from optpipe.core.errors import BadInputError
from optpipe.quantize.qdq import (
    LARGEST,
    choose_scale,
    place_qdq,
    qdq_from_onnx,
    quantize_activation,
    quantize_weights,
    round_to_e4m3,
    round_up_to_fp16,
)
from optpipe.quantize.ranges import TensorRange

X = np.random.default_rng(7).standard_normal((4, 16, 8, 8)).astype(np.float32)


def run(model, x=X, path=None):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if path:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(path)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ).run(None, {"x": x})[0]


def measured_ranges(model, tensors):
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    names = [name for name in tensors if name != "x"]
    exposed.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = ort.InferenceSession(exposed.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {"x": X, **dict(zip(names, session.run(names, {"x": X}), strict=True))}
    return {
        name: TensorRange(float(np.abs(value).max()), float(value.min()), float(value.max()))
        for name, value in values.items()
    }


def snr_db(reference, other) -> float:
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - other) ** 2)))


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
def test_outputs_stay_near(residual_model, target) -> None:
    placed = place_qdq(residual_model, target)
    quantized = qdq_from_onnx(
        residual_model, placed, measured_ranges(residual_model, placed.tensors)
    )
    onnx.checker.check_model(quantized, full_check=True)
    assert snr_db(run(residual_model), run(quantized)) > 30
    assert len(residual_model.graph.node) == 7  # the original is untouched


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
def test_weights_that_were_quantized_before_give_the_same_graph(residual_model, target):
    placed, known = place_qdq(residual_model, target), {}
    ranges = measured_ranges(residual_model, placed.tensors)
    graphs = [
        qdq_from_onnx(residual_model, placed, ranges, each).SerializeToString()
        for each in (None, known, known)
    ]
    assert known
    assert len(set(graphs)) == 1


def test_the_cpu_provider_fuses_every_layer(residual_model, tmp_path) -> None:
    placed = place_qdq(residual_model, "cpu")
    quantized = qdq_from_onnx(
        residual_model, placed, measured_ranges(residual_model, placed.tensors)
    )
    run(quantized, path=tmp_path / "fused.onnx")
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node)
    assert (
        operators["QLinearConv"] == 3
    )  # the last one writes the graph's output, which stays in floating point
    assert operators["QLinearAdd"] == 1
    assert not operators["Relu"]


def test_tensorrt_has_no_pair_between_convolution_addition_and_relu(residual_model) -> None:
    placed = place_qdq(residual_model, "tensorrt")
    quantized = qdq_from_onnx(
        residual_model, placed, measured_ranges(residual_model, placed.tensors)
    )
    producers = {name: node.op_type for node in quantized.graph.node for name in node.output}
    readers = {
        node.name: [producers.get(name) for name in node.input] for node in quantized.graph.node
    }
    assert readers["add"] == ["Conv", "DequantizeLinear"]
    assert readers["relu2"] == ["Add"]
    zeros = [each for each in quantized.graph.initializer if "zero_point" in each.name]
    assert {each.data_type for each in zeros} == {onnx.TensorProto.INT8}
    assert all(not numpy_helper.to_array(each).any() for each in zeros)


def test_layers_on_a_cpu_read_their_own_copies_of_a_shared_weight() -> None:
    nodes = [("Conv", "x w b", "a"), ("Conv", "a w b", "y")]
    model = onnx_model(
        nodes,
        {"x": ["n", 4, 8, 8]},
        {"y": ["n", 4, 8, 8]},
        w=np.ones((4, 4, 1, 1), np.float32),
        b=np.ones(4, np.float32),
    )
    placed = place_qdq(model, "cpu")
    quantized = qdq_from_onnx(
        model, placed, {name: TensorRange(1.0, -1.0, 1.0) for name in placed.tensors}
    )
    stored = {
        each.name for each in quantized.graph.initializer if each.data_type == onnx.TensorProto.INT8
    }
    assert Counter(
        name for node in quantized.graph.node for name in node.input if name in stored
    ) == dict.fromkeys(stored, 1)
    assert len(stored) == 4  # two weights and their zero points


def test_a_table_of_another_graph_is_refused(residual_model) -> None:
    placed = place_qdq(residual_model, "tensorrt")
    with pytest.raises(BadInputError, match="no range for 'r1' and 1 more"):
        qdq_from_onnx(
            residual_model,
            placed,
            {"x": TensorRange(1.0, -1.0, 1.0), "r2": TensorRange(1.0, -1.0, 1.0)},
        )


def test_older_graphs_are_lifted(residual_model) -> None:
    old = residual_model
    old.opset_import[0].version = 11
    placed = place_qdq(old, "tensorrt")
    quantized = qdq_from_onnx(old, placed, measured_ranges(old, placed.tensors))
    assert quantized.opset_import[0].version == 19
    assert snr_db(run(old), run(quantized)) > 30


@given(hnp.arrays(np.float32, (4, 3, 2), elements=st.floats(-1e8, 1e8, width=32)))
def test_weight_scales_are_never_zero_nan_or_inf_and_steps_fit(values) -> None:
    steps, scale = quantize_weights(values, 0)
    assert np.all(np.isfinite(scale))
    assert np.all(scale > 0)
    assert np.array_equal(scale.astype(np.float16).astype(np.float32), scale)  # FP16 keeps it
    inside = np.abs(values) <= 127 * scale.reshape(4, 1, 1)
    error = np.abs(steps * scale.reshape(4, 1, 1).astype(np.float64) - values)
    assert np.all(
        error[inside] <= 0.5001 * np.broadcast_to(scale.reshape(4, 1, 1), values.shape)[inside]
    )


@given(st.floats(2.0**-24, 65000.0, width=32))
def test_rounding_up_never_clips(scale) -> None:
    rounded = round_up_to_fp16(np.array([scale], np.float32))[0]
    assert scale <= rounded <= scale * 1.001 + 2.0**-24


@given(st.floats(1e-9, 1e9), st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_activation_scales_are_usable_and_reach_both_ends(amax, low, span) -> None:
    high = low + span
    symmetric, zero_point, _ = quantize_activation(TensorRange(amax, low, high), "tensorrt")
    assert 0 < symmetric < np.inf
    assert zero_point == 0
    scale, zero_point, _ = quantize_activation(TensorRange(amax, low, high), "cpu")
    assert 0 < scale <= 2 * amax / 255 * (1 + 1e-6) + np.finfo(np.float32).tiny
    assert 0 <= zero_point <= 255
    ends = max(min(low, 0), -amax), min(max(high, 0), amax)
    assert -zero_point * float(scale) <= ends[0] + 0.51 * float(scale)
    assert (255 - zero_point) * float(scale) >= ends[1] - 0.51 * float(scale)


@given(st.floats(1e-4, 1e9))
def test_a_scale_is_the_smallest_power_of_two_that_brings_a_range_inside(amax):
    scale = float(choose_scale(amax))
    assert frexp(scale)[0] == 0.5
    assert amax <= LARGEST * scale < 2 * amax * (1 + 1e-12)


@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e30])
def test_a_scale_is_never_zero_or_infinite(amax):
    assert 0 < choose_scale(amax) < np.inf


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.integers(-10, 10))
def test_values_round_as_torch_rounds_them(values, exponent):
    scale = np.float32(2.0**exponent)
    array = np.array(values, np.float32)
    expected = (
        (torch.from_numpy(array) / float(scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    )
    assert round_to_e4m3(array, scale).tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_layers_are_kept_as_asked(residual_model) -> None:
    found = place_qdq(residual_model, "tensorrt", keep=lambda name: name == "conv2")
    assert "conv2" not in found.layers
    assert [(each.layer, each.reason) for each in found.skipped] == [
        ("conv2", "kept in floating point by request")
    ]
    assert ("add", 0) in found.edges  # now `down` takes the addition in


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
def test_what_was_zero_in_all_calibration_data_has_no_range(residual_model, target) -> None:
    found = place_qdq(residual_model, target, unseen={"r1", "d"})
    assert [(each.layer, each.reason) for each in found.skipped] == [
        ("conv2", "its input was empty or zero in all calibration data")
    ]
    assert not {"r1", "d"} & {*found.tensors, *found.after}
    assert ("conv3", 0) in found.edges


def test_layers_that_do_not_pay_are_named(onnx_model, random_weight) -> None:
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w3"], ["a"], name="stem"),
        node("Conv", ["a", "wd"], ["b"], name="depthwise", group=32),
        node("Conv", ["b", "wg"], ["c"], name="grouped", group=8),
        node("Conv", ["c", "v"], ["d"], name="dynamic"),
        node("MatMul", ["d", "m"], ["y"], name="product"),
    ]
    weights = {
        "w3": random_weight(32, 3, 1, 1),
        "wd": random_weight(32, 1, 1, 1),
        "wg": random_weight(32, 4, 1, 1),
        "m": random_weight(8, 8),
    }
    graph = onnx_model(nodes, weights, inputs=(("x", ["n", 3, 8, 8]), ("v", [32, 32, 1, 1])))
    found = place_qdq(graph, "tensorrt")
    assert found.layers == ("product",)
    reasons = {each.layer: each.reason for each in found.skipped}
    assert reasons["stem"].startswith("3 input channels")
    assert reasons["depthwise"].startswith("depthwise")
    assert reasons["grouped"].startswith("grouped, 4 channels per group")
    assert reasons["dynamic"] == "its weights are not constant"
    on_cpu = place_qdq(graph, "cpu")  # whose kernels need no 16 channels
    assert on_cpu.layers == ("stem", "depthwise", "grouped", "product")
