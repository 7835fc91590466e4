"""When an INT8 build says that it does not pay, on a clock that gives planted times."""

from collections import Counter

import numpy as np
import pytest

from optpipe.backends.torch_int8.tuning import ROUNDS, compare_in_turns, explain_speeds, is_faster, record_speeds


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


@pytest.mark.parametrize(("int8_us", "fp16_us", "pays"), [(100, 180, True), (100, 90, False), (100, 100, False)])
def test_int8_pays_only_where_it_is_shown_to_be_faster_and_the_build_names_the_ratio_otherwise(int8_us, fp16_us, pays):
    found, _ = compared(int8_us, fp16_us)
    assert is_faster(found) is record_speeds({8: found})["8"]["pays"] is pays
    assert found.value == pytest.approx(fp16_us / int8_us, rel=0.01)
    said = list(explain_speeds({8: found}))
    assert len(said) == (not pays)
    assert pays or f"{found} times the speed of fp16 at batch 8" in said[0]


def test_a_gpu_that_slows_down_meanwhile_favors_neither():
    found, clock = compared(100, 150, drift=0.01)
    assert found.ci[0] < 1.5 < found.ci[1]
    assert clock.calls == {int8: ROUNDS + 1, fp16: ROUNDS + 1}
