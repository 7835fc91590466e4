"""The scatter between and inside processes: a sensor's error is none, and a process without an interval shows none."""

from dataclasses import replace

import pytest
from tests.fakes.measurements import planted

from optpipe.core.measurement import Subject
from optpipe.core.quantity import Estimate
from optpipe.measure.groups import ProcessGroup, RecordedMeasurement, summarize_group


def scatter_of(figures):
    one = planted(Subject("a", "fake", "fp32", "cuda"), 1, 10.0)
    tries = tuple(
        RecordedMeasurement(replace(one, process=at, energy_j_per_image=figure), "r")
        for at, figure in enumerate(figures)
    )
    found = summarize_group(ProcessGroup(tries)).figures["energy"]
    return found.between, found.inside


def test_the_tolerance_of_the_sensor_is_no_scatter():
    values = [0.97, 1.0, 1.03, 0.98, 1.02]
    between, inside = scatter_of(
        [Estimate(each, 0.999 * each / 1.05, 1.001 * each / 0.95) for each in values]
    )
    assert between == pytest.approx(0.0255, rel=0.05)
    assert inside < 0.001


def test_a_process_without_an_interval_shows_no_scatter():
    assert scatter_of([Estimate(1.0), *(Estimate(1.0, 0.9, 1.1),) * 4]) == (None, None)
