"""E4M3: scales are powers of two that bring a range inside, and values round as torch rounds them."""

from math import frexp

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optpipe.quantize.qdq import LARGEST, choose_scale, round_to_e4m3

pytestmark = pytest.mark.hypothesis


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
    expected = (torch.from_numpy(array) / float(scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    assert round_to_e4m3(array, scale).tobytes() == expected.view(torch.uint8).numpy().tobytes()
