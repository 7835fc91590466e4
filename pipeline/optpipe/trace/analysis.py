"""The tables of one trace, computed once, and its NVTX ranges projected on the GPU."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.trace.kernels import classify_kernels
from optpipe.trace.nsys import ITERATION_RANGE, LIBRARY_RANGES, MEASURED_RANGE
from optpipe.trace.read import Trace
from optpipe.trace.timeline import Timeline, array_from_column, match_names, sum_within, timeline_from_trace

_WARMED_UP = 2.0
_NUMBERED = r"(?i)^((?:.*[^a-z])?(?:iter|iteration|step|batch|frame|request|profilerstep)[\s_#:=.-]*)\d+$"
"""Names of numbered repetitions: `iteration 7`, `step_7`, `ProfilerStep#7`. Layers are numbered too, but do not repeat."""


_PROJECTED = ("gpu_start_ns", "gpu_end_ns", "gpu_ns", "kernel_ns", "kernels", "depth")


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
    os_runtime: pl.DataFrame
    launches: pl.DataFrame
    """One row per kernel with a known launch: `name`, `start_ns`, `kernel_ns`, and the call's `thread`, `called_ns`, `returned_ns`.
    `is_first` marks the first kernel of each call; one call launches all kernels of a CUDA graph."""
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
    def copy_ns(self) -> int:
        return int(self.copies["total_ns"].sum())

    @property
    def overlapped_copy_ns(self) -> int:
        return self.timeline.copies.total_ns - self.timeline.copy_only_ns

    @property
    def iteration_ns(self) -> float | None:
        """Median time from the start of an iteration to the start of the next, or to the end of the last."""
        if self.iterations.is_empty():
            return None
        starts = array_from_column(self.iterations, "start_ns")
        last = max(int(self.iterations["gpu_end_ns"].max() or 0), int(self.iterations["end_ns"].max() or 0))  # type: ignore[arg-type]
        return float(np.median(np.diff(np.append(starts, last))))


def analysis_from_trace(trace: Trace, scope: str = "trace") -> Analysis:
    timeline = timeline_from_trace(trace)
    kernels = summarize(trace.kernels, "name", mean_ns=pl.col("duration_ns").mean())
    kernels = kernels.join(classify_kernels(trace.kernels["name"]), on="name", how="left", maintain_order="left")
    calls = trace.api.with_columns(rename_distinct(trace.api["name"], VERSION_SUFFIX, ""))
    copies = summarize(trace.copies, "kind", "source_memory", "target_memory", bytes=pl.col("bytes").sum())
    rate = pl.when(pl.col("total_ns") > 0).then(pl.col("bytes") / (pl.col("total_ns") / 1e9))
    # nsys itself adds a call to report that it traces the operating system
    os_calls = trace.os_runtime.filter(
        ~pl.Series(match_names(trace.os_runtime, "profiling started$"), dtype=pl.Boolean)
    )
    projection = project_ranges(trace, timeline)
    ranges = projection.group_by(pl.col("family").alias("name")).agg(
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("wall_ns", "gpu_ns", "kernel_ns", "kernels", "busy_ns").sum(),
        (pl.col("gpu_end_ns") - pl.col("gpu_start_ns")).sum().alias("projected_ns"),
        pl.col("start_ns").min().alias("first_start_ns"),
        pl.col("depth").min(),
    )
    return Analysis(
        trace=trace,
        scope=scope,
        timeline=timeline,
        kernels=kernels,
        api=summarize(calls, "name"),
        copies=copies.with_columns(rate.alias("bytes_per_s")),
        os_runtime=summarize(os_calls, "name"),
        launches=_list_launches(trace, timeline),
        projection=projection,
        ranges=ranges.sort("wall_ns", "name", descending=[True, False]),
        iterations=_find_iterations(projection),
    )


def summarize(frame: pl.DataFrame, *keys: str, **sums: pl.Expr) -> pl.DataFrame:
    """Groups `frame` by `keys`, longest total first: `count`, `total_ns`, `sums` over the columns and `duration_ns`, `share`.

    `in_classic_list` marks the shortest head of the table that reaches 90%.
    """
    total = pl.col("total_ns").sum()
    return (
        frame.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
        .group_by(keys)
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.col("duration_ns").sum().alias("total_ns"), **sums)
        .with_columns(pl.col(keys).cast(pl.String))
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
        .with_columns(share=pl.when(total > 0).then(pl.col("total_ns") / total).otherwise(0.0))
        .with_columns(in_classic_list=pl.col("share").cum_sum() - pl.col("share") < CLASSIC_SHARE - 1e-12)
    )


def rename_distinct(names: pl.Series, pattern: str, replacement: str) -> pl.Series:
    """Replaces `pattern` once per distinct name, not per row."""
    distinct = names.unique()
    if distinct.is_empty():
        return names.cast(pl.String)
    renamed = distinct.cast(pl.String).str.replace(pattern, replacement)
    return names.replace_strict(distinct, renamed, return_dtype=pl.String)


def select_measured_part(analysis: Analysis, range_name: str | None = None) -> Analysis:
    """Selects the part that the measured range launched, without warm-up and tear-down.

    `range_name` defaults to the range of optpipe's own recordings. A trace without it is cut to its iterations after the
    warm-up; a trace without iterations stays whole. Raises BadInputError if the trace has no range called `range_name`.
    """
    wanted = range_name or MEASURED_RANGE
    named = (pl.col("name").cast(pl.String) == wanted) | (pl.col("family") == wanted)
    found = analysis.projection.filter(named).select("start_ns", "end_ns")
    iterations = analysis.iterations
    if found.is_empty() and range_name is None:
        if iterations.is_empty():
            return analysis
        # leading iterations that take over twice the median are warm-up
        usual = iterations["wall_ns"].to_numpy() <= _WARMED_UP * np.median(iterations["wall_ns"].to_numpy())
        first = int(np.argmax(usual)) if np.count_nonzero(usual) > 1 else 0
        found = iterations[first:].select(pl.col("start_ns").min(), pl.col("end_ns").max())
        wanted = f"iterations {first + 1} to {iterations.height} ({iterations['family'][0]})"
    if found.is_empty():
        names = ", ".join(analysis.ranges["name"].head(8).to_list()) or "none"
        raise BadInputError(f"no NVTX range named {range_name!r};  the trace has: {names}")
    # a range that holds everything cuts nothing: kernels whose launches were not recorded stay
    frames = [frame for frame in (analysis.trace.api, analysis.trace.ranges, analysis.trace.os_runtime) if frame.height]
    within = (pl.min("start_ns") >= found["start_ns"][0]) & (pl.max("start_ns") < found["end_ns"][0])
    if found.height == 1 and all(frame.select(within).item() for frame in frames):
        return replace(analysis, scope=wanted)
    part = _cut_trace(analysis, found)
    if all(frame.height == analysis.trace.tables[table].height for table, frame in part.tables.items()):
        return replace(analysis, scope=wanted)
    return analysis_from_trace(part, scope=wanted)


def _cut_trace(analysis: Analysis, ranges: pl.DataFrame) -> Trace:
    """Keeps the calls inside `ranges` (all threads) and the GPU operations of those calls."""
    trace, operations = analysis.trace, analysis.timeline.operations
    starts, ends = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")

    def inside(frame: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        index = np.searchsorted(starts, array_from_column(frame, "start_ns"), side="right") - 1
        return np.asarray((index >= 0) & (array_from_column(frame, "start_ns") < ends[np.maximum(index, 0)]))

    called = inside(trace.api)
    launched = np.where(operations.api_row >= 0, called[operations.api_row] if called.size else False, False)
    return replace(
        trace,
        api=trace.api.filter(called),
        kernels=trace.kernels[np.sort(operations.row[launched & operations.is_kernel])],
        copies=trace.copies[np.sort(operations.row[launched & ~operations.is_kernel])],
        ranges=trace.ranges.filter(inside(trace.ranges)),
        os_runtime=trace.os_runtime.filter(inside(trace.os_runtime)),
    )


def _find_iterations(projection: pl.DataFrame) -> pl.DataFrame:
    """Finds optpipe's iterations; in other traces the repeated range that launches kernels, is outermost, and takes longest."""
    family = pl.col("family")
    repeated = (
        projection.filter((family != MEASURED_RANGE) & ~family.str.contains(LIBRARY_RANGES))
        .group_by(family)
        .agg(pl.len().alias("count"), pl.col("depth").min(), pl.col("wall_ns", "kernels").sum())
        .filter(pl.col("count") > 1)
        .sort(
            family == ITERATION_RANGE,
            pl.col("kernels") > 0,
            "depth",
            "wall_ns",
            "family",
            descending=[True, True, False, True, False],
        )
    )
    if repeated.is_empty():
        return projection.clear()
    return projection.filter((family == repeated["family"][0]) & (pl.col("depth") == repeated["depth"][0]))


def project_ranges(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """One row per NVTX range, with the operations that it launched, by start.

    `family`: the name, with `N` for the number of a repetition. `depth`: the number of ranges of the same thread that are open
    at its start. `gpu_start_ns`, `gpu_end_ns`: from the first operation launched inside the range (on the same thread, as in
    nsys) to the end of the last; null if it launched nothing. `gpu_ns`: the sum of these operations; `kernel_ns` of the
    kernels. `busy_ns`: the time in this window in which any kernel runs.
    """
    operations, order = timeline.operations, ("start_ns", "end_ns", "depth")
    launched_by, launches = (
        np.full(operations.row.size, -1, dtype=np.int64),
        np.zeros(operations.row.size, dtype=np.int64),
    )
    if trace.api.height:
        thread, started = (array_from_column(trace.api, name)[operations.api_row] for name in ("thread", "start_ns"))
        launched_by, launches = np.where(operations.api_row >= 0, thread, -1), started
    ranges = trace.ranges.sort("start_ns", "end_ns", pl.col("name").cast(pl.String), descending=[False, True, False])
    parts = [ranges.clear().with_columns(pl.lit(None, dtype=pl.Int64).alias(column) for column in _PROJECTED)]
    for part in ranges.partition_by("thread", maintain_order=True):
        mine = np.flatnonzero(launched_by == int(part["thread"][0] or 0))
        mine = mine[np.argsort(launches[mine], kind="stable")]
        starts, ends, is_kernel = operations.starts[mine], operations.ends[mine], operations.is_kernel[mine]
        begin, end = array_from_column(part, "start_ns"), array_from_column(part, "end_ns")
        low, high = np.searchsorted(launches[mine], begin), np.searchsorted(launches[mine], end)
        some = high > low
        gpu_start, gpu_end = np.zeros((2, begin.size), dtype=np.int64)
        if some.any():
            # reduceat takes a flat list of slice bounds; the results between two ranges are dropped
            bounds = np.stack([low[some], high[some]], axis=1).ravel()
            gpu_start[some] = np.minimum.reduceat(np.append(starts, np.iinfo(np.int64).max), bounds)[::2]
            gpu_end[some] = np.maximum.reduceat(np.append(ends, 0), bounds)[::2]
        sums = {"gpu_ns": ends - starts, "kernel_ns": np.where(is_kernel, ends - starts, 0), "kernels": is_kernel}
        running = {name: np.append(0, np.cumsum(values, dtype=np.int64)) for name, values in sums.items()}
        closed = np.searchsorted(np.sort(np.maximum(end, begin + 1)), begin, side="right")
        null_where_none = pl.when(pl.Series(some))
        parts.append(
            part.with_columns(
                null_where_none.then(pl.Series(gpu_start)).alias("gpu_start_ns"),
                null_where_none.then(pl.Series(gpu_end)).alias("gpu_end_ns"),
                *(pl.Series(name, values[high] - values[low]) for name, values in running.items()),
                pl.Series("depth", np.arange(begin.size, dtype=np.int64) - closed),
            )
        )
    table = pl.concat(parts).sort(*order, descending=[False, True, False])
    start, end = (table[column].fill_null(0).to_numpy() for column in ("gpu_start_ns", "gpu_end_ns"))
    return table.with_columns(
        rename_distinct(table["name"], _NUMBERED, "${1}N").alias("family"),
        pl.Series("busy_ns", sum_within(timeline.busy, start, end)),
        (pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"),
    )


CLASSIC_SHARE = 0.9
VERSION_SUFFIX = r"_v\d{4,5}(_ptsz|_ptds)?$"
"""The suffix that CUPTI adds to the name of an API call."""


def _list_launches(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    operations = timeline.operations
    known = operations.is_kernel & (operations.api_row >= 0)
    calls = trace.api.select("thread", called_ns="start_ns", returned_ns="end_ns")[operations.api_row[known]]
    kernels = trace.kernels.select("name", "start_ns", kernel_ns=pl.col("end_ns") - pl.col("start_ns"))
    return (
        kernels[operations.row[known]]
        .hstack(calls)
        .with_columns(is_first=pl.Series(operations.api_row[known]).is_first_distinct())
    )
