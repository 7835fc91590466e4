"""What is counted, and what its interval says, of a source that hands out batches in bursts."""

import subprocess
import sys
from time import perf_counter_ns, sleep

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optpipe.measure import trials
from optpipe.preprocess import throughput_worker as measured
from optpipe.preprocess.throughput import (
    FEWEST_WINDOWS,
    compute_images_per_s,
    compute_rate_interval,
    compute_ratio_interval,
)
from optpipe.preprocess.throughput_worker import has_enough_batches, time_batches


class Loader:
    """A clock and a DataLoader: its workers fill a queue while time passes; batches come in the workers' order."""

    def __init__(self, workers, seconds_per_batch, queue_factor=2):
        self.workers, self.seconds, self.factor = workers, seconds_per_batch, queue_factor
        self.now, self.taken = 0.0, 0
        self.ready = [seconds_per_batch * (1 + 0.001 * each) for each in range(workers)]
        self.finished: list[list[float]] = [[] for _ in range(workers)]

    def clock(self):
        self.now += 1e-6
        return int(self.now * 1e9)

    def batch(self):
        worker = self.taken % self.workers
        done = self.finished[worker]
        position = self.taken // self.workers
        while len(done) <= position:
            # a worker goes on with its next batch as soon as its queue has room
            room = self.finished_taken(worker, len(done) - self.factor)
            begun = max(done[-1] if done else 0.0, room)
            done.append(begun + self.seconds * (1 + 0.001 * worker))
        self.now = max(self.now, done[position]) + 1e-4
        self.taken += 1
        self.takes = [*getattr(self, "takes", []), self.now]
        return self.clock()

    def finished_taken(self, worker, position):
        index = position * self.workers + worker
        return self.takes[index] if position >= 0 and index < len(getattr(self, "takes", [])) else 0.0


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_bursts_of_the_workers_do_not_change_the_rate(monkeypatch, workers):
    loader = Loader(workers, 1.0)
    for module in (measured, trials):
        monkeypatch.setattr(module, "perf_counter_ns", loader.clock)
    found = time_batches(loader.batch, 3.0, prefetched=2 * workers + 1, group=workers)
    batches = found.batch_ns
    rate = 64 * len(batches) / (sum(batches) / 1e9)
    assert rate == pytest.approx(64 * workers, rel=0.02)
    assert (found.warm_up_batches % workers, len(batches) % workers) == (0, 0)
    low, high = compute_rate_interval(batches, workers, 64)
    assert low <= rate <= high
    assert high - low < 0.05 * rate


@pytest.mark.slow
def test_what_other_processes_take_of_the_processors_is_seen():
    def batch():
        sleep(0.02)
        return perf_counter_ns()

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            found = time_batches(batch, 0.5, prefetched=1)
        finally:
            other.kill()
    assert found.other_cpu_cores > 0.2


@pytest.mark.slow
def test_the_statistics_are_imported_before_batches_are_timed():
    code = """
import sys, time
from optpipe.preprocess.throughput_worker import time_batches
loaded = []
def batch():
    loaded.append("scipy.special" in sys.modules)
    time.sleep(0.001)
    return time.perf_counter_ns()
time_batches(batch, 0.1, prefetched=1)
assert all(loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_rate_lies_in_its_interval_even_where_windows_are_unequal():
    batch_ns = [1_000_000] * 20 + [6_000_000] * 2 + [1_000_000] * 20 + [3_000_000] * 6
    low, high = compute_rate_interval(batch_ns, 1, 8)
    assert low < 8 * len(batch_ns) / (sum(batch_ns) / 1e9) < high


@given(
    st.lists(st.integers(1, 10**12) | st.integers(10**6, 2 * 10**6), min_size=1, max_size=200),
    st.integers(1, 20),
    st.integers(1, 512),
)
@example([10_000_000] + [1_000_000] * 24, 1, 8)  # the slow first batch counts in both or in neither
@example([3] * 55, 5, 7)  # no spread at all: rounding must not put the rate outside
def test_an_interval_holds_the_rate_beside_it(batch_ns, group, batch_size):
    interval = compute_rate_interval(batch_ns, group, batch_size)
    if interval is not None:
        assert 0 < interval[0] <= compute_images_per_s(batch_ns, batch_size) <= interval[1]


@given(st.lists(st.integers(10**6, 11 * 10**5), min_size=FEWEST_WINDOWS, max_size=200), st.integers(1, 512))
def test_six_even_batches_or_more_have_an_interval(batch_ns, batch_size):
    low, high = compute_rate_interval(batch_ns, 1, batch_size)
    assert high < 1.15 * low


def test_a_burst_and_a_long_wait_say_nothing():
    assert compute_rate_interval([1] * 40 + [10**10], 1, 8) is None
    assert compute_rate_interval([5] * (FEWEST_WINDOWS - 1), 1, 8) is None


def test_a_burst_of_sixteen_workers_is_one_observation():
    burst = [500_000_000] + [100_000] * 15
    assert compute_rate_interval(burst * 4, 16, 64) is None, "64 batches, but four rounds"
    low, high = compute_rate_interval(burst * 6, 16, 64)
    assert high - low < 1e-6 * high
    waits = [each for wait in (1, 1, 9, 1, 12, 1) for each in (wait * 10**8, *[10**5] * 15)]
    assert compute_rate_interval(waits, 16, 64) is None, "so uneven that the upper end would be several times the rate"


positive = st.floats(1.0, 1e6)


@given(positive, positive, st.floats(0.001, 0.5), st.floats(0.001, 0.5))
def test_the_interval_of_a_ratio_mirrors_that_of_its_inverse(one, other, spread, width):
    mine, theirs = (one * (1 - spread), one * (1 + spread)), (other * (1 - width), other * (1 + width))
    low, high = compute_ratio_interval(one, mine, other, theirs)
    assert low < one / other < high
    assert mine[0] / theirs[1] <= low * (1 + 1e-9)
    back = compute_ratio_interval(other, theirs, one, mine)
    assert (1 / back[1], 1 / back[0]) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("batches", "group", "elapsed_s", "is_enough"),
    [
        (24, 1, 3.0, True),
        (24, 1, 2.9, False),
        (20, 1, 3.0, False),
        (16, 16, 6.0, True),
        (8, 16, 6.0, False),
        (3, 1, 6.0, False),
    ],
)
def test_a_slow_configuration_ends_with_fewer_batches(batches, group, elapsed_s, is_enough):
    assert has_enough_batches([1000] * batches, group, elapsed_s, 3.0) is is_enough


def test_an_unsteady_one_is_measured_longer():
    steady, unsteady = [1000, 1001] * 24, [1000] * 24 + [1500] * 24
    assert has_enough_batches(steady, 1, 3.0, 3.0)
    assert not has_enough_batches(unsteady, 1, 3.0, 3.0)
    assert has_enough_batches(unsteady, 1, 6.0, 3.0)
    assert has_enough_batches(unsteady, 1, 3.0, 3.0, patience=1.0)
