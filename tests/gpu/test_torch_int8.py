"""The INT8 kernels on a real GPU: every tactic gives the emulation's numbers, and so does a whole network in a CUDA graph."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fakes.int8_emulation import emulate, emulate_step
from tests.fakes.int8_network import (
    gated_network,
    lower,
    narrow_network,
    quantize,
    random_convolution,
    random_depthwise,
    random_half,
    random_int8,
    shuffled_network,
    small_network,
    token_network,
    varied_network,
)

from optpipe.backends.base import BuildRequest
from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.program import Program
from optpipe.backends.torch_int8.tactics import list_tactics
from optpipe.backends.torch_int8.tuning import compare_programs, tune_steps
from optpipe.backends.torch_session import CudaGraphBinding
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision
from optpipe.workspace.environment import list_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU or no driver on this machine")]


@pytest.mark.parametrize("images", [1, 64])
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "stride", "size", "end"),
    [
        (64, 256, 1, 1, 28, {"added": True}),
        (256, 64, 1, 1, 14, {"half": True}),
        (48, 80, 3, 1, 14, {"added": True, "half": True}),
        (128, 128, 3, 2, 28, {}),
        (64, 128, 1, 2, 7, {"activation": ""}),
    ],
)
def test_every_tactic_gives_the_emulation_s_numbers(images, channels, outputs, kernel, stride, size, end):
    step = random_convolution(0, channels, outputs, kernel, stride, **end)
    out = (size - 1) // stride + 1
    values = {"x": random_int8(1, images, channels, size, size), "z": random_int8(2, images, outputs, out, out)}
    expected = emulate_step(step, values)
    program = Program(steps.Network(("x",), ("y",), (step,)), {})
    on_gpu = {name: value.cuda() for name, value in values.items()}
    for tactic in list_tactics(step, on_gpu["x"]):
        found = program.launch(step, on_gpu, tactic).cpu()
        assert torch.equal(found, expected), tactic


@pytest.mark.parametrize(
    ("activation", "half", "spare"), [("", True, 0), ("silu", True, 0), ("hardswish", False, 8), ("relu", False, 0)]
)
@pytest.mark.parametrize(
    ("kernel", "stride", "channels", "size"), [(3, 1, 96, 28), (3, 2, 40, 15), (5, 1, 480, 14), (7, 1, 96, 28)]
)
def test_depthwise_kernels_give_the_emulation_s_numbers(kernel, stride, channels, size, activation, half, spare):
    step = random_depthwise(0, channels, kernel, stride, activation, half, spare)
    values = {"x": random_half(1, 8, channels, size, size)}
    expected = emulate_step(step, values).float()
    program = Program(steps.Network(("x",), ("y",), (step,)), {})
    on_gpu = {"x": values["x"].cuda()}
    for tactic in list_tactics(step, on_gpu["x"]):
        found = program.launch(step, on_gpu, tactic).cpu().float()
        near = 2e-2 if half else 1.0
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=near)


@pytest.mark.parametrize("activation", ["silu", "hardswish"])
@pytest.mark.parametrize("images", [1, 64])
def test_smooth_activations_are_the_emulation_s_to_the_rounding_of_fp16(images, activation):
    step = random_convolution(0, 32, 96, 1, 1, activation=activation, half=True)
    step = replace(step, scale=step.scale / 20, bias=step.bias / 20)
    values = {"x": random_int8(1, images, 32, 28, 28)}
    expected = emulate_step(step, values).float()
    program = Program(steps.Network(("x",), ("y",), (step,)), {})
    on_gpu = {name: value.cuda() for name, value in values.items()}
    tactics = list(list_tactics(step, on_gpu["x"]))
    assert tactics
    for tactic in tactics:
        torch.testing.assert_close(program.launch(step, on_gpu, tactic).cpu().float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "channels", "outputs", "end"),
    [
        ((1, 3), 64, 48, {"padding": (0, 1, 0, 1)}),
        ((3, 1), 32, 64, {"padding": (1, 0, 1, 0)}),
        ((3, 3), 32, 32, {"dilation": 2, "padding": (2, 2, 2, 2)}),
        ((3, 3), 64, 32, {"stride": 2, "padding": (0, 0, 1, 1)}),
        ((3, 3), 32, 128, {"groups": 4}),
        ((3, 3), 48, 96, {"groups": 2}),
        ((3, 3), 32, 24, {"half": True}),
        ((1, 1), 64, 48, {"flat": True, "padding": (0, 0, 0, 0)}),
    ],
)
def test_kernels_of_any_shape_give_the_emulation_s_numbers(kernel, channels, outputs, end):
    step = random_convolution(0, channels, outputs, 3)
    step = replace(step, weight=step.weight[:, : kernel[0], : kernel[1]].copy(), **end)
    given = random_int8(1, 8, channels * step.groups, 14, 14)
    given = given.permute(0, 2, 3, 1).contiguous() if step.flat else given
    expected = emulate_step(step, {"x": given})
    program, on_gpu = Program(steps.Network(("x",), ("y",), (step,)), {}), {"x": given.cuda()}
    for tactic in list_tactics(step, on_gpu["x"]):
        assert torch.equal(program.launch(step, on_gpu, tactic).cpu(), expected), tactic


def list_first_and_pooled_steps():
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((16, 3, 3, 3)).astype(np.float16), rng.standard_normal(16).astype(np.float32)
    images = torch.from_numpy(rng.standard_normal((8, 3, 33, 32)).astype(np.float32))
    for activation, half in (("relu", False), ("hardswish", True), ("silu", False)):
        yield steps.Stem("s", "x", "y", weight, bias, 1, activation, half, 1.0 if half else 9.0), {"x": images}
    for channels, spare in ((72, 8), (64, 0)):
        values = {"x": random_half(1, 8, channels, 14, 15), "z": random_half(2, 8, channels, 1, 1)}
        yield steps.MeanPool("m", "x", "y", 90.0, keepdims=True, spare=spare), values
        for activation in steps.GATES:
            yield steps.Quantize("q", "x", "y", 30.0, "z", activation, spare), values


@pytest.mark.parametrize(("step", "values"), list_first_and_pooled_steps())
def test_stems_means_and_gates_give_the_emulation_s_numbers_to_their_rounding(step, values):
    expected = emulate_step(step, values)
    program = Program(steps.Network(("x",), ("y",), (step,)), {})
    on_gpu = {name: value.cuda() for name, value in values.items()}
    for tactic in list_tactics(step, on_gpu["x"]):
        found = program.launch(step, on_gpu, tactic).cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), tactic
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=1e-2, atol=1.0 if found.dtype == torch.int8 else 1e-2
        )


@pytest.mark.parametrize(
    "make", [small_network, shuffled_network, token_network, narrow_network, varied_network, gated_network]
)
def test_a_network_is_tuned_and_gives_the_emulation_s_outputs_from_a_cuda_graph(make):
    network = lower(quantize(make()))
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    choices = tune_steps(network, (images.cuda(),))
    refused = [each for choice in choices for each in choice.refused]
    assert [each for each in refused if make is small_network or "other numbers" in each] == []
    program = Program(network, {8: {choice.step: choice.tactic for choice in choices}})

    class Bound:
        def __init__(self):
            self.inputs, self.outputs = {"image": images.cuda()}, {}

        def launch(self):
            self.outputs = {"logits": program(self.inputs["image"])[0]}

    replayed = CudaGraphBinding(Bound())
    replayed.launch()
    found, expected = replayed.outputs["logits"].cpu(), emulate(network, {"image": images})["logits"]
    noise = (found - expected).square().sum() / expected.square().sum()
    assert noise < (1e-4 if make is small_network else 1e-3)  # what is in FP16 may round a few values the other way


def test_the_whole_network_is_compared_with_fp16_in_turns():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)
    ).eval()
    network = lower(quantize(small_network()))
    given = InputSpec("image", "float32", (1, 3, 32, 32), (8, 3, 32, 32), (64, 3, 32, 32), batch=0)
    card = ModelCard("small", "small", Task.OTHER, (given,))
    request = BuildRequest(card, Precision.INT8, Path(), lambda: module, "cuda", {}, Path())
    inputs = {size: (torch.randn(size, 3, 32, 32, device="cuda"),) for size in (1, 8)}
    found = compare_programs(request, Program(network, {}), inputs)
    assert [each.batch_size for each in found] == [1, 8]
    assert all(0 < each.speed.ci[0] <= each.speed.value <= each.speed.ci[1] for each in found)
    assert all(each.pays == (each.speed.ci[0] > 1) for each in found)
    assert compare_programs(replace(request, module=None), Program(network, {}), inputs) == ()
