"""The trial engine: every timing of optpipe is one of these loops over a callable.

`time_calls` times a callable in a closed loop or at the arrivals of a Poisson process; `warm_up` runs it until it is
steady. Callers keep the samples and decide when there are enough. Compared subjects take turns by `stats.ratio.Order`.
"""

from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from time import perf_counter_ns, sleep
from typing import TypeVar

from optpipe.stats.stability import is_steady

T = TypeVar("T")

WINDOWS_PER_WARM_UP = 6
SPIN_NS = 150_000
"""Sleeping is inexact, so the last part before an arrival is a busy wait."""
POLL_NS = 200_000_000
"""Longest sleep before `is_over` is called again."""
LEAD_NS = 10_000_000
"""From the start of an open loop to the start of its first gap."""


def time_calls(call: Callable[[], T]) -> Iterator[tuple[int, T, int]]:
    """Calls `call` repeatedly; yields each (start in ns, result, end in ns) until its reader stops."""
    while True:
        started = perf_counter_ns()
        answer = call()
        yield started, answer, perf_counter_ns()


def iterate_arrivals(
    rate_per_s: float, seed: int, is_over: Callable[[], bool] = lambda: False
) -> Iterator[int]:
    """Yields the due time of each query of a Poisson process, in ns of the clock, at that time; ends once `is_over`.

    The gaps are drawn from `seed`. A late reader gets a past arrival: its latency counts from then.
    """
    gaps, due = (
        Random(f"arrivals {seed}"),
        perf_counter_ns() + LEAD_NS,
    )  # unlike any other seeded draw
    while True:
        due += round(gaps.expovariate(rate_per_s) * 1e9)
        while (left := due - SPIN_NS - perf_counter_ns()) > 0:
            sleep(min(left, POLL_NS) / 1e9)
            if is_over():
                return
        while perf_counter_ns() < due:
            pass
        yield due


def warm_up(
    call: Callable[[], int],
    seconds: float,
    most_seconds: float,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[bool, float]:
    """Runs `call`, which returns its ns, in windows of equal time until their medians agree or the time is up.

    Returns whether they agree, and the median ns of the last window.
    """
    window_ns, begun = int(max(seconds, 0.05) / WINDOWS_PER_WARM_UP * 1e9), perf_counter_ns()
    medians: list[float] = []
    while not is_over():
        window_began = perf_counter_ns()
        durations: list[int] = []
        while len(durations) < 3 or perf_counter_ns() - window_began < window_ns:
            durations.append(call())
        medians.append(median(durations))
        passed = (perf_counter_ns() - begun) / 1e9
        if passed >= seconds and is_steady(medians):
            return True, medians[-1]
        if passed >= most_seconds:
            break
    return False, medians[-1] if medians else 0.0
