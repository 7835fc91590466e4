"""Real worker processes: each planted fault is caught by its reason, and workers that stand by never outlive the pool."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from optpipe.core.load import LoadSpec, Mode, Scenario
from optpipe.core.measurement import InputPool, Measurement, Subject, Validity
from optpipe.measure.measure import measure_load
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.worker.checks import MAX_ROTATED_BATCHES
from optpipe.measure.worker.messages import SessionSpec

FAKES = Path(__file__).parent.parent / "fakes"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=":")
    np.save(
        tmp_path / "x.npy", np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    )

    def measured(fault, load=None, **planted):
        spec = SessionSpec(
            loader="sessions:planted",
            arguments={"milliseconds": 0.5, "fault": fault, **planted},
            inputs={"x": str(tmp_path / "x.npy")},
            tolerance=1e-3,
            streams=(load or LoadSpec(1)).streams,
        )
        quick = load or LoadSpec(
            4, min_seconds=0.3, max_seconds=2.0, warm_up_seconds=0.1, max_warm_up_seconds=1.0
        )
        with WorkerProcess(spec, WorkerPool(tmp_path)) as worker:
            inputs = InputPool("synthetic", 64, 0, 0, "0" * 64)
            blank = Measurement(
                "",
                Subject(fault, "fake", "fp32", "cpu"),
                quick,
                Validity.INVALID,
                (),
                inputs=inputs,
            )
            return measure_load(worker, blank, quick, "m000", tmp_path)[0]

    return measured


def codes(measurement):
    return {reason.code for reason in measurement.reasons}


@pytest.mark.parametrize(("fault", "code"), [
    ("drift", "drift"), ("bimodal", "bimodal"), ("cached", "cached-answer"), ("wrong", "wrong-output"),
    ("stale", "stale-answer"), ("noisy", "dispersion"), ("dies", "died"),
])  # fmt: skip
def test_each_planted_fault_is_caught_by_its_reason(run, fault, code):
    for _ in range(
        3
    ):  # a busy neighbor may hide a slow-down, and is named then; it cannot hide a wrong output
        found = run(fault)
        if code in codes(found):
            break
    hidden = "loaded-host" in codes(found) and fault in ("drift", "bimodal", "cached", "noisy")
    assert code in codes(found) or hidden
    assert found.verdict is Validity.INVALID
    assert all(reason.remedy for reason in found.reasons)


def test_a_sound_runtime_is_measured_without_a_fault_of_its_own(run, tmp_path):
    found = run("none")
    assert not codes(found) & {
        "wrong-output",
        "stale-answer",
        "cached-answer",
        "died",
        "out-of-memory",
    }
    assert found.samples > 50
    assert found.latency_ns.minimum >= 0.5e6
    assert found.output_check.passed
    assert found.output_check.checked == 16
    assert (tmp_path / found.samples_file).is_file()
    assert not list(tmp_path.rglob("*.spool"))


def test_the_time_of_loading_is_a_figure_of_the_process(run):
    found = run("none", loads_in_s=0.2).figures["load_time"]
    assert found.value >= 0.2e9
    assert (str(found.unit), found.distribution) == ("ns", "optpipe")


def test_a_burning_neighbor_is_seen(run):
    import subprocess
    import sys

    neighbors = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        found = run(
            "none",
            LoadSpec(
                4, min_seconds=1.5, max_seconds=3.0, warm_up_seconds=0.1, max_warm_up_seconds=1.0
            ),
        )
    finally:
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()
    assert "loaded-host" in codes(found)


def test_out_of_memory_is_a_row(run):
    found = run("none", LoadSpec(64, min_seconds=0.2), memory_limit=16)
    assert codes(found) == {"out-of-memory"}
    assert found.latency_ns is None


@pytest.mark.parametrize("mode", [Mode.COMPUTE, Mode.END_TO_END])
def test_host_memory_is_that_of_one_input_at_a_time_and_not_of_the_rotation(run, mode):
    large = 50_000
    small, big = (
        run(
            "none",
            LoadSpec(
                size,
                mode=mode,
                percentile=50.0,
                min_seconds=0.1,
                max_seconds=1.0,
                warm_up_seconds=0.1,
            ),
        )
        for size in (1, large)
    )
    assert big.inputs.rotated == MAX_ROTATED_BATCHES
    batch = large * 64 * 4
    assert batch < big.host_peak_bytes - small.host_peak_bytes < MAX_ROTATED_BATCHES / 2 * batch


def test_the_server_scenario_counts_from_when_a_query_was_due(run):
    load = LoadSpec(
        1,
        Scenario.SERVER,
        rate_per_s=3000.0,
        percentile=90.0,
        min_seconds=0.5,
        max_seconds=0.8,
        warm_up_seconds=0.1,
    )
    found = run("none", load)  # it can serve 2000 a second
    assert "falling-behind" in codes(found)
    assert found.latency_ns.maximum > 50e6
    assert 0.5e6 <= found.parts_ns["service"].minimum < found.latency_ns.minimum + 0.5e6


LOAD = LoadSpec(
    1,
    min_seconds=0.1,
    max_seconds=1.0,
    warm_up_seconds=0.05,
    max_warm_up_seconds=0.2,
    cache_probes=0,
)
BLANK = Measurement("", Subject("none", "fake", "fp32", "cpu"), LOAD, Validity.INVALID, ())


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=":")
    np.save(tmp_path / "x.npy", np.ones((8, 4), np.float32))
    return SessionSpec(
        "sessions:planted", {"milliseconds": 0.5, "fault": "none"}, {"x": str(tmp_path / "x.npy")}
    )


def measure(spec, pool, tmp_path, name):
    with WorkerProcess(spec, pool, "fake") as worker:
        found, _ = measure_load(worker, BLANK, LOAD, name, tmp_path)
        return found, worker.ready.pid


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_measurement_has_a_process_of_its_own_and_the_next_ones_stand_by(
    spec, tmp_path, monkeypatch
):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 3)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 4)
        found = [measure(spec, pool, tmp_path, "m0")]
        assert not pool._waiting["fake"]  # of the first nobody knows what it imports
        found.append(measure(spec, pool, tmp_path, "m1"))
        waiting = list(pool._waiting["fake"])
        assert len(waiting) == 2
        assert all(is_running(each.process.pid) for each in waiting)
        numpy = next(
            Path(sys.modules["numpy"].__file__).parent.glob("_core/_multiarray_umath*.so")
        ).name
        assert all(numpy in Path(f"/proc/{each.process.pid}/maps").read_text() for each in waiting)
        found += [measure(spec, pool, tmp_path, name) for name in ("m2", "m3")]
        assert not pool._waiting["fake"]  # no more than were expected
    assert len({pid for _, pid in found}) == 4
    assert all(each.samples for each, _ in found)


def test_none_outlives_the_pool(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 3)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 9)
        measure(spec, pool, tmp_path, "m0")
        measure(spec, pool, tmp_path, "m1")
        left = [each.process.pid for each in pool._waiting["fake"]]
        assert left
    assert not any(is_running(pid) for pid in left)


def test_one_that_dies_while_it_stands_by_is_a_failure_with_its_reason(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("optpipe.measure.process.count_cores", lambda: 2)
    with WorkerPool(tmp_path) as pool:
        pool.expect("fake", 3)
        measure(spec, pool, tmp_path, "m0")
        measure(spec, pool, tmp_path, "m1")
        next(iter(pool._waiting["fake"])).process.kill()
        with WorkerProcess(spec, pool, "fake") as worker:
            found, _ = measure_load(worker, BLANK, LOAD, "m2", tmp_path)
    assert found.reasons[0].code == "out-of-memory"
    assert "signal 9" in found.reasons[0].message


def test_a_pinned_worker_is_pinned_before_it_imports(spec, tmp_path):
    cpu = min(os.sched_getaffinity(0))
    with WorkerPool(tmp_path, (cpu,)) as pool, WorkerProcess(spec, pool, "fake") as worker:
        measure_load(worker, BLANK, LOAD, "m0", tmp_path)
        assert os.sched_getaffinity(worker.ready.pid) == {cpu}
