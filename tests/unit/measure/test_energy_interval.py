"""The interval of energy over processes: one sensor that reads too low or too high in all of them."""

from dataclasses import replace

import pytest
from tests.fakes.measurements import planted

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
