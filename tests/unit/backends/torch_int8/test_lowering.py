"""What a Q/DQ graph becomes, and that it still computes the same."""

from functools import partial
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


@pytest.mark.parametrize(
    ("graph", "keep"),
    [
        *(
            (partial(gated_network, kind, alpha), ("deep",))
            for kind, alpha in (("HardSigmoid", 1 / 6), ("HardSigmoid", 0.2), ("Sigmoid", 0))
        ),
        *((partial(smooth_network, kind), keep) for kind in ("SiLU", "HardSwish") for keep in ((), ("second",))),
        *(
            (partial(smooth_network, kind, depthwise=True), keep)
            for kind in ("SiLU", "HardSwish")
            for keep in (("deep",), ("deep", "second"))
        ),
    ],
)
def test_gates_and_smooth_activations_compute_what_the_graph_computes(graph, keep):
    assert measure_snr(quantize(graph(), keep=keep)) > 40


@pytest.mark.parametrize("make", [narrow_network, varied_network])
def test_layers_of_any_width_and_shape_are_int8(make):
    layers = list_executed_layers(lower(quantize(make())))
    types = {layer.name: layer.type for layer in layers if layer.macs}
    assert types.pop("first") == "fp16"
    assert set(types.values()) == {"int8"}


def measure_snr(graph):
    """dB, of a lowered network to its graph."""
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"image": images})
    found = emulate(lower(graph), {"image": torch.from_numpy(images)})["logits"].numpy()
    return 10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum())


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
