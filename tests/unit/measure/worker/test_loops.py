"""When a measurement ends, on a simulated clock."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest

from optpipe.core.measurement import LoadSpec, Scenario
from optpipe.measure.worker import loops
from optpipe.measure.worker.checks import Reservoir
from optpipe.measure.worker.loops import MAX_SAMPLE_FACTOR, PointRun, run_load
from optpipe.measure.worker.spool import Spool, frame_from_spool
from optpipe.stats.percentiles import (
    count_queries_needed,
    count_samples_needed,
    count_transient_queries,
    summary_from_ns,
)

MS = 1_000_000


def measured(
    folder: Path, durations_ns: Iterator[int], *, min_seconds: float = 0.0, max_seconds: float = 1e9
) -> list[int]:
    """The durations that were taken until the load had enough for p99."""
    point = LoadSpec(1, min_seconds=min_seconds, max_seconds=max_seconds)
    taken: list[int] = []
    with Spool(folder / "s") as spool:
        load = PointRun(point, spool, [], 1, Reservoir(1, 0), lambda: None)
        for _ in range(50):  # the warm-up does not count
            load.write(0, 0, 0, 1, 0, 0, 0, 9 * MS, 0, -1, -1, -1)
        now = 0
        while not load.finished(0, now, len(taken)):
            duration = next(durations_ns)
            load.write(1, 0, 0, 1, 0, now, now, now + duration, 0, -1, -1, -1)
            now += duration
            taken.append(duration)
    return taken


def independent() -> Iterator[int]:
    generator = np.random.default_rng(0)
    while True:
        yield int(MS * generator.gamma(20, 0.05))


def waves(length: int) -> Iterator[int]:
    """Independent noise on a level that stays the same for `length` calls."""
    generator, noise = np.random.default_rng(1), independent()
    while True:
        level = generator.normal(5, 1)
        for _ in range(length):
            yield int(MS * level) + next(noise) // 10


def test_independent_samples_are_as_many_as_the_percentile_needs(tmp_path: Path) -> None:
    assert len(measured(tmp_path, independent())) == count_samples_needed(99.0)


@pytest.mark.parametrize("length", [3, 5])
def test_samples_that_follow_each_other_closely_are_more(tmp_path: Path, length: int) -> None:
    taken = measured(tmp_path, waves(length))
    assert count_samples_needed(99.0) < len(taken) <= MAX_SAMPLE_FACTOR * count_samples_needed(99.0)
    assert "p99" in summary_from_ns(np.array(taken)).percentiles


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    taken = measured(tmp_path, waves(400))
    assert len(taken) == MAX_SAMPLE_FACTOR * count_samples_needed(99.0)


def test_the_least_and_the_most_time_hold(tmp_path: Path) -> None:
    assert sum(measured(tmp_path, independent(), min_seconds=3.0)) >= 3000 * MS
    assert sum(measured(tmp_path, waves(50), max_seconds=0.5)) < 520 * MS


class AtOnce:
    """A lane that answers without doing anything."""

    def stage(self, index: int) -> None:
        pass

    def query(self) -> tuple[int, int, int, int, int, int]:
        now = perf_counter_ns()
        return now, perf_counter_ns(), 0, -1, -1, -1

    def outputs(self) -> None:
        pass


def server(tmp_path, monkeypatch, service_ns: float, seed: int = 0):
    """The samples of a server at 5,000 queries/s whose warm-up took `service_ns` per query."""
    path = tmp_path / "s"
    monkeypatch.setattr(loops, "_warm_up", lambda load: setattr(load, "service_ns", service_ns))
    point = LoadSpec(
        1, Scenario.SERVER, rate_per_s=5000.0, min_seconds=0.0, max_seconds=1e9, percentile=50.0, warm_up_seconds=0.0
    )
    with Spool(path) as spool:
        lane: Any = AtOnce()
        run_load(PointRun(point, spool, [lane], 1, Reservoir(1, 0), lambda: None, seed))
    return frame_from_spool(path)


def test_arrivals_are_those_of_the_seed(tmp_path, monkeypatch) -> None:
    scheduled = server(tmp_path, monkeypatch, 0.0, seed=7)["scheduled_ns"].to_numpy()
    random = Random("arrivals 7")
    gaps = np.array([round(random.expovariate(5000.0) * 1e9) for _ in scheduled])
    assert (np.diff(scheduled) == gaps[1:]).all()


@pytest.mark.parametrize("utilization", [0.0, 0.5, 0.8, 1.2])
def test_a_queue_is_measured_from_when_it_has_relaxed_and_the_longer_the_closer_to_saturation(
    tmp_path, monkeypatch, utilization
) -> None:
    phases = server(tmp_path, monkeypatch, utilization * 200_000)["phase"].to_list()
    left_out = count_transient_queries(utilization, 50.0)
    assert phases == [0] * left_out + [1] * count_queries_needed(utilization, 50.0)
    assert count_queries_needed(0.0, 99.0) == 3 * count_samples_needed(99.0)
    assert count_queries_needed(0.8, 99.0) == 75 * count_samples_needed(99.0)
