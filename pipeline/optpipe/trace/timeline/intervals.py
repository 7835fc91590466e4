"""Sets of disjoint half-open time intervals in whole nanoseconds: union, difference, intersection, and what they cover.

Everything that splits time (busy and idle, idle by cause, overlap) is made of these, so that shares add up exactly.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TimeArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimeIntervals:
    """Disjoint intervals [start, end) in ascending order; `before` is what the intervals ahead of each one cover."""

    starts: TimeArray
    ends: TimeArray
    before: TimeArray

    @property
    def total_ns(self) -> int:
        """The time that the intervals cover."""
        return int((self.ends - self.starts).sum())


def intervals_from_disjoint(starts: TimeArray, ends: TimeArray) -> TimeIntervals:
    """Intervals that are already disjoint and ascending; empty ones are dropped."""
    kept = ends > starts
    if not kept.all():
        starts, ends = starts[kept], ends[kept]
    lengths = ends - starts
    return TimeIntervals(starts, ends, np.cumsum(lengths) - lengths)


def unite_intervals(starts: TimeArray, ends: TimeArray) -> TimeIntervals:
    """The union of any intervals, in any order."""
    if starts.size == 0:
        return intervals_from_disjoint(starts, ends)
    if (np.diff(starts) < 0).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return intervals_from_disjoint(starts[first], reach[last])


def sum_before(intervals: TimeIntervals, times: TimeArray) -> TimeArray:
    """How much of the intervals lies before each of `times`."""
    if intervals.starts.size == 0:
        return np.zeros_like(times)
    index = np.searchsorted(intervals.starts, times, side="right") - 1
    inside = np.maximum(index, 0)
    part = np.clip(times - intervals.starts[inside], 0, (intervals.ends - intervals.starts)[inside])
    return np.asarray(np.where(index < 0, 0, intervals.before[inside] + part), dtype=np.int64)


def sum_within(intervals: TimeIntervals, starts: TimeArray, ends: TimeArray) -> TimeArray:
    """How much of the intervals lies inside each [start, end)."""
    return sum_before(intervals, ends) - sum_before(intervals, starts)


def complement_intervals(intervals: TimeIntervals, start: int, end: int) -> TimeIntervals:
    """What the intervals leave free of [start, end)."""
    starts = np.concatenate([[start], np.clip(intervals.ends, start, end)]).astype(np.int64)
    ends = np.concatenate([np.clip(intervals.starts, start, end), [end]]).astype(np.int64)
    return intervals_from_disjoint(starts, ends)


def intersect_intervals(one: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    """What lies in both."""
    return _cut_segments(one, other, wanted_in_other=True)


def subtract_intervals(one: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    """What lies in `one` and not in `other`."""
    return _cut_segments(one, other, wanted_in_other=False)


def _cut_segments(one: TimeIntervals, other: TimeIntervals, *, wanted_in_other: bool) -> TimeIntervals:
    """Cuts `one` at the edges of `other` and keeps the pieces inside, or outside, `other`."""
    if one.starts.size == 0 or (other.starts.size == 0 and wanted_in_other):
        nothing = np.zeros(0, dtype=np.int64)
        return intervals_from_disjoint(nothing, nothing)
    if other.starts.size == 0:
        return one
    # A stable sort merges what is in order already; numpy's `unique` takes ten times as long.
    edges = np.sort(np.concatenate([one.starts, one.ends, other.starts, other.ends]), kind="stable")
    starts, ends = edges[:-1], edges[1:]
    kept = (starts < ends) & _holds(one, starts) & (_holds(other, starts) == wanted_in_other)
    return unite_intervals(starts[kept], ends[kept])


def _holds(intervals: TimeIntervals, times: TimeArray) -> npt.NDArray[np.bool_]:
    index = np.searchsorted(intervals.starts, times, side="right") - 1
    return np.asarray((index >= 0) & (intervals.ends[np.maximum(index, 0)] > times))
