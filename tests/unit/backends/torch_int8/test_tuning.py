"""A tactic is taken over only by a step that is measured the same in every way."""

from dataclasses import fields, replace

import pytest
from tests.fakes.int8_network import random_convolution, random_int8

from optpipe.backends.torch_int8.steps import Convolution
from optpipe.backends.torch_int8.tuning import sign_step

STEP = random_convolution(0, 32, 48, 3)
VALUES = {"x": random_int8(1, 2, 32, 8, 8), "z": random_int8(2, 2, 48, 8, 8)}
OTHER = {
    "weight": random_convolution(0, 32, 64, 3).weight, "scale": STEP.scale[:32], "bias": STEP.bias[:32], "stride": 2,
    "padding": (0, 1, 0, 1), "activation": "silu", "half": True, "added": "z", "flat": True, "dilation": 2, "groups": 2,
}  # fmt: skip
SAME = {"name": "other", "added_scale": 0.5, "macs": 7}


@pytest.mark.parametrize("name", OTHER)
def test_whatever_changes_how_a_step_runs_asks_for_a_measurement(name):
    assert sign_step(replace(STEP, **{name: OTHER[name]}), VALUES) != sign_step(STEP, VALUES)


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_is_measured_once(name):
    assert sign_step(replace(STEP, **{name: SAME[name]}), VALUES) == sign_step(STEP, VALUES)


def test_every_field_is_one_or_the_other():
    assert {each.name for each in fields(Convolution)} == {*OTHER, *SAME, "given", "output"}
