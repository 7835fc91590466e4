"""The trial engine on a clock of its own, and races of builds on simulated machines."""

from collections import Counter
from functools import partial
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.measure import trials
from optpipe.measure.race import (
    EARLY_ROUNDS,
    FINAL_ROUNDS,
    MAX_FINALISTS,
    RACE_ROUNDS,
    count_processes,
    race_builds,
)
from optpipe.measure.trials import iterate_arrivals, time_calls, warm_up
from optpipe.stats.ratio import Change, Order, alternate


class SimulatedMachine:
    """Gives each build's planted time, with lognormal noise between processes; no clock is read."""

    def __init__(self, planted, noise=1e-6, seed=0):
        self.planted, self.noise, self.generator = planted, noise, np.random.default_rng(seed)
        self.started = Counter()

    def measure(self, name, sizes):
        self.started[name] += 1
        level = np.exp(self.noise * self.generator.standard_normal())
        return {
            size: level * self.planted[name][size] for size in sizes if size in self.planted[name]
        }


def test_each_batch_size_has_its_own_winner():
    machine = SimulatedMachine({"a": {1: 10.0, 8: 50.0}, "b": {1: 20.0, 8: 30.0}})
    found = race_builds(["a", "b"], [1, 8], machine.measure, 0)
    assert [found[size].winner for size in (1, 8)] == ["a", "b"]
    assert found[1].ratios["b"].value == pytest.approx(2.0, rel=1e-4)
    assert found[8].compute_slowdown("a") == pytest.approx(5 / 3, rel=1e-4)
    assert found[8].ratios["a"].change is Change.SLOWER


def test_the_hopeless_are_started_once_and_the_runner_up_is_compared_in_full():
    machine = SimulatedMachine({"a": {1: 10.0}, "b": {1: 20.0}, "c": {1: 30.0}})
    found = race_builds(["a", "b", "c"], [1], machine.measure, 0)[1]
    assert machine.started == {"a": 1 + EARLY_ROUNDS, "b": 1 + EARLY_ROUNDS, "c": 1}
    assert set(found.ratios) == {"b"}
    assert found.compute_slowdown("c") == pytest.approx(3.0, rel=1e-4)


def test_a_build_that_fails_anywhere_cannot_win_there():
    machine = SimulatedMachine({"a": {8: 1.0}, "b": {1: 20.0, 8: 20.0}})
    found = race_builds(["a", "b"], [1, 8], machine.measure, 0)
    assert found[1].winner == "b"
    assert found[8].winner == "a"
    assert found[1].times["a"].failed
    assert found[1].compute_slowdown("a") is None


def test_nothing_wins_where_all_fail_and_one_build_is_measured_once():
    assert (
        race_builds(["a", "b"], [1], SimulatedMachine({"a": {}, "b": {}}).measure, 0)[1].winner
        is None
    )
    machine = SimulatedMachine({"a": {1: 3.0}})
    assert race_builds(["a"], [1], machine.measure, 0)[1].winner == "a"
    assert machine.started == {"a": 1}


@given(st.lists(st.floats(1.0, 1e3), min_size=1, max_size=9), st.integers(0, 100))
def test_without_noise_the_fastest_wins_in_no_more_processes_than_announced(levels, seed):
    planted = {f"b{index}": {1: level} for index, level in enumerate(levels)}
    machine = SimulatedMachine(planted, noise=0.0)
    found = race_builds(list(planted), [1], machine.measure, seed)[1]
    assert planted[found.winner][1] == pytest.approx(min(levels), rel=1e-6)
    assert machine.started.total() <= count_processes(len(levels))
    assert all(count <= RACE_ROUNDS + FINAL_ROUNDS for count in machine.started.values())
    assert len(found.ratios) <= MAX_FINALISTS - 1


@given(st.integers(0, 1 << 32), st.integers(1, 6), st.integers(1, 30))
def test_every_subject_is_called_once_a_round_and_the_seed_gives_the_order(seed, count, rounds):
    def run() -> tuple[list[int], dict[str, list[int]]]:
        calls: list[int] = []

        def call(at: int) -> int:
            calls.append(at)
            return at

        return calls, alternate({str(at): partial(call, at) for at in range(count)}, rounds, seed)

    calls, found = run()
    assert run() == (calls, found)
    assert all(
        sorted(calls[at : at + count]) == list(range(count)) for at in range(0, len(calls), count)
    )
    assert found == {str(at): [at] * rounds for at in range(count)}
    order = Order(seed)
    assert calls == [each for _ in range(rounds) for each in order.draw(range(count))]


def test_either_of_two_begins_half_of_the_rounds():
    order = Order(0)
    assert 430 < sum(order.draw("ab")[0] == "a" for _ in range(1000)) < 570


class Clock:
    now = 0

    def __call__(self) -> int:
        self.now += 100
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trials, "perf_counter_ns", clock)
    monkeypatch.setattr(trials, "sleep", clock.sleep)
    return clock


def test_calls_are_timed_from_their_beginning_to_their_end(clock):
    found = list(islice(time_calls(lambda: clock.sleep(0.5) or clock.now), 3))
    assert [end - begun for begun, _, end in found] == [500_000_100] * 3
    assert all(begun < inside <= end for begun, inside, end in found)


@pytest.mark.slow
def test_arrivals_are_those_of_a_poisson_process_and_never_early(clock):
    due, seen = [], []
    for each in islice(iterate_arrivals(100.0, 7), 2000):
        due.append(each)
        seen.append(clock.now)
    gaps, drawn = np.diff(due) / 1e9, Random("arrivals 7")
    assert list(np.diff(due)) == [round(drawn.expovariate(100.0) * 1e9) for _ in range(2000)][1:]
    assert np.mean(gaps) == pytest.approx(0.01, rel=0.1)
    assert np.std(gaps) == pytest.approx(0.01, rel=0.1)
    assert all(now >= each for now, each in zip(seen, due, strict=True))
    assert list(iterate_arrivals(0.001, 0, lambda: True)) == []


def test_who_comes_late_gets_the_arrivals_that_are_past(clock):
    arrivals = iterate_arrivals(1000.0, 0)
    next(arrivals)
    clock.sleep(10.0)
    assert next(arrivals) < clock.now - 9_000_000_000


@pytest.mark.parametrize(("level", "steady"), [(lambda _: 1.0, True), (lambda at: 1.02**at, False)])
def test_a_warm_up_ends_when_windows_agree_or_the_time_is_up(clock, level, steady):
    begun, count = clock.now, 0

    def call():
        nonlocal count
        count += 1
        took = round(1e6 * level(count))
        clock.sleep(took / 1e9)
        return took

    assert warm_up(call, 0.3, 2.0)[0] is steady
    assert (clock.now - begun) / 1e9 < (0.5 if steady else 2.5)
