"""One timeline of the GPU, with the cause of all time in which no kernel runs.

Busy is the time in which at least one kernel runs. All other time is idle and has exactly one cause:

- `copy`: only copies or memsets run.
- `synchronization`: nothing runs, and the thread that launches the next operation is in a call that waits for the GPU.
- `host_wait`: nothing runs, because the host has not launched the next operation yet.
- `kernel_wait`: the next operation is launched, and the GPU has not started it (launch latency, dependencies).

busy + copy + synchronization + host_wait + kernel_wait = span, to the nanosecond, for the trace and for every part of it:
all are sets of disjoint half-open intervals in whole nanoseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import polars as pl

from optpipe.trace.read import Trace

TimeArray = npt.NDArray[np.int64]
_PROCESS = ~0xFFFFFF
"""nsys' global thread id with the thread (24 bits) cleared is the global process id."""
WAITING_CALLS = (
    r"^(cuda(Device|Stream|Event|Thread)Synchronize|cu(Stream|Event|Ctx)Synchronize|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)?|"
    r"cuMemcpy([DH]to[DH]|2D|3D)?)(_v\d+)?(_ptsz|_ptds)?$"
)
"""API calls that return only when the GPU has finished something. (cudaStreamWaitEvent only makes a stream wait.)"""


@dataclass(frozen=True, slots=True)
class TimeIntervals:
    """Disjoint intervals [start, end) in ascending order; `before` is the time that earlier intervals cover."""

    starts: TimeArray
    ends: TimeArray
    before: TimeArray

    @property
    def total_ns(self) -> int:
        return int((self.ends - self.starts).sum())


def intervals_from_disjoint(starts: TimeArray, ends: TimeArray) -> TimeIntervals:
    """Makes intervals of disjoint, ascending ones; drops empty ones."""
    kept = ends > starts
    if not kept.all():
        starts, ends = starts[kept], ends[kept]
    lengths = ends - starts
    return TimeIntervals(starts, ends, np.cumsum(lengths) - lengths)


def unite_intervals(starts: TimeArray, ends: TimeArray) -> TimeIntervals:
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
    """The time of the intervals before each of `times`."""
    if intervals.starts.size == 0:
        return np.zeros_like(times)
    index = np.searchsorted(intervals.starts, times, side="right") - 1
    inside = np.maximum(index, 0)
    part = np.clip(times - intervals.starts[inside], 0, (intervals.ends - intervals.starts)[inside])
    return np.asarray(np.where(index < 0, 0, intervals.before[inside] + part), dtype=np.int64)


def sum_within(intervals: TimeIntervals, starts: TimeArray, ends: TimeArray) -> TimeArray:
    """The time of the intervals inside each [start, end)."""
    return sum_before(intervals, ends) - sum_before(intervals, starts)


def complement_intervals(intervals: TimeIntervals, start: int, end: int) -> TimeIntervals:
    """The parts of [start, end) outside the intervals."""
    starts = np.concatenate([[start], np.clip(intervals.ends, start, end)]).astype(np.int64)
    ends = np.concatenate([np.clip(intervals.starts, start, end), [end]]).astype(np.int64)
    return intervals_from_disjoint(starts, ends)


def intersect_intervals(one: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    return _cut_segments(one, other, wanted_in_other=True)


def subtract_intervals(one: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    return _cut_segments(one, other, wanted_in_other=False)


def _cut_segments(one: TimeIntervals, other: TimeIntervals, *, wanted_in_other: bool) -> TimeIntervals:
    if one.starts.size == 0 or (other.starts.size == 0 and wanted_in_other):
        nothing = np.zeros(0, dtype=np.int64)
        return intervals_from_disjoint(nothing, nothing)
    if other.starts.size == 0:
        return one
    # a stable sort merges sorted parts; numpy's `unique` takes ten times as long
    edges = np.sort(np.concatenate([one.starts, one.ends, other.starts, other.ends]), kind="stable")
    starts, ends = edges[:-1], edges[1:]
    kept = (starts < ends) & _holds(one, starts) & (_holds(other, starts) == wanted_in_other)
    return unite_intervals(starts[kept], ends[kept])


def _holds(intervals: TimeIntervals, times: TimeArray) -> npt.NDArray[np.bool_]:
    index = np.searchsorted(intervals.starts, times, side="right") - 1
    return np.asarray((index >= 0) & (intervals.ends[np.maximum(index, 0)] > times))


class IdleCause(StrEnum):
    HOST_WAIT = "host_wait"
    KERNEL_WAIT = "kernel_wait"
    COPY = "copy"
    SYNCHRONIZATION = "synchronization"


@dataclass(frozen=True, slots=True)
class Operations:
    """Kernels, copies, and memsets by start, with the row of each one's API call in `trace.api` (or -1)."""

    starts: TimeArray
    ends: TimeArray
    is_kernel: npt.NDArray[np.bool_]
    api_row: TimeArray
    row: TimeArray
    """The row in `trace.kernels` if `is_kernel`, otherwise in `trace.copies`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The GPU's time from `start_ns` to `end_ns`: `busy` and the causes of `idle` add up to it."""

    start_ns: int
    end_ns: int
    operations: Operations
    busy: TimeIntervals
    copies: TimeIntervals
    idle: Mapping[IdleCause, TimeIntervals]

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def idle_by_cause(self) -> dict[IdleCause, int]:
        """Adds up to the time in which no kernel runs."""
        return {cause: self.idle[cause].total_ns for cause in IdleCause}

    @property
    def copy_only_ns(self) -> int:
        return self.idle[IdleCause.COPY].total_ns


def timeline_from_trace(trace: Trace) -> Timeline:
    """The timeline from the first GPU operation, API call, or range to the last."""
    operations = _list_operations(trace)
    frames = (trace.kernels, trace.copies, trace.api, trace.ranges, trace.os_runtime)
    spanning = [frame for frame in frames if frame.height]
    start_ns = min((int(array_from_column(frame, "start_ns").min()) for frame in spanning), default=0)
    end_ns = max((int(array_from_column(frame, "end_ns").max()) for frame in spanning), default=0)
    busy = unite_intervals(operations.starts[operations.is_kernel], operations.ends[operations.is_kernel])
    copies = unite_intervals(operations.starts[~operations.is_kernel], operations.ends[~operations.is_kernel])
    active = busy if copies.starts.size == 0 else unite_intervals(operations.starts, operations.ends)
    idle = _split_idle(trace, operations, complement_intervals(active, start_ns, end_ns))
    return Timeline(
        start_ns, end_ns, operations, busy, copies, {**idle, IdleCause.COPY: subtract_intervals(copies, busy)}
    )


def array_from_column(frame: pl.DataFrame, column: str) -> TimeArray:
    """A column of integers as an array; -1, which is neither a time nor an id, stands for null."""
    return frame[column].fill_null(-1).to_numpy().astype(np.int64, copy=False)


def match_names(frame: pl.DataFrame, pattern: str) -> npt.NDArray[np.bool_]:
    """Tests `pattern` once per distinct name, not per row."""
    distinct = frame["name"].unique()
    matching = distinct.filter(distinct.cast(pl.String).str.contains(pattern))
    if matching.is_empty():
        return np.zeros(frame.height, dtype=np.bool_)
    codes = frame["name"].to_physical().to_numpy()
    return np.asarray(np.isin(codes, matching.to_physical().to_numpy()))


def _list_operations(trace: Trace) -> Operations:
    """Sorts by start, then by launch: the operation that ends a gap decides its cause, whatever the order of rows."""
    columns = ("start_ns", "end_ns", "correlation_id", "pid")
    found = pl.concat(
        frame.select(*columns, is_kernel=pl.lit(frame is trace.kernels)).with_row_index("row")
        for frame in (trace.kernels, trace.copies)
    )
    rows = _find_api_rows(trace, array_from_column(found, "correlation_id"), array_from_column(found, "pid"))
    at = pl.Series(rows, dtype=pl.Int64).replace(-1, None)
    launches = trace.api.select(pl.col("end_ns").gather(at).alias("launched_ns"), pl.col("thread").gather(at))
    found = found.hstack(launches).with_columns(api_row=rows)
    found = found.sort("start_ns", "launched_ns", "thread", "end_ns", "is_kernel")
    starts, ends, api_row, row = (array_from_column(found, name) for name in ("start_ns", "end_ns", "api_row", "row"))
    return Operations(starts, ends, found["is_kernel"].to_numpy(), api_row, row)


def _find_api_rows(trace: Trace, correlation: TimeArray, pid: TimeArray) -> TimeArray:
    """The API call that launched each operation: same process, same correlation id. All nodes of a graph share one."""
    if trace.api.height == 0 or correlation.size == 0:
        return np.full(correlation.size, -1, dtype=np.int64)
    known, thread = array_from_column(trace.api, "correlation_id"), array_from_column(trace.api, "thread")
    processes = {int(each) & _PROCESS for each in (thread.min(), thread.max())} | {int(pid.min()), int(pid.max())}
    if len(processes) > 1 and pid.any():
        numbers = np.unique(np.concatenate([pid, thread & _PROCESS]))
        known = np.searchsorted(numbers, thread & _PROCESS) * (1 << 40) + known
        correlation = np.searchsorted(numbers, pid) * (1 << 40) + correlation
    order = np.argsort(known, kind="stable")
    rows: TimeArray = order[np.searchsorted(known, correlation, side="right", sorter=order) - 1]
    return np.where(known[rows] == correlation, rows, -1)


def _split_idle(trace: Trace, operations: Operations, gaps: TimeIntervals) -> dict[IdleCause, TimeIntervals]:
    """Splits the time in which nothing runs by the state of the next operation."""
    following = np.searchsorted(operations.starts, gaps.ends)
    is_last = following >= operations.starts.size
    launch = (
        np.where(is_last, -1, operations.api_row[np.minimum(following, max(operations.starts.size - 1, 0))])
        if (operations.starts.size)
        else np.full(following.size, -1)
    )
    known = launch >= 0
    launched = gaps.ends.copy()
    if trace.api.height:
        launched[known] = array_from_column(trace.api, "end_ns")[launch[known]]
    # an operation may start before its launch call returns; without a known call it counts as not yet launched
    launched = np.clip(launched, gaps.starts, gaps.ends)
    before_launch = intervals_from_disjoint(gaps.starts, launched)
    waiting = _find_waiting(trace, gaps, launch)
    synchronizing = intersect_intervals(before_launch, waiting)
    return {
        IdleCause.KERNEL_WAIT: intervals_from_disjoint(launched, gaps.ends),
        IdleCause.SYNCHRONIZATION: synchronizing,
        IdleCause.HOST_WAIT: subtract_intervals(before_launch, synchronizing),
    }


def _find_waiting(trace: Trace, gaps: TimeIntervals, launch: TimeArray) -> TimeIntervals:
    """The times in which the thread that launches after each gap is in a waiting call; any thread after the last gap."""
    calls = trace.api.filter(pl.Series(match_names(trace.api, WAITING_CALLS)))
    if calls.height == 0:
        return intervals_from_disjoint(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    everyone = unite_intervals(array_from_column(calls, "start_ns"), array_from_column(calls, "end_ns"))
    threads = np.unique(array_from_column(calls, "thread"))
    launching = array_from_column(trace.api, "thread")[np.maximum(launch, 0)]
    if threads.size == 1 and (launching[launch >= 0] == threads[0]).all():
        return everyone
    parts = [_clip_calls(gaps, launch < 0, everyone)]
    for thread in threads:
        mine = calls.filter(pl.col("thread") == thread)
        own = unite_intervals(array_from_column(mine, "start_ns"), array_from_column(mine, "end_ns"))
        parts.append(_clip_calls(gaps, (launch >= 0) & (launching == thread), own))
    starts, ends = (np.concatenate(edges) for edges in zip(*((part.starts, part.ends) for part in parts), strict=True))
    return unite_intervals(starts, ends)


def _clip_calls(gaps: TimeIntervals, chosen: npt.NDArray[np.bool_], calls: TimeIntervals) -> TimeIntervals:
    mine = intervals_from_disjoint(gaps.starts[chosen], gaps.ends[chosen])
    return intersect_intervals(mine, calls)
