"""The tables of one trace, its NVTX ranges projected on the GPU, and one timeline with the cause of all idle time.

Busy is the time in which at least one kernel runs. All other time is idle and has exactly one cause:

- `copy`: only copies or memsets run.
- `synchronization`: nothing runs, and the thread that launches the next operation is in a call that waits for the GPU.
- `host_wait`: nothing runs, because the host has not launched the next operation yet.
- `kernel_wait`: the next operation is launched, and the GPU has not started it (launch latency, dependencies).

busy + copy + synchronization + host_wait + kernel_wait = span, to the nanosecond, for the trace and for every part of it:
all are sets of disjoint half-open intervals in whole nanoseconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.trace.kernels import classify_kernels
from optpipe.trace.nsys import ITERATION_RANGE, LIBRARY_RANGES, MEASURED_RANGE
from optpipe.trace.read import Trace, match_names, rename_distinct

TimeArray = npt.NDArray[np.int64]
_PROCESS = ~0xFFFFFF
"""nsys' global thread id with the thread (24 bits) cleared is the global process id."""
WAITING_CALLS = (
    r"^(cuda(Device|Stream|Event|Thread)Synchronize|cu(Stream|Event|Ctx)Synchronize|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)?|"
    r"cuMemcpy([DH]to[DH]|2D|3D)?)(_v\d+)?(_ptsz|_ptds)?$"
)
"""API calls that return only when the GPU has finished something. (cudaStreamWaitEvent only makes a stream wait.)"""


class TimeIntervals(NamedTuple):
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
    return intervals_from_disjoint(starts[first], reach[np.concatenate([first[1:], [True]])])


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


def intersect_intervals(intervals: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    return _cut_segments(intervals, other, wanted_in_other=True)


def subtract_intervals(intervals: TimeIntervals, other: TimeIntervals) -> TimeIntervals:
    return _cut_segments(intervals, other, wanted_in_other=False)


def _cut_segments(
    intervals: TimeIntervals, other: TimeIntervals, *, wanted_in_other: bool
) -> TimeIntervals:
    if intervals.starts.size == 0 or other.starts.size == 0:
        return other if intervals.starts.size and wanted_in_other else intervals
    # a stable sort merges sorted parts; numpy's `unique` takes ten times as long
    edges = np.sort(
        np.concatenate([intervals.starts, intervals.ends, other.starts, other.ends]), kind="stable"
    )
    starts, ends = edges[:-1], edges[1:]
    kept = (starts < ends) & _holds(intervals, starts) & (_holds(other, starts) == wanted_in_other)
    return unite_intervals(starts[kept], ends[kept])


def _holds(intervals: TimeIntervals, times: TimeArray) -> npt.NDArray[np.bool_]:
    index = np.searchsorted(intervals.starts, times, side="right") - 1
    return np.asarray((index >= 0) & (intervals.ends[np.maximum(index, 0)] > times))


class IdleCause(StrEnum):
    HOST_WAIT = "host_wait"
    KERNEL_WAIT = "kernel_wait"
    COPY = "copy"
    SYNCHRONIZATION = "synchronization"


class Operations(NamedTuple):
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
    """The timeline from the first GPU operation, API call, or range to the last; without any, of what else was recorded."""
    operations = _list_operations(trace)
    start_ns, end_ns = (
        _find_extent(trace.tables.values()) or _find_extent(trace.details.values()) or (0, 0)
    )
    busy = unite_intervals(
        operations.starts[operations.is_kernel], operations.ends[operations.is_kernel]
    )
    copies = unite_intervals(
        operations.starts[~operations.is_kernel], operations.ends[~operations.is_kernel]
    )
    active = (
        busy if copies.starts.size == 0 else unite_intervals(operations.starts, operations.ends)
    )
    idle = _split_idle(trace, operations, complement_intervals(active, start_ns, end_ns))
    idle[IdleCause.COPY] = subtract_intervals(copies, busy)
    return Timeline(start_ns, end_ns, operations, busy, copies, idle)


def _find_extent(frames: Iterable[pl.DataFrame]) -> tuple[int, int] | None:
    """From the first to the last event; None if there is none."""
    times = [
        array_from_column(frame, column)
        for frame in frames
        for column in ("start_ns", "end_ns", "time_ns")
        if column in frame.columns and frame.height
    ]
    if not times:
        return None
    return int(min(column.min() for column in times)), int(max(column.max() for column in times))


def array_from_column(frame: pl.DataFrame, column: str) -> TimeArray:
    """A column of integers as an array; -1, which is neither a time nor an id, stands for null."""
    return frame[column].fill_null(-1).to_numpy().astype(np.int64, copy=False)


def _list_operations(trace: Trace) -> Operations:
    """Sorts by start, then by launch: the operation that ends a gap decides its cause, whatever the order of rows."""
    columns = ("start_ns", "end_ns", "correlation_id", "pid")
    operations = pl.concat(
        frame.select(*columns, is_kernel=pl.lit(frame is trace.kernels)).with_row_index("row")
        for frame in (trace.kernels, trace.copies)
    )
    rows = _find_api_rows(
        trace, array_from_column(operations, "correlation_id"), array_from_column(operations, "pid")
    )
    at = pl.Series(rows, dtype=pl.Int64).replace(-1, None)
    launches = trace.api.select(
        pl.col("end_ns").gather(at).alias("launched_ns"), pl.col("thread").gather(at)
    )
    operations = operations.hstack(launches).with_columns(api_row=rows)
    operations = operations.sort("start_ns", "launched_ns", "thread", "end_ns", "is_kernel")
    starts, ends, api_row, row = (
        array_from_column(operations, name) for name in ("start_ns", "end_ns", "api_row", "row")
    )
    return Operations(starts, ends, operations["is_kernel"].to_numpy(), api_row, row)


def _find_api_rows(trace: Trace, correlation: TimeArray, pid: TimeArray) -> TimeArray:
    """The API call that launched each operation: same process, same correlation id. All nodes of a graph share one."""
    if trace.api.height == 0 or correlation.size == 0:
        return np.full(correlation.size, -1, dtype=np.int64)
    known, thread = (
        array_from_column(trace.api, "correlation_id"),
        array_from_column(trace.api, "thread"),
    )
    processes = {int(identifier) & _PROCESS for identifier in (thread.min(), thread.max())} | {
        int(pid.min()),
        int(pid.max()),
    }
    if len(processes) > 1 and pid.any():
        numbers = np.unique(np.concatenate([pid, thread & _PROCESS]))
        known = np.searchsorted(numbers, thread & _PROCESS) * (1 << 40) + known
        correlation = np.searchsorted(numbers, pid) * (1 << 40) + correlation
    order = np.argsort(known, kind="stable")
    rows: TimeArray = order[np.searchsorted(known, correlation, side="right", sorter=order) - 1]
    return np.where(known[rows] == correlation, rows, -1)


def _split_idle(
    trace: Trace, operations: Operations, gaps: TimeIntervals
) -> dict[IdleCause, TimeIntervals]:
    """Splits the time in which nothing runs by the state of the next operation."""
    following = np.searchsorted(operations.starts, gaps.ends)
    is_last = following >= operations.starts.size
    launch = np.full(following.size, -1)
    if operations.starts.size:
        launch = np.where(
            is_last, -1, operations.api_row[np.minimum(following, operations.starts.size - 1)]
        )
    known = launch >= 0
    launched = gaps.ends.copy()
    if trace.api.height:
        launched[known] = array_from_column(trace.api, "end_ns")[launch[known]]
    # an operation may start before its launch call returns; without a known call it counts as not yet launched
    launched = np.clip(launched, gaps.starts, gaps.ends)
    before_launch = intervals_from_disjoint(gaps.starts, launched)
    synchronizing = intersect_intervals(before_launch, _find_waiting(trace, gaps, launch))
    return {
        IdleCause.KERNEL_WAIT: intervals_from_disjoint(launched, gaps.ends),
        IdleCause.SYNCHRONIZATION: synchronizing,
        IdleCause.HOST_WAIT: subtract_intervals(before_launch, synchronizing),
    }


def _find_waiting(trace: Trace, gaps: TimeIntervals, launch: TimeArray) -> TimeIntervals:
    """The times in which the thread that launches after each gap is in a waiting call; any thread after the last gap."""
    calls = trace.api.filter(match_names(trace.api, WAITING_CALLS))
    if calls.height == 0:
        return intervals_from_disjoint(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    everyone = unite_intervals(
        array_from_column(calls, "start_ns"), array_from_column(calls, "end_ns")
    )
    threads = np.unique(array_from_column(calls, "thread"))
    launching = array_from_column(trace.api, "thread")[np.maximum(launch, 0)]
    parts = [_clip_calls(gaps, launch < 0, everyone)]
    for thread in threads:
        mine = calls.filter(pl.col("thread") == thread)
        own = unite_intervals(
            array_from_column(mine, "start_ns"), array_from_column(mine, "end_ns")
        )
        parts.append(_clip_calls(gaps, (launch >= 0) & (launching == thread), own))
    starts, ends = (
        np.concatenate(edges)
        for edges in zip(*((part.starts, part.ends) for part in parts), strict=True)
    )
    return unite_intervals(starts, ends)


def _clip_calls(
    gaps: TimeIntervals, chosen: npt.NDArray[np.bool_], calls: TimeIntervals
) -> TimeIntervals:
    return intersect_intervals(
        intervals_from_disjoint(gaps.starts[chosen], gaps.ends[chosen]), calls
    )


WHOLE = "all"
"""The name that selects the whole trace instead of a range."""
_WARMED_UP = 2.0
_NUMBERED = (
    r"(?i)^((?:.*[^a-z])?(?:iter|iteration|step|batch|frame|request|profilerstep)[\s_#:=.-]*)\d+$"
)
"""Names of numbered repetitions: `iteration 7`, `step_7`, `ProfilerStep#7`. Layers are numbered too, but do not repeat."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """A trace, or the part that one NVTX range launched, with all its tables."""

    trace: Trace
    scope: str
    """`trace`, or the name of the range that bounds it."""
    timeline: Timeline
    kernels: pl.DataFrame
    api: pl.DataFrame
    copies: pl.DataFrame
    launches: pl.DataFrame
    """One row per kernel with a known launch: `name`, `kernel_ns`, and the call's `thread` and `called_ns`."""
    projection: pl.DataFrame
    """One row per NVTX range."""
    ranges: pl.DataFrame
    """One row per range name."""
    iterations: pl.DataFrame
    """The rows of `projection` that are iterations; empty if nothing repeats."""

    @property
    def kernel_ns(self) -> int:
        """Sum of all kernels; more than the busy time if kernels overlap."""
        return int(self.kernels["total_ns"].sum())

    @property
    def overlapped_copy_ns(self) -> int:
        return self.timeline.copies.total_ns - self.timeline.copy_only_ns

    @property
    def iteration_ns(self) -> float | None:
        """Median time from the start of an iteration to the start of the next, or to the end of the last."""
        if self.iterations.is_empty():
            return None
        starts = array_from_column(self.iterations, "start_ns")
        ends = [array_from_column(self.iterations, name) for name in ("gpu_end_ns", "end_ns")]
        last = max(int(column.max()) for column in ends)
        return float(np.median(np.diff(np.append(starts, last))))


def analysis_from_trace(trace: Trace, scope: str = "trace") -> Analysis:
    timeline = timeline_from_trace(trace)
    kernels = summarize(trace.kernels, "name", mean_ns=pl.col("duration_ns").mean())
    kernels = kernels.join(
        classify_kernels(trace.kernels["name"]), on="name", how="left", maintain_order="left"
    )
    calls = trace.api.with_columns(rename_distinct(trace.api["name"], VERSION_SUFFIX, ""))
    copies = summarize(
        trace.copies, "kind", "source_memory", "target_memory", bytes=pl.col("bytes").sum()
    )
    rate = pl.when(pl.col("total_ns") > 0).then(pl.col("bytes") / (pl.col("total_ns") / 1e9))
    projection = project_ranges(trace, timeline)
    ranges = summarize_ranges(projection, "family")
    return Analysis(
        trace=trace,
        scope=scope,
        timeline=timeline,
        kernels=kernels,
        api=summarize(calls, "name"),
        copies=copies.with_columns(rate.alias("bytes_per_s")),
        launches=_list_launches(trace, timeline),
        projection=projection,
        ranges=ranges,
        iterations=_find_iterations(projection),
    )


def summarize_ranges(projection: pl.DataFrame, key: str) -> pl.DataFrame:
    """One row per `name` or `family` of ranges, longest first."""
    ranges = projection.group_by(pl.col(key).cast(pl.String).alias("name")).agg(
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("wall_ns", "gpu_ns", "kernel_ns", "kernels", "busy_ns").sum(),
        (pl.col("gpu_end_ns") - pl.col("gpu_start_ns")).sum().alias("projected_ns"),
        pl.col("start_ns").min().alias("first_start_ns"),
        pl.col("depth").min(),
    )
    return ranges.sort("wall_ns", "name", descending=[True, False])


def summarize(frame: pl.DataFrame, *keys: str, **sums: pl.Expr) -> pl.DataFrame:
    """Groups `frame` by `keys`, longest total first: `count`, `total_ns`, `sums` over the columns and `duration_ns`, `share`.

    `in_classic_list` marks the shortest head of the table that reaches 90%.
    """
    total = pl.col("total_ns").sum()
    return (
        frame.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
        .group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("duration_ns").sum().alias("total_ns"),
            **sums,
        )
        .with_columns(pl.col(keys).cast(pl.String))
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
        .with_columns(share=pl.when(total > 0).then(pl.col("total_ns") / total).otherwise(0.0))
        .with_columns(
            in_classic_list=pl.col("share").cum_sum() - pl.col("share") < CLASSIC_SHARE - 1e-12
        )
    )


def select_measured_part(analysis: Analysis, range_name: str | None = None) -> Analysis:
    """Selects the part that the measured range launched, without warm-up and tear-down.

    `range_name` defaults to the range of optpipe's own recordings. A trace without it is cut to its iterations after the
    warm-up; a trace without iterations stays whole. Raises BadInputError if the trace has no range called `range_name`.
    """
    if range_name == WHOLE:
        return replace(analysis, ranges=summarize_ranges(analysis.projection, "name"))
    ranges, scope = find_measured_ranges(analysis, range_name)
    if ranges.is_empty():
        return analysis
    # a range that holds everything cuts nothing: kernels whose launches were not recorded stay
    frames = [frame for frame in (analysis.trace.api, analysis.trace.ranges) if frame.height]
    within = (pl.min("start_ns") >= ranges["start_ns"][0]) & (
        pl.max("start_ns") < ranges["end_ns"][0]
    )
    if ranges.height == 1 and all(frame.select(within).item() for frame in frames):
        return replace(analysis, scope=scope)
    part = _cut_trace(analysis, ranges)
    if all(
        frame.height == analysis.trace.tables[table].height for table, frame in part.tables.items()
    ):
        return replace(analysis, scope=scope)
    return analysis_from_trace(part, scope=scope)


def find_measured_ranges(
    analysis: Analysis, range_name: str | None = None
) -> tuple[pl.DataFrame, str]:
    """`start_ns` and `end_ns` of the measured part, and what it is called; empty if it is the whole trace.

    Raises BadInputError as `select_measured_part`.
    """
    if range_name == WHOLE:
        return analysis.projection.clear().select("start_ns", "end_ns"), analysis.scope
    wanted = range_name or MEASURED_RANGE
    named = (pl.col("name").cast(pl.String) == wanted) | (pl.col("family") == wanted)
    ranges = analysis.projection.filter(named).select("start_ns", "end_ns")
    iterations = analysis.iterations
    if ranges.is_empty() and range_name is None:
        if iterations.is_empty():
            return ranges, analysis.scope
        # leading iterations that take over twice the median are warm-up
        usual = iterations["wall_ns"].to_numpy() <= _WARMED_UP * np.median(
            iterations["wall_ns"].to_numpy()
        )
        first = int(np.argmax(usual)) if np.count_nonzero(usual) > 1 else 0
        ranges = iterations[first:].select(pl.col("start_ns").min(), pl.col("end_ns").max())
        wanted = f"iterations {first + 1} to {iterations.height} ({iterations['family'][0]})"
    if ranges.is_empty():
        names = ", ".join(analysis.ranges["name"].head(8).to_list()) or "none"
        raise BadInputError(f"no NVTX range named {range_name!r}; the trace has: {names}")
    return ranges, wanted


def _cut_trace(analysis: Analysis, ranges: pl.DataFrame) -> Trace:
    """Keeps the calls inside `ranges` (all threads) and the GPU operations of those calls."""
    trace, operations = analysis.trace, analysis.timeline.operations
    starts, ends = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")

    def inside(frame: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        index = np.searchsorted(starts, array_from_column(frame, "start_ns"), side="right") - 1
        return np.asarray(
            (index >= 0) & (array_from_column(frame, "start_ns") < ends[np.maximum(index, 0)])
        )

    called = inside(trace.api)
    launched = np.where(
        operations.api_row >= 0, called[operations.api_row] if called.size else False, False
    )
    return replace(
        trace,
        api=trace.api.filter(called),
        kernels=trace.kernels[np.sort(operations.row[launched & operations.is_kernel])],
        copies=trace.copies[np.sort(operations.row[launched & ~operations.is_kernel])],
        ranges=trace.ranges.filter(inside(trace.ranges)),
    )


def _find_iterations(projection: pl.DataFrame) -> pl.DataFrame:
    """Finds optpipe's iterations; in other traces the repeated range that launches kernels, is outermost, and takes longest."""
    family = pl.col("family")
    order = (family == ITERATION_RANGE, pl.col("kernels") > 0, "depth", "wall_ns", "family")
    repeated = (
        projection.filter((family != MEASURED_RANGE) & ~family.str.contains(LIBRARY_RANGES))
        .group_by(family)
        .agg(pl.len().alias("count"), pl.col("depth").min(), pl.col("wall_ns", "kernels").sum())
        .filter(pl.col("count") > 1)
        .sort(order, descending=[True, True, False, True, False])
    )
    if repeated.is_empty():
        return projection.clear()
    return projection.filter(
        (family == repeated["family"][0]) & (pl.col("depth") == repeated["depth"][0])
    )


def project_ranges(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """One row per NVTX range, with the operations that it launched, by start.

    `family`: the name, with `N` for the number of a repetition. `depth`: the number of ranges of the same thread that are open
    at its start. `gpu_start_ns`, `gpu_end_ns`: from the first operation launched inside the range (on the same thread, as in
    nsys) to the end of the last; null if it launched nothing. `gpu_ns`: the sum of these operations; `kernel_ns` of the
    kernels. `busy_ns`: the time in this window in which any kernel runs.
    """
    operations, order = timeline.operations, ("start_ns", "end_ns", "depth")
    launched_by, launches = np.full_like(operations.row, -1), np.zeros_like(operations.row)
    if trace.api.height:
        thread, started = (
            array_from_column(trace.api, name)[operations.api_row]
            for name in ("thread", "start_ns")
        )
        launched_by, launches = np.where(operations.api_row >= 0, thread, -1), started
    ranges = trace.ranges.sort(
        "start_ns", "end_ns", pl.col("name").cast(pl.String), descending=[False, True, False]
    )
    projected = ("gpu_start_ns", "gpu_end_ns", "gpu_ns", "kernel_ns", "kernels", "depth")
    parts = [
        ranges.clear().with_columns(
            pl.lit(None, dtype=pl.Int64).alias(column) for column in projected
        )
    ]
    for part in ranges.partition_by("thread", maintain_order=True):
        mine = np.flatnonzero(launched_by == int(part["thread"][0] or 0))
        mine = mine[np.argsort(launches[mine], kind="stable")]
        parts.append(_project_thread(part, operations, mine, launches[mine]))
    table = pl.concat(parts).sort(*order, descending=[False, True, False])
    start, end = (
        table[column].fill_null(0).to_numpy() for column in ("gpu_start_ns", "gpu_end_ns")
    )
    return table.with_columns(
        rename_distinct(table["name"], _NUMBERED, "${1}N").alias("family"),
        pl.Series("busy_ns", sum_within(timeline.busy, start, end)),
        (pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"),
    )


def _project_thread(
    ranges: pl.DataFrame, operations: Operations, mine: TimeArray, launched_ns: TimeArray
) -> pl.DataFrame:
    """The ranges of one thread; `mine` are the rows of its operations in the order of their launches at `launched_ns`."""
    starts, ends, is_kernel = (
        operations.starts[mine],
        operations.ends[mine],
        operations.is_kernel[mine],
    )
    begin, end = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")
    low, high = np.searchsorted(launched_ns, begin), np.searchsorted(launched_ns, end)
    some = high > low
    gpu_start, gpu_end = np.zeros((2, begin.size), dtype=np.int64)
    if some.any():
        # reduceat takes a flat list of slice bounds; the results between two ranges are dropped
        bounds = np.stack([low[some], high[some]], axis=1).ravel()
        gpu_start[some] = np.minimum.reduceat(np.append(starts, np.iinfo(np.int64).max), bounds)[
            ::2
        ]
        gpu_end[some] = np.maximum.reduceat(np.append(ends, 0), bounds)[::2]
    sums = {
        "gpu_ns": ends - starts,
        "kernel_ns": np.where(is_kernel, ends - starts, 0),
        "kernels": is_kernel,
    }
    running = {
        name: np.append(0, np.cumsum(values, dtype=np.int64)) for name, values in sums.items()
    }
    closed = np.searchsorted(np.sort(np.maximum(end, begin + 1)), begin, side="right")
    null_where_none = pl.when(pl.Series(some))
    return ranges.with_columns(
        null_where_none.then(pl.Series(gpu_start)).alias("gpu_start_ns"),
        null_where_none.then(pl.Series(gpu_end)).alias("gpu_end_ns"),
        *(pl.Series(name, values[high] - values[low]) for name, values in running.items()),
        pl.Series("depth", np.arange(begin.size, dtype=np.int64) - closed),
    )


CLASSIC_SHARE = 0.9
VERSION_SUFFIX = r"_v\d{4,5}(_ptsz|_ptds)?$"
"""The suffix that CUPTI adds to the name of an API call."""


def _list_launches(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    operations = timeline.operations
    known = operations.is_kernel & (operations.api_row >= 0)
    calls = trace.api.select("thread", called_ns="start_ns")[operations.api_row[known]]
    kernels = trace.kernels.select("name", kernel_ns=pl.col("end_ns") - pl.col("start_ns"))
    return kernels[operations.row[known]].hstack(calls)
