"""The interval of energy over processes: one sensor that reads too low or too high in all of them."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from tests.fakes.measurements import planted
from tests.unit.measure.test_figures import estimate_energy

from optpipe.core.measurement import Subject
from optpipe.core.quantity import Estimate
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement


@pytest.mark.parametrize("error", [-0.05, 0.0, 0.05])
def test_the_interval_holds_the_truth_at_either_end_of_the_sensors_tolerance(error):
    one = planted(Subject("a", "fake", "fp32", "cuda"), 1, 10.0)
    tries = tuple(
        RecordedMeasurement(
            replace(
                one, process=at, energy_j_per_image=Estimate((1 + error) * (1 + 1e-6 * (-1) ** at))
            ),
            "r",
        )
        for at in range(1000)
    )
    found = ProcessGroup(tries).estimate("energy")
    assert found.low <= 1 <= found.high


@pytest.mark.parametrize("error", [-0.05, 0.05])
def test_one_process_allows_for_all_of_the_sensors_tolerance_beside_its_own_scatter(error):
    times_s = np.arange(0, 12.0, 0.2)
    power_w = 400 * (1 + error) * (1 + 0.02 * np.sin(times_s))
    machine = pl.DataFrame(
        {
            "time_ns": (times_s * 1e9).astype(np.int64),
            "gpu_energy_mj": np.cumsum(power_w * 0.2 * 1e3).astype(np.int64),
        }
    )
    found = estimate_energy(machine, images=24_000, seconds=12.0)
    truth = 400 * 12 / 24_000
    assert found.low < truth < found.high
    assert found.high > 1.001 * found.value / 0.95
    assert found.low < 0.999 * found.value / 1.05


def test_a_counter_that_moves_evenly_shows_no_scatter_and_gives_no_interval():
    times_s = np.arange(0, 12.0, 0.25)
    machine = pl.DataFrame(
        {
            "time_ns": (times_s * 1e9).astype(np.int64),
            "gpu_energy_mj": (times_s * 400e3).astype(np.int64),
        }
    )
    found = estimate_energy(machine, images=24_000, seconds=12.0)
    assert found.low is None
    assert "no interval" in found.note
