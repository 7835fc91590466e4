import numpy as np
import polars as pl
import pytest

from optpipe.core.estimate import Estimate
from optpipe.measure.figures import estimate_energy_per_image


def counter(watts, seconds, step_s=0.2):
    times = np.arange(0, seconds, step_s)
    return pl.DataFrame(
        {"time_ns": (times * 1e9).astype(np.int64), "gpu_energy_mj": (times * watts * 1e3).astype(np.int64)}
    )


def test_joules_per_image_are_mean_power_times_the_time_per_image():
    found = estimate_energy_per_image(counter(400.0, 12.0), images=24_000, seconds=12.0)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(400 * 12 / 24_000, rel=1e-3)
    assert found.low < found.value < found.high
    assert "approximate" in found.note


@pytest.mark.parametrize("frame", [counter(400.0, 3.0), pl.DataFrame({"time_ns": [1, 2]}), counter(400, 12).clear()])
def test_a_short_window_or_no_counter_says_why(frame):
    assert isinstance(estimate_energy_per_image(frame, images=10, seconds=3.0), str)
