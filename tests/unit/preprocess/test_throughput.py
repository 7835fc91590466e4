"""Rates of preprocessing: windows, intervals, and the search for the fastest configuration."""

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from optpipe.core.events import SilentListener
from optpipe.core.transform import CenterCrop, Decode, Pack, Rescale, Resize, Transform
from optpipe.measure import trials
from optpipe.preprocess import throughput
from optpipe.preprocess import throughput as measured
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.throughput import (
    BatchTimes,
    Throughput,
    ThroughputJob,
    compute_images_per_s,
    compute_rate_interval,
    make_job,
    measure_throughputs,
    merge_repeats,
    record_from_throughputs,
    time_batches,
    tune_preprocessing,
    warn_about_other_load,
)

TRANSFORM = Transform((Decode(), Resize((40,)), CenterCrop(32, 32), Rescale(), Pack()))


def dali(batch_size=32):
    return ThroughputJob((), TRANSFORM, 1.0, plan=DaliPlan(batch_size=batch_size))


def test_the_rate_is_all_images_over_all_time_with_an_interval_around_it():
    batch_ns = tuple(10_000_000 + (index % 7) * 1_000_000 for index in range(120))
    found = Throughput(dali(), (BatchTimes(batch_ns),))
    assert found.images_per_s == pytest.approx(32 * 120 / (sum(batch_ns) / 1e9))
    low, high = found.compute_interval()
    assert low < found.images_per_s < high
    assert found.summarize().batches == 120
    failed = Throughput(dali(), error="out of memory").summarize()
    assert (failed.images_per_s, failed.ci, failed.error) == (None, None, "out of memory")


def test_repetitions_are_put_together_and_widen_the_interval():
    def steady(ms):
        return Throughput(dali(10), (BatchTimes((ms * 1_000_000,) * 24, group=2),))

    both = merge_repeats([steady(10), steady(11), Throughput(dali(10), error="out of memory")])
    assert both.repeated_images_per_s == pytest.approx((1000, 1e4 / 11))
    low, high = both.compute_interval()
    assert low <= 1e4 / 11 < both.images_per_s < 1000 <= high


@pytest.mark.parametrize("rounds", [1, 3, 4, 6])
def test_the_interval_of_the_speedup_is_that_of_its_rounds(rounds):
    def measure(factor):
        # each round of the machine has another speed, which both share but for a little
        times = [round(1e6 * factor * (1 + index % 3)) + index for index in range(rounds)]
        return Throughput(dali(10), tuple(BatchTimes((ns,) * 24) for ns in times))

    found = record_from_throughputs((), measure(20), measure(10))
    assert found.speedup == pytest.approx(2)
    assert (found.speedup_ci is None) == (rounds < 4)
    if found.speedup_ci:
        assert found.speedup_ci == pytest.approx((2, 2), rel=1e-3)


@pytest.mark.slow
def test_what_cannot_be_read_is_an_error_of_its_row_and_the_next_goes_on(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    job = make_job([tmp_path / "1.jpg"], TRANSFORM, DaliPlan(batch_size=1), 0.1)
    for found in measure_throughputs([job, job]):
        assert found.error


def simulated(monkeypatch, rate_of_dali, rate_of_loader):
    def measured(job):
        rate = rate_of_loader(job.loader.workers) if job.loader else rate_of_dali(job.plan)
        if rate is None:
            return Throughput(job, error="out of memory")
        ns = (int(1e9 * job.batch_size / rate),) * 48
        return Throughput(job, (BatchTimes(ns),))

    def throughputs(jobs):
        yield from map(measured, jobs)

    monkeypatch.setattr(throughput, "measure_throughputs", throughputs)


def tuned(plan, cores=16, fixed=frozenset()):
    return tune_preprocessing([], TRANSFORM, plan, cores, 1.0, SilentListener(), fixed)[0]


def test_the_fastest_of_each_kind_is_found_on_a_gpu(monkeypatch):
    def dali(plan):
        if plan.decode == "cpu":
            return 2_000
        rate = 10_000 * plan.hw_decoder_load + (500 if plan.threads == 4 else 0)
        return rate - (0 if plan.prefetch == 2 else 900)

    simulated(monkeypatch, dali, lambda workers: 100 + 50 * workers if workers <= 8 else 450)
    found = tuned(DaliPlan(decode="mixed", device="gpu", batch_size=256))
    assert (found.dali.plan.hw_decoder_load, found.dali.plan.threads, found.dali.plan.prefetch) == (
        1.0,
        4,
        2,
    )
    assert found.dataloader.loader.workers == 8
    assert found.dataloader.loader.batch_size == 64
    assert found.speedup == pytest.approx(10_500 / 500)


def test_what_was_asked_for_is_not_tuned(monkeypatch):
    asked = DaliPlan(decode="mixed", device="gpu", batch_size=256, threads=3)
    simulated(
        monkeypatch, lambda plan: 9000 if plan.decode == "cpu" else 10 * plan.threads, lambda _: 100
    )
    tried = [
        row.plan for row in tuned(asked, fixed=frozenset({"decode", "threads"})).tried if row.plan
    ]
    assert {(each.decode, each.threads) for each in tried} == {("mixed", 3)}


def test_a_configuration_that_fails_is_a_row_and_not_the_end(monkeypatch):
    simulated(
        monkeypatch,
        lambda plan: None if plan.threads == 2 else 900,
        lambda workers: 100 if workers else None,
    )
    found = tuned(DaliPlan(batch_size=8), cores=2)
    assert found.dali.plan.threads == 1
    assert {row.error for row in found.tried} == {None, "out of memory"}


@pytest.mark.parametrize(("others", "warned"), [(None, False), (0.0, False), (64.0, True)])
def test_rates_that_other_work_disturbed_are_said_to_be(others, warned):
    said = SilentListener()
    warn_about_other_load(others, "dali", said)
    assert bool(said.warnings) is warned


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
        return (
            self.takes[index] if position >= 0 and index < len(getattr(self, "takes", [])) else 0.0
        )


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
def test_the_statistics_are_imported_before_batches_are_timed():
    code = """
import sys, time
from optpipe.preprocess.throughput import time_batches
loaded = []
def batch():
    loaded.append("scipy.special" in sys.modules)
    time.sleep(0.001)
    return time.perf_counter_ns()
time_batches(batch, 0.1, prefetched=1)
assert all(loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_a_burst_of_sixteen_workers_is_one_observation():
    burst = [500_000_000] + [100_000] * 15
    assert compute_rate_interval(burst * 4, 16, 64) is None, "64 batches, but four rounds"
    assert compute_rate_interval(burst * 6, 16, 64) is None, "equal rounds show no scatter"
    bursts = [each for at in range(6) for each in (500_000_000 + at, *[100_000] * 15)]
    low, high = compute_rate_interval(bursts, 16, 64)
    assert high - low < 1e-6 * high
    waits = [each for wait in (1, 1, 9, 1, 12, 1) for each in (wait * 10**8, *[10**5] * 15)]
    assert compute_rate_interval(waits, 16, 64) is None, (
        "so uneven that the upper end would be several times the rate"
    )
