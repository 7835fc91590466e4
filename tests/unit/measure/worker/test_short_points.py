"""Short points that follow each other in one worker: what nobody times is done for the first alone."""

import gc
import io
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from tests.fakes import sessions

from optpipe.core.measurement import LoadSpec
from optpipe.measure.worker.__main__ import Worker
from optpipe.measure.worker.plan import Point, SessionPlan


class Counted(sessions.PlantedSession):
    untimed = 0

    def run(self, inputs):
        Counted.untimed += 1
        return super().run(inputs)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """`measure(load)`: the report, and how many calls were made that nobody timed."""
    monkeypatch.setattr("optpipe.measure.worker.__main__.session_from_loader", lambda *_: Counted(0.1, "none"))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((40, 64)).astype("float32"))
    with ExitStack() as stack:
        worker = Worker(SessionPlan("", {}, {"x": str(tmp_path / "x.npy")}), stack)

        def run(load):
            Counted.untimed = 0
            return worker.measured(Point("short", str(tmp_path / "short.spool"), load), io.StringIO()), Counted.untimed

        yield run
    gc.unfreeze()


SHORT = LoadSpec(4, min_seconds=0.002, max_seconds=0.002, warm_up_seconds=0.0, max_warm_up_seconds=0.0, cache_probes=0)


def test_a_short_point_goes_on_with_the_buffers_of_the_one_before_and_its_outputs_are_checked(measure):
    report, untimed = measure(replace(SHORT, max_warm_up_seconds=0.01))
    assert untimed == 16, "eight inputs, to know their outputs and to bind them"
    for _ in range(3):
        report, untimed = measure(SHORT)
        assert (untimed, report.rotated) == (0, 8)
        assert report.output_check.checked > 0
        assert report.output_check.passed


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"max_warm_up_seconds": 0.01}])
def test_another_load_or_one_that_warms_up_begins_anew(measure, change):
    measure(SHORT)
    assert measure(replace(SHORT, **change))[1] == 16


def test_inputs_that_a_probe_of_the_cache_overwrote_are_not_used_again(measure):
    measure(replace(SHORT, cache_probes=4))
    assert measure(SHORT)[1] == 16
