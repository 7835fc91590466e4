"""The trial engine: what is timed, when an arrival is due, and when a warm-up ends."""

from functools import partial
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.measure import trials
from optpipe.measure.trials import iterate_arrivals, time_calls, time_calls_for, warm_up
from optpipe.stats.ratio import Order, alternate


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
    assert all(sorted(calls[at : at + count]) == list(range(count)) for at in range(0, len(calls), count))
    assert found == {str(at): [at] * rounds for at in range(count)}
    order = Order(seed)
    assert calls == [each for _ in range(rounds) for each in order.draw(range(count))]


def test_either_of_two_begins_half_of_the_rounds():
    order = Order(0)
    assert 430 < sum(order.draw("ab")[0] == "a" for _ in range(1000)) < 570


class Clock:
    """A clock that moves with calls and sleep."""

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
    assert time_calls_for(lambda: clock.sleep(0.3), 1.0) == [300_000_100] * 4
    assert len(time_calls_for(lambda: clock.sleep(3.0), 1.0)) == 1


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
