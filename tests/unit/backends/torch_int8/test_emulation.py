"""The integer arithmetic: what a step gives against the same in FP64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.int8_emulation import emulate_step
from tests.fakes.int8_network import random_convolution, random_int8

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.tactics import arrange_stem_weight, count_stem_cells

layers = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "channels": st.sampled_from([16, 32, 48]),
        "outputs": st.sampled_from([16, 32]),
        "kernel": st.sampled_from([1, 3]),
        "stride": st.sampled_from([1, 2]),
        "activation": st.sampled_from(("", "relu")),
        "added": st.booleans(),
    }
)


def in_fp64(step, values):
    """The value before rounding, in steps of the output."""
    weight = torch.from_numpy(step.weight).permute(0, 3, 1, 2).double()
    total = torch.nn.functional.conv2d(values["x"].double(), weight, stride=step.stride, padding=step.padding[:2])
    value = total * torch.from_numpy(step.scale).double()[:, None, None]
    value += torch.from_numpy(step.bias).double()[:, None, None]
    if step.added:
        value += values["z"].double() * step.added_scale
    return value.relu() if step.activation else value


@given(layers)
def test_a_layer_is_its_real_value_rounded_and_clamped(chosen):
    step = random_convolution(**chosen)
    values = {"x": random_int8(1, 2, chosen["channels"], 7, 7)}
    size = (7 - 1) // chosen["stride"] + 1
    values["z"] = random_int8(2, 2, chosen["outputs"], size, size)
    found, real = emulate_step(step, values), in_fp64(step, values)
    assert found.dtype == torch.int8
    assert (found.double() - real.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4


@given(st.integers(0, 1000))
def test_half_outputs_are_the_value_in_fp16(seed):
    step = random_convolution(seed, half=True)
    values = {"x": random_int8(seed, 1, 32, 5, 5)}
    found, real = emulate_step(step, values), in_fp64(step, values)
    assert found.dtype == torch.float16
    np.testing.assert_allclose(found.double(), real, rtol=2**-10, atol=1e-3)


def test_ties_go_to_the_even_step_and_the_range_is_symmetric_but_for_one():
    step = steps.Quantize("q", "x", "y", inverse_scale=1.0)
    values = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0]]).half()
    assert emulate_step(step, {"x": values}).tolist() == [[0, 2, 2, 0, -2, 127, -128]]


def test_sums_that_fp32_cannot_hold_are_exact_before_they_are_scaled():
    """2**24 + 1 is no FP32 number: the sum is rounded once, as the GPU's conversion does, and not while it is added up."""
    weight = np.full((16, 1, 1, 2048), 127, np.int8)
    weight[0, 0, 0, 0] = 126
    ones, zeros = np.full(16, 2.0**-18, np.float32), np.zeros(16, np.float32)
    step = steps.Convolution("layer", "x", "y", weight, ones, zeros, 1, (0, 0, 0, 0), activation="", half=False)
    given_ = torch.full((1, 2048, 1, 1), 127, dtype=torch.int8)
    total = 2048 * 127 * 127
    assert emulate_step(step, {"x": given_}).flatten()[1] == round(total / 2**18)


@given(st.sampled_from([(7, 3), (3, 1), (5, 2), (4, 1), (1, 0)]), st.integers(1, 4))
def test_a_stem_over_cells_is_the_convolution_over_pixels(shape, channels):
    kernel, padding = shape
    rng = np.random.default_rng(kernel)
    weight = rng.integers(-4, 5, (16, channels, kernel, kernel)).astype(np.float16)
    step = steps.Stem("stem", "x", "y", weight, np.zeros(16, np.float32), padding, "", False, 1.0)
    image = torch.from_numpy(rng.integers(-8, 9, (1, channels, 12, 12)).astype(np.float32))
    spanned, lead = count_stem_cells(kernel, padding)
    size = (12 + 2 * padding - kernel) // 2 + 1
    wide = torch.zeros(1, 4, *(2 * [2 * (size + spanned - 1)]))
    shift = padding + lead
    kept = min(12, wide.shape[-1] - shift)
    wide[:, :channels, shift : shift + kept, shift : shift + kept] = image[:, :, :kept, :kept]
    rows = size + spanned - 1
    cells = wide.reshape(1, 4, rows, 2, rows, 2).permute(0, 3, 5, 1, 2, 4).reshape(1, 16, rows, rows)
    arranged = torch.from_numpy(arrange_stem_weight(step).astype(np.float32)).reshape(16, spanned, spanned, 16)
    found = torch.nn.functional.conv2d(cells, arranged.permute(0, 3, 1, 2))
    expected = torch.nn.functional.conv2d(image, torch.from_numpy(weight).float(), stride=2, padding=padding)
    assert torch.equal(found, expected)
