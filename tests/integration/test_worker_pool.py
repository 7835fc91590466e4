"""Workers that stand by, in real processes: what they import, that they wait, that none outlives the pool."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from optpipe.core.measurement import LoadSpec, Measurement, Subject, Validity
from optpipe.measure.measure import measure_load
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.worker.plan import SessionPlan

pytestmark = pytest.mark.slow
FAKES = Path(__file__).parent.parent / "fakes"
LOAD = LoadSpec(1, min_seconds=0.1, max_seconds=1.0, warm_up_seconds=0.05, max_warm_up_seconds=0.2, cache_probes=0)
BLANK = Measurement("", Subject("none", "fake", "fp32", "cpu"), LOAD, Validity.INVALID, ())


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=":")
    np.save(tmp_path / "x.npy", np.ones((8, 4), np.float32))
    return SessionPlan("sessions:planted", {"milliseconds": 0.5, "fault": "none"}, {"x": str(tmp_path / "x.npy")})


def measure(plan, pool, tmp_path, name):
    with WorkerProcess(plan, pool, "fake") as worker:
        found, _ = measure_load(worker, BLANK, LOAD, name, tmp_path)
        return found, worker.ready.pid


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_measurement_has_a_process_of_its_own_and_the_next_ones_stand_by(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 3)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 4)
        found = [measure(plan, pool, tmp_path, "m0")]
        assert list(pool.standing_by("fake")) == []  # of the first nobody knows what it imports
        found.append(measure(plan, pool, tmp_path, "m1"))
        waiting = list(pool.standing_by("fake"))
        assert len(waiting) == 2
        assert all(is_running(each.process.pid) for each in waiting)
        numpy = next(Path(sys.modules["numpy"].__file__).parent.glob("_core/_multiarray_umath*.so")).name
        assert all(numpy in Path(f"/proc/{each.process.pid}/maps").read_text() for each in waiting)
        found += [measure(plan, pool, tmp_path, name) for name in ("m2", "m3")]
        assert list(pool.standing_by("fake")) == []  # no more than were expected
    assert len({pid for _, pid in found}) == 4
    assert all(each.samples for each, _ in found)


def test_none_outlives_the_pool(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 3)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 9)
        measure(plan, pool, tmp_path, "m0")
        measure(plan, pool, tmp_path, "m1")
        left = [each.process.pid for each in pool.standing_by("fake")]
        assert left
    assert not any(is_running(pid) for pid in left)


def test_one_that_dies_while_it_stands_by_is_a_failure_with_its_reason(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 2)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 3)
        measure(plan, pool, tmp_path, "m0")
        measure(plan, pool, tmp_path, "m1")
        next(iter(pool.standing_by("fake"))).process.kill()
        with WorkerProcess(plan, pool, "fake") as worker:
            found, _ = measure_load(worker, BLANK, LOAD, "m2", tmp_path)
    assert found.reasons[0].code == "out-of-memory"
    assert "signal 9" in found.reasons[0].message


def test_a_pinned_worker_is_pinned_before_it_imports(plan, tmp_path):
    cpu = min(os.sched_getaffinity(0))
    with WorkerPool(tmp_path, (cpu,)) as pool, WorkerProcess(plan, pool, "fake") as worker:
        measure_load(worker, BLANK, LOAD, "m0", tmp_path)
        assert os.sched_getaffinity(worker.ready.pid) == {cpu}
