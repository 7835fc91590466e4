"""The integer arithmetic against FP64, the tactics of every layer, and when INT8 does not pay."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.emulation import compute_step, quantize
from tests.fakes.int8_network import random_convolution, random_stem, upload

from optpipe.backends.torch_layers.tuning import ROUNDS, compare_in_turns, explain_speeds, is_faster
from optpipe.core.precision import Precision
from optpipe.kernels import steps
from optpipe.kernels.tactics import (
    Operands,
    arrange_convolution,
    arrange_stem,
    list_tactics,
)

layers = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "channels": st.sampled_from([16, 32, 48]),
        "outputs": st.sampled_from([16, 32]),
        "kernel": st.sampled_from([1, 3]),
        "stride": st.sampled_from([1, 2]),
        "activation": st.sampled_from(("", "relu", "relu6")),
        "added": st.booleans(),
        "half": st.booleans(),
    }
)


def in_fp64(step, given):
    """The value before rounding, in steps of the output."""
    weight, scale, bias = given.constants
    rows, columns = step.kernel
    weight = (
        weight.view(step.outputs, rows, columns, -1)[..., : step.depth].permute(0, 3, 1, 2).double()
    )
    value = torch.nn.functional.conv2d(
        given.data.double(), weight, stride=step.stride, padding=step.padding[:2]
    )
    scale, bias = (each[: step.outputs].double()[:, None, None] for each in (scale, bias))
    value = value * scale + bias
    if step.added:
        value += given.added.double() * given.added_scale
    value = (
        value.clamp(0, 6)
        if step.activation == "relu6"
        else value.relu()
        if step.activation
        else value
    )
    return value if step.half else value * given.inverse_scale


@given(layers)
def test_a_layer_is_its_real_value_rounded_and_clamped_or_in_fp16(chosen):
    step, operands = random_convolution(size=7, **chosen)
    found, real = compute_step(step, operands), in_fp64(step, operands)
    if step.half:
        assert found.dtype == torch.float16
        np.testing.assert_allclose(found.double(), real, rtol=2**-10, atol=1e-3)
    else:
        assert found.dtype == torch.int8
        assert (found.double() - real.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4


def test_gelu_is_approximated_everywhere():
    values = torch.linspace(-50, 50, 200001)
    assert (
        steps.approximate_gelu(values) - torch.nn.functional.gelu(values.double())
    ).abs().max() < 2.6e-5


def test_ties_go_to_the_even_step_and_the_range_is_symmetric_but_for_one():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0]).half()
    assert quantize(values, 1.0).tolist() == [0, 2, 2, 0, -2, 127, -128]


def test_sums_that_fp32_cannot_hold_are_exact_before_they_are_scaled():
    """2**24 + 1 is no FP32 number: the sum is rounded once, as the GPU's conversion does, and not while it is added up."""
    weight = np.full((16, 1, 1, 2048), 127, np.int8)
    weight[0, 0, 0, 0] = 126
    ones, zeros = np.full(16, 2.0**-18, np.float32), np.zeros(16, np.float32)
    step = steps.Convolution(16, (1, 1), 2048, 16 * 2048)
    operands = Operands(
        torch.full((1, 2048, 1, 1), 127, dtype=torch.int8),
        None,
        upload(arrange_convolution(weight, ones, zeros)),
    )
    assert compute_step(step, operands).flatten()[1] == round(2048 * 127 * 127 / 2**18)


@pytest.mark.parametrize(
    "shape",
    [(7, 3, 2), (3, 1, 2), (5, 2, 2), (4, 1, 2), (1, 0, 2), (11, 2, 4), (7, 3, 4), (6, 0, 4)],
)
@given(channels=st.integers(1, 4))
def test_a_stem_over_cells_is_the_convolution_over_pixels(shape, channels):
    kernel, padding, stride = shape
    step, operands = random_stem(16, channels, kernel, padding, (12, 13), 1, stride=stride)
    rng = np.random.default_rng(kernel)
    weight = rng.integers(-4, 5, (16, channels, kernel, kernel)).astype(np.float16)
    image = torch.from_numpy(rng.integers(-8, 9, (1, channels, 12, 13)).astype(np.float32))
    operands = replace(
        operands, data=image, constants=upload(arrange_stem(step, weight, np.zeros(16, np.float32)))
    )
    expected = torch.nn.functional.conv2d(
        image, torch.from_numpy(weight).float(), stride=stride, padding=padding
    )
    assert torch.equal(compute_step(step, operands).float(), expected)


class Shaped(SimpleNamespace):
    """A tensor of which only the shape is asked for."""

    def numel(self):
        return int(np.prod(self.shape))


@given(
    kernel=st.sampled_from((1, 3, 5)),
    stride=st.sampled_from((1, 2)),
    channels=st.sampled_from((3, 8, 16, 32, 48, 64, 256, 2048)),
    width=st.sampled_from((1, 8, 10, 16, 24, 32, 64, 100, 512)),
    images=st.sampled_from((1, 8, 64, 256)),
    side=st.sampled_from((1, 4, 7, 8, 14, 28, 112)),
    groups=st.sampled_from((1, 2, 3)),
)
def test_every_convolution_has_a_tactic(kernel, stride, channels, width, images, side, groups):
    width *= 16 * groups if groups > 1 else 1
    step = steps.Convolution(
        width,
        (kernel, kernel),
        channels,
        1,
        stride,
        (kernel // 2,) * 4,
        groups=groups,
        activation="relu",
    )
    found = list(list_tactics(step, Shaped(shape=(images, groups * channels, side, side))))
    assert found
    assert groups == 1 or not [each for each in found if width // groups % each.settings["BN"]]
    rounded = max(16, 1 << (width - 1).bit_length())
    assert all(each.settings["BN"] <= rounded for each in found)


class FakeClock:
    """Gives each side its planted time with noise, and drifts with every call; nothing is run."""

    def __init__(self, planted, noise=0.002, drift=0.0):
        self.planted, self.noise, self.drift = planted, noise, drift
        self.generator, self.calls = np.random.default_rng(0), Counter()

    def __call__(self, side):
        self.calls[side] += 1
        slow = 1 + self.drift * self.calls.total()
        return self.planted[side] * slow * np.exp(self.noise * self.generator.standard_normal())


def int8():
    raise AssertionError("the fake clock runs nothing")


def fp16():
    raise AssertionError("the fake clock runs nothing")


def compared(int8_us, fp16_us, **clock):
    times = FakeClock({int8: int8_us, fp16: fp16_us}, **clock)
    return compare_in_turns(int8, fp16, times), times


@pytest.mark.parametrize(
    ("int8_us", "fp16_us", "pays"), [(100, 180, True), (100, 90, False), (100, 100, False)]
)
def test_int8_pays_only_where_it_is_shown_to_be_faster_and_the_build_names_the_ratio_otherwise(
    int8_us, fp16_us, pays
):
    found, _ = compared(int8_us, fp16_us)
    assert is_faster(found) is pays
    assert found.value == pytest.approx(fp16_us / int8_us, rel=0.01)
    said = list(
        explain_speeds(
            {8: found}, Precision.INT8, {"8": {"fp16_depthwise": 3.0, "wgmma_product": 1.0}}
        )
    )
    assert len(said) == 2 * (not pays)
    assert pays or f"{found} times the speed of fp16 at batch 8" in said[0]
    assert pays or "fp16_depthwise 75%" in said[1]


def test_a_gpu_that_slows_down_meanwhile_favors_neither():
    found, clock = compared(100, 150, drift=0.01)
    assert found.ci[0] < 1.5 < found.ci[1]
    assert clock.calls == {int8: ROUNDS + 1, fp16: ROUNDS + 1}
