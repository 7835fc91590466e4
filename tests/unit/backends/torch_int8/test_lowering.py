"""What a Q/DQ graph becomes, and that it still computes the same."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tests.fakes.entries import artifact_info
from tests.fakes.int8_emulation import emulate
from tests.fakes.int8_network import (
    gated_network,
    lower,
    narrow_network,
    quantize,
    sequence_network,
    shuffled_network,
    small_network,
    smooth_network,
    token_network,
    varied_network,
)

from optpipe.backends.torch_int8 import LOWERING, find_stale_lowering, steps
from optpipe.backends.torch_int8.backend import list_executed_layers
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision, prove_precision


def kinds(network):
    return [type(step).__name__ for step in network.steps]


def test_a_residual_network_is_one_step_a_layer():
    network = lower(quantize(small_network()))
    assert kinds(network) == ["Stem", "MaxPool", *["Convolution"] * 4, "MeanPool", "Linear"]
    by_name = {step.name: step for step in network.steps}
    assert by_name["conv2"].added == by_name["down"].output  # the shortcut comes in INT8
    assert by_name["conv3"].added == by_name["conv2"].output  # although the graph adds its value before quantization
    assert by_name["conv3"].half  # nothing quantizes it before the mean
    assert [by_name[name].activation for name in ("conv1", "down", "conv2", "conv3")] == ["relu", "", "relu", "relu"]


@pytest.mark.parametrize(
    "make", [small_network, shuffled_network, token_network, narrow_network, varied_network, sequence_network]
)
def test_it_computes_what_the_graph_computes(make):
    assert measure_snr(quantize(make())) > 40


def measure_snr(graph):
    """dB, of a lowered network to its graph."""
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"image": images})
    found = emulate(lower(graph), {"image": torch.from_numpy(images)})["logits"].numpy()
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


def test_a_split_is_a_view_each_and_batch_normalization_a_scale_and_a_shift():
    by_name = {step.name: step for step in lower(quantize(shuffled_network())).steps}
    views = [(step.output, dict(step.attributes)) for name, step in by_name.items() if name.startswith("split")]
    assert views == [
        ("left", {"axis": 1, "start": 0, "length": 16}),
        ("right", {"axis": 1, "start": 16, "length": 32}),
    ]
    assert [np.shape(each) for each in by_name["norm"].inputs[1:]] == [(64,), (64,)]


def test_linear_layers_over_tokens_take_their_bias_in_and_leave_in_fp16():
    found = [step for step in lower(quantize(token_network())).steps if isinstance(step, steps.Convolution)]
    assert [(step.name, bool(step.bias.any()), step.half, step.activation) for step in found] == [
        ("up", True, True, ""),
        ("down", True, True, "relu"),
        ("mix", False, True, ""),
    ]


def test_widths_of_any_size_are_int8_with_zeros_behind_their_channels():
    network = lower(quantize(narrow_network()))
    by_name = {step.name: step for step in network.steps if isinstance(step, steps.Convolution)}
    widths = {name: (step.weight.shape[0], step.weight.shape[-1]) for name, step in by_name.items()}
    assert widths == {"conv1": (48, 32), "down": (32, 32), "conv2": (32, 48), "conv3": (32, 32), "conv4": (72, 32)}
    assert not by_name["conv1"].weight[40:].any()
    types = {layer.name: layer.type for layer in list_executed_layers(network) if layer.macs}
    assert types.pop("first") == "fp16"
    assert set(types.values()) == {"int8"}


def test_kernels_of_any_shape_and_wide_groups_are_int8():
    network = lower(quantize(varied_network()))
    types = {layer.name: layer.type for layer in list_executed_layers(network) if layer.macs}
    assert types.pop("first") == "fp16"
    assert set(types.values()) == {"int8"}


def test_convolutions_over_a_sequence_are_int8():
    network = lower(quantize(sequence_network()))
    assert [step.name for step in network.steps if isinstance(step, steps.Convolution)] == ["wide", "odd", "last"]


def test_narrow_groups_are_joined_with_zeros_between_them():
    found = {step.name: step for step in lower(quantize(varied_network())).steps if isinstance(step, steps.Convolution)}
    assert {name: (step.groups, step.weight.shape[-1]) for name, step in found.items() if step.groups > 1} == {
        "grouped": (2, 32),  # of 4 with 16 inputs, which do not fill a block
        "odd": (2, 64),  # of 4 with 24 outputs
    }
    assert not found["grouped"].weight[:32, ..., 16:].any()


@pytest.mark.parametrize(
    ("gate", "alpha", "expected"),
    [("HardSigmoid", 1 / 6, "hardsigmoid"), ("HardSigmoid", 0.2, ""), ("Sigmoid", 0, "sigmoid")],
)
def test_a_gate_joins_the_quantization_of_its_product(gate, alpha, expected):
    graph = quantize(gated_network(gate, alpha), keep=("deep",))
    by_name = {step.name: step for step in lower(graph).steps}
    quantized = next(step for step in by_name.values() if isinstance(step, steps.Quantize) and step.gate)
    assert (quantized.gate_activation, quantized.spare) == (expected, 8)
    assert "product" not in by_name
    assert ("gate" in by_name) == (expected == "")
    assert isinstance(by_name["squeeze"], steps.MeanPool)
    assert by_name["squeeze"].spare == 8
    assert (by_name["first"].activation, by_name["first"].half) == ("hardswish", True)
    assert measure_snr(graph) > 40


def test_a_mean_that_a_convolution_reads_keeps_its_pixel():
    means = {step.name: step.keepdims for step in lower(quantize(shuffled_network())).steps if "keepdims" in dir(step)}
    assert means == {"squeeze": True, "mean": False}


def test_the_proof_counts_what_the_steps_execute():
    proof = prove_precision(Precision.INT8, list_executed_layers(lower(quantize(small_network()))))
    macs = {"fp16": 32 * 147 * 256, "int8": 64 * 64 * (288 + 32 + 576 + 576) + 640}
    assert proof.share.macs["int8"] == pytest.approx(macs["int8"] / sum(macs.values()))


def test_a_spared_layer_stays_in_floating_point():
    network = lower(quantize(small_network(), keep=("conv2",)))
    spared = next(step for step in network.steps if step.name == "conv2")
    assert isinstance(spared, steps.Floating)
    layers = {layer.name: layer.type for layer in list_executed_layers(network)}
    assert (layers["conv2"], layers["conv1"]) == ("fp16", "int8")


def test_what_nothing_computes_is_named():
    graph = quantize(small_network())
    next(node for node in graph.graph.node if node.name == "relu3").op_type = "NonZero"
    with pytest.raises(StageError, match="NonZero"):
        lower(graph)


def test_an_artifact_whose_graph_became_other_steps_is_not_run():
    tactics: dict[str, Any] = {"tactics": {}}
    older, current = (
        artifact_info(backend="torch", details={**tactics, **each}) for each in ({}, {"lowering": LOWERING})
    )
    assert find_stale_lowering(older) == "built by an older version of the INT8 lowering; build it again"
    assert find_stale_lowering(current) is None
    assert find_stale_lowering(artifact_info(backend="torch", details={})) is None


@pytest.mark.parametrize(("kind", "expected"), [("SiLU", "silu"), ("HardSwish", "hardswish")])
@pytest.mark.parametrize("quantized", [False, True])
def test_smooth_activations_join_a_layer_that_leaves_in_fp16(kind, expected, quantized):
    graph = quantize(smooth_network(kind), keep=() if quantized else ("second",))
    network = lower(graph)
    first = next(step for step in network.steps if step.name == "wide")
    others = [step.operator for step in network.steps if isinstance(step, steps.Floating)]
    if quantized:  # an INT8 end has no such step
        assert first.activation == ""
        assert {"silu": "Swish", "hardswish": "HardSwish"}[expected] in others
    else:
        assert (first.activation, first.half) == (expected, True)
        assert not {"Swish", "HardSwish", "Sigmoid", "Mul"} & set(others)
    assert measure_snr(graph) > 40


@pytest.mark.parametrize(("kind", "expected"), [("SiLU", "silu"), ("HardSwish", "hardswish")])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_depthwise_layer_takes_in_its_activation_and_its_quantization(kind, expected, quantized):
    graph = quantize(smooth_network(kind, depthwise=True), keep=("deep",) if quantized else ("deep", "second"))
    network = lower(graph)
    deep = next(step for step in network.steps if step.name == "deep")
    assert isinstance(deep, steps.Depthwise)
    assert (deep.activation, deep.half) == (expected, not quantized)
    assert not {"Swish", "HardSwish", "Sigmoid", "Mul"} & {getattr(step, "operator", "") for step in network.steps}
    assert [each.type for each in list_executed_layers(network) if each.name == "deep"] == ["fp16"]
    assert measure_snr(graph) > 40
