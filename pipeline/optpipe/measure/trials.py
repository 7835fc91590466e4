"""The trial engine: every timing of optpipe is one of these loops over a callable.

`time_calls` times a callable call after call, in a closed loop or at the arrivals of a Poisson process; `warm_up` runs it until it is
steady. Whoever calls them keeps the samples and decides when there are enough. Subjects that are compared take turns by
`stats.ratio.Order`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from statistics import median
from time import perf_counter_ns, sleep
from typing import TypeVar

from optpipe.stats.stability import is_steady

T = TypeVar("T")

WINDOWS_PER_WARM_UP = 6
SPIN_NS = 150_000
"""Sleeping is not exact; the last part before an arrival is waited for by reading the clock."""
POLL_NS = 200_000_000
"""Longest sleep before `is_over` is asked again."""
LEAD_NS = 10_000_000
"""From the start of an open loop to the time that its first gap counts from."""


def time_calls(call: Callable[[], T]) -> Iterator[tuple[int, T, int]]:
    """Calls `call` again and again; yields the start in ns, what it returned, and the end in ns of each. Ends with its reader."""
    while True:
        started = perf_counter_ns()
        found = call()
        yield started, found, perf_counter_ns()


def time_call(call: Callable[[], object], due_ns: int | None = None) -> int:
    """What one call took in ns; where it was due earlier, since then."""
    started = perf_counter_ns() if due_ns is None else due_ns
    call()
    return perf_counter_ns() - started


def time_calls_for(call: Callable[[], object], seconds: float) -> list[int]:
    """What each call took, in ns, of those that begin within `seconds`; at least one."""
    calls = time_calls(call)
    first, _, ended = next(calls)
    more = takewhile(lambda each: each[0] - first < seconds * 1e9, calls)
    return [ended - first, *(end - started for started, _, end in more)]


def iterate_arrivals(rate_per_s: float, seed: int, is_over: Callable[[], bool] = lambda: False) -> Iterator[int]:
    """When each query of a Poisson process is due, in ns of the clock, yielded at that time; ends where `is_over` says so.

    The gaps are drawn from `seed`. A reader that comes back late gets an arrival that is past: its latency counts from then.
    """
    gaps, due = Random(f"arrivals {seed}"), perf_counter_ns() + LEAD_NS  # no other draw follows the same numbers
    while True:
        due += round(gaps.expovariate(rate_per_s) * 1e9)
        while (left := due - SPIN_NS - perf_counter_ns()) > 0:
            sleep(min(left, POLL_NS) / 1e9)
            if is_over():
                return
        while perf_counter_ns() < due:
            pass
        yield due


@dataclass(frozen=True, slots=True)
class WarmUp:
    steady: bool
    call_ns: float
    """Median of the last window."""


def warm_up(
    call: Callable[[], int], seconds: float, most_seconds: float, is_over: Callable[[], bool] = lambda: False
) -> WarmUp:
    """Runs `call`, which returns what it took in ns, in windows of equal time until their medians agree or the time is up."""
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
            return WarmUp(True, medians[-1])
        if passed >= most_seconds:
            break
    return WarmUp(False, medians[-1] if medians else 0.0)
