"""Every view of one trace, made once: what rules, reports and the diff read; and its NVTX ranges projected on the GPU."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.trace.kernels import classify_kernels
from optpipe.trace.ranges import ITERATION_RANGE, LIBRARY_RANGES, MEASURED_RANGE
from optpipe.trace.read import Trace
from optpipe.trace.timeline import (
    IdleCause,
    Split,
    TimeArray,
    Timeline,
    array_from_column,
    split_timeline,
    sum_within,
    timeline_from_trace,
    unite_intervals,
)

_WARMED_UP = 2.0
_NUMBERED = r"(?i)^((?:.*[^a-z])?(?:iter|iteration|step|batch|frame|request|profilerstep)[\s_#:=.-]*)\d+$"
"""Repetitions that are numbered: `iteration 7`, `step_7`, `ProfilerStep#7`. Layers are numbered too, but do not repeat."""


_PROJECTED = ("gpu_start_ns", "gpu_end_ns", "gpu_ns", "kernel_ns", "kernels", "depth")


@dataclass(frozen=True, slots=True)
class Analysis:
    """A trace, or the part of it that one NVTX range launched, with every table made from it."""

    trace: Trace
    scope: str
    """`trace`, or the name of the range that bounds it."""
    timeline: Timeline
    split: Split
    kernels: pl.DataFrame
    kinds: pl.DataFrame
    api: pl.DataFrame
    copies: pl.DataFrame
    executions: pl.DataFrame
    os_runtime: pl.DataFrame
    projection: pl.DataFrame
    """One row per NVTX range."""
    ranges: pl.DataFrame
    """One row per range name."""
    iterations: pl.DataFrame
    """The rows of `projection` that are iterations; empty when nothing repeats."""
    concurrent_ns: int
    metrics: pl.DataFrame

    @property
    def kernel_ns(self) -> int:
        """Summed kernel time; more than the busy time where kernels overlap."""
        return int(self.kernels["total_ns"].sum())

    @property
    def copy_ns(self) -> int:
        return int(self.copies["total_ns"].sum())

    @property
    def overlapped_copy_ns(self) -> int:
        return self.timeline.copies.total_ns - self.split.copy_only_ns

    @property
    def iteration_ns(self) -> float | None:
        """The median iteration, from its start on the host to the start of the next one's, or to its own end."""
        if self.iterations.is_empty():
            return None
        starts = array_from_column(self.iterations, "start_ns")
        last = max(int(self.iterations["gpu_end_ns"].max() or 0), int(self.iterations["end_ns"].max() or 0))  # type: ignore[arg-type]
        return float(np.median(np.diff(np.append(starts, last))))


def analysis_from_trace(trace: Trace, scope: str = "trace") -> Analysis:
    """All views of `trace`."""
    timeline = timeline_from_trace(trace)
    kernels = tabulate_kernels(trace.kernels)
    projection = project_ranges(trace, timeline)
    return Analysis(
        trace=trace,
        scope=scope,
        timeline=timeline,
        split=split_timeline(timeline),
        kernels=kernels,
        kinds=tabulate_kinds(kernels),
        api=tabulate_api_calls(trace.api),
        copies=tabulate_copies(trace.copies),
        executions=tabulate_executions(trace, timeline),
        os_runtime=tabulate_os_calls(trace.os_runtime),
        projection=projection,
        ranges=tabulate_ranges(projection),
        iterations=_find_iterations(projection),
        concurrent_ns=compute_concurrent_ns(trace),
        metrics=tabulate_metrics(trace, timeline),
    )


def select_measured_part(analysis: Analysis, range_name: str | None = None) -> Analysis:
    """The part that the measured range launched, so that warm-up and tear-down decide nothing.

    `range_name` is by default the range that bounds optpipe's own captures; without it, the iterations that were found,
    from the first after the warm-up to the last; without iterations a trace is judged whole.

    Raises:
        BadInputError: the trace has no range called `range_name`.
    """
    wanted = range_name or MEASURED_RANGE
    named = (pl.col("name").cast(pl.String) == wanted) | (pl.col("family") == wanted)
    found = analysis.projection.filter(named).select("start_ns", "end_ns")
    if found.is_empty() and range_name is None:
        found, wanted = _find_steady_window(analysis.iterations)
        if found.is_empty():
            return analysis
    if found.is_empty():
        names = ", ".join(analysis.ranges["name"].head(8).to_list()) or "none"
        raise BadInputError(f"no NVTX range named {range_name!r};  the trace has: {names}")
    if _holds_everything(analysis, found):
        return replace(analysis, scope=wanted)
    part = _cut_trace(analysis, found)
    if all(frame.height == analysis.trace.tables[table].height for table, frame in part.tables.items()):
        return replace(analysis, scope=wanted)
    return analysis_from_trace(part, scope=wanted)


def _find_steady_window(iterations: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """One window around the iterations, those ahead left out that take over twice the median, and what to call it."""
    if iterations.is_empty():
        return iterations, ""
    walls = iterations["wall_ns"].to_numpy()
    usual = walls <= _WARMED_UP * np.median(walls)
    first = int(np.argmax(usual)) if np.count_nonzero(usual) > 1 else 0
    window = iterations[first:].select(pl.col("start_ns").min(), pl.col("end_ns").max())
    return window, f"iterations {first + 1} to {iterations.height} ({iterations['family'][0]})"


def _holds_everything(analysis: Analysis, ranges: pl.DataFrame) -> bool:
    """Whether one range is all there is, so that nothing has to be cut out."""
    start, end = ranges["start_ns"][0], ranges["end_ns"][0]
    frames = [frame for frame in (analysis.trace.api, analysis.trace.ranges, analysis.trace.os_runtime) if frame.height]
    return ranges.height == 1 and all(
        int(array_from_column(frame, "start_ns").min()) >= start
        and int(array_from_column(frame, "start_ns").max()) < end
        for frame in frames
    )


def _cut_trace(analysis: Analysis, ranges: pl.DataFrame) -> Trace:
    """What was called inside `compute_ranges` (all threads), and the GPU operations of those calls."""
    trace, operations = analysis.trace, analysis.timeline.operations
    starts, ends = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")

    def inside(frame: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        index = np.searchsorted(starts, array_from_column(frame, "start_ns"), side="right") - 1
        return np.asarray((index >= 0) & (array_from_column(frame, "start_ns") < ends[np.maximum(index, 0)]))

    called = inside(trace.api)
    launched = np.where(operations.api_row >= 0, called[operations.api_row] if called.size else False, False)
    kernel_rows = np.sort(operations.row[launched & operations.is_kernel])
    copy_rows = np.sort(operations.row[launched & ~operations.is_kernel])
    return replace(
        trace,
        api=trace.api.filter(called),
        kernels=trace.kernels[kernel_rows],
        copies=trace.copies[copy_rows],
        ranges=trace.ranges.filter(inside(trace.ranges)),
        os_runtime=trace.os_runtime.filter(inside(trace.os_runtime)),
    )


def _find_iterations(projection: pl.DataFrame) -> pl.DataFrame:
    """optpipe's own iterations; in a foreign trace what repeats, those first that launch kernels, outermost, longest in sum."""
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


@dataclass(frozen=True, slots=True)
class _Launched:
    """Operations launched by one thread, in the order of their launch, and running sums over them."""

    launch_starts: TimeArray
    starts: TimeArray
    ends: TimeArray
    gpu_ns: TimeArray
    kernel_ns: TimeArray
    kernels: TimeArray


def project_ranges(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """Every NVTX range with what it launched: one row per range, in the order of their start.

    `family`: the name, with `N` for the number of a repetition that is counted in it.
    `gpu_start_ns`, `gpu_end_ns`: from the first operation launched inside the range (same thread, as nsys does it) to
    the end of the last; null when it launched nothing. `gpu_ns`: the summed time of these operations, `kernel_ns` of
    the kernels among them. `busy_ns` and the idle causes split the *projected* window, whoever launched what runs there.
    """
    ranges = trace.ranges.sort("start_ns", "end_ns", pl.col("name").cast(pl.String), descending=[False, True, False])
    parts = [
        _project(part, _collect_launched_by(trace, timeline, int(part["thread"][0] or 0)))
        for part in ranges.partition_by("thread", maintain_order=True)
    ]
    order = ("start_ns", "end_ns", "depth")
    nothing = ranges.with_columns(pl.lit(None, dtype=pl.Int64).alias(column) for column in _PROJECTED)
    table = pl.concat(parts or [nothing]).sort(*order, descending=[False, True, False])
    start, end = (table[column].fill_null(0).to_numpy() for column in ("gpu_start_ns", "gpu_end_ns"))
    return table.with_columns(
        _name_families(table["name"]).alias("family"),
        pl.Series("busy_ns", sum_within(timeline.busy, start, end)),
        *(pl.Series(f"{cause}_ns", sum_within(timeline.idle[cause], start, end)) for cause in IdleCause),
        (pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"),
    )


def tabulate_ranges(projection: pl.DataFrame) -> pl.DataFrame:
    """Ranges by family, called `name` here: how often, wall time on the host, time on the GPU, and the split of the projected time."""
    sums = ("wall_ns", "gpu_ns", "kernel_ns", "kernels", "busy_ns", *(f"{cause}_ns" for cause in IdleCause))
    return (
        projection.group_by(pl.col("family").alias("name"))
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col(*sums).sum(),
            (pl.col("gpu_end_ns") - pl.col("gpu_start_ns")).sum().alias("projected_ns"),
            pl.col("start_ns").min().alias("first_start_ns"),
            pl.col("depth").min(),
        )
        .sort("wall_ns", "name", descending=[True, False])
    )


def _name_families(names: pl.Series) -> pl.Series:
    """Looked up once per distinct name, not per row."""
    distinct = names.unique()
    families = distinct.cast(pl.String).str.replace(_NUMBERED, "${1}N")
    return names.replace_strict(distinct, families, return_dtype=pl.String) if names.len() else names.cast(pl.String)


def _collect_launched_by(trace: Trace, timeline: Timeline, thread: int) -> _Launched:
    operations = timeline.operations
    api_row = operations.api_row
    if trace.api.height == 0:
        mine = np.zeros(api_row.size, dtype=np.bool_)
        launches = mine.astype(np.int64)
    else:
        mine = (api_row >= 0) & (array_from_column(trace.api, "thread")[api_row] == thread)
        launches = array_from_column(trace.api, "start_ns")[api_row]
    launches, starts, ends = launches[mine], operations.starts[mine], operations.ends[mine]
    is_kernel = operations.is_kernel[mine]
    if (np.diff(launches) < 0).any():
        order = np.argsort(launches, kind="stable")
        launches, starts, ends, is_kernel = launches[order], starts[order], ends[order], is_kernel[order]
    durations = ends - starts
    return _Launched(
        launches,
        starts,
        ends,
        _sum_running(durations),
        _sum_running(np.where(is_kernel, durations, 0)),
        _sum_running(is_kernel),
    )


def _sum_running(values: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> TimeArray:
    """Sums of everything ahead of each position, so that the sum of a slice is one subtraction."""
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _project(ranges: pl.DataFrame, launched: _Launched) -> pl.DataFrame:
    start, end = array_from_column(ranges, "start_ns"), array_from_column(ranges, "end_ns")
    low, high = np.searchsorted(launched.launch_starts, start), np.searchsorted(launched.launch_starts, end)
    some = high > low
    gpu_start = np.zeros(start.size, dtype=np.int64)
    gpu_end = np.zeros(start.size, dtype=np.int64)
    if some.any():
        # reduceat takes a flat list of slice bounds; the odd ones, between two ranges, are computed and dropped.
        bounds = np.stack([low[some], high[some]], axis=1).ravel()
        gpu_start[some] = np.minimum.reduceat(np.append(launched.starts, np.iinfo(np.int64).max), bounds)[::2]
        gpu_end[some] = np.maximum.reduceat(np.append(launched.ends, 0), bounds)[::2]
    null_where_none = pl.when(pl.Series(some))
    return ranges.with_columns(
        null_where_none.then(pl.Series(gpu_start)).alias("gpu_start_ns"),
        null_where_none.then(pl.Series(gpu_end)).alias("gpu_end_ns"),
        pl.Series("gpu_ns", launched.gpu_ns[high] - launched.gpu_ns[low]),
        pl.Series("kernel_ns", launched.kernel_ns[high] - launched.kernel_ns[low]),
        pl.Series("kernels", launched.kernels[high] - launched.kernels[low]),
        pl.Series("depth", _count_depths(start, end)),
    )


def _count_depths(start: TimeArray, end: TimeArray) -> TimeArray:
    """How many ranges of the same thread are still open where each one starts; start must ascend."""
    closed = np.searchsorted(np.sort(np.maximum(end, start + 1)), start, side="right")
    return np.arange(start.size, dtype=np.int64) - closed


CLASSIC_SHARE = 0.9
"""The classic list: what together takes 90 % of the time."""
_DURATION = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
VERSION_SUFFIX = r"_v\d{4,5}(_ptsz|_ptds)?$"
"""What CUPTI appends to the name of an API call."""
_HERTZ_PER_MEGAHERTZ = 1e6


def tabulate_kernels(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels by name, longest total first, with kind, Tensor-Core use, and whether they belong to the first 90 %."""
    table = _sum_by_name(kernels).join(classify_kernels(kernels["name"]), on="name", how="left", maintain_order="left")
    return _add_shares(table)


def tabulate_api_calls(api: pl.DataFrame) -> pl.DataFrame:
    """API calls by name without the version that CUPTI appends, longest total first."""
    versioned = _sum_by_name(api).with_columns(pl.col("name").str.replace(VERSION_SUFFIX, ""))
    # Two versions of one call are rare: only then are the groups merged, which has no median to offer.
    merged = versioned.group_by("name").agg(
        pl.col("count").sum(),
        pl.col("total_ns").sum(),
        (pl.col("total_ns").sum() / pl.col("count").sum()).alias("mean_ns"),
        pl.when(pl.len() == 1).then(pl.col("median_ns").first()).alias("median_ns"),
        pl.col("min_ns").min(),
        pl.col("max_ns").max(),
    )
    return _add_shares(merged.sort("total_ns", "name", descending=[True, False]))


def tabulate_os_calls(os_runtime: pl.DataFrame) -> pl.DataFrame:
    """Operating-system calls by name, longest total first; nsys' own note that it traces them is none."""
    return _add_shares(_sum_by_name(os_runtime).filter(~pl.col("name").str.ends_with("profiling started")))


def tabulate_kinds(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernel time by kind of work, and how much of it ran on Tensor Cores; takes what `tabulate_kernels` gives."""
    on_tensor_cores = pl.col("total_ns").filter(pl.col("tensor_core")).sum().alias("tensor_core_ns")
    table = kernels.group_by("kind").agg(pl.col("count", "total_ns").sum(), on_tensor_cores)
    return _add_shares(table.sort("total_ns", "kind", descending=[True, False]))


def tabulate_copies(copies: pl.DataFrame) -> pl.DataFrame:
    """Copies and memsets by kind and by kind of memory on either side, longest total first."""
    keys = ("kind", "source_memory", "target_memory")
    return (
        copies.with_columns(_DURATION)
        .group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("count"), pl.col("duration_ns").sum().alias("total_ns"), pl.col("bytes").sum()
        )
        .with_columns(
            pl.when(pl.col("total_ns") > 0).then(pl.col("bytes") / (pl.col("total_ns") / 1e9)).alias("bytes_per_s")
        )
        .sort("total_ns", *keys, descending=[True, False, False, False])
    )


def tabulate_executions(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """Per kernel: time in the launching call, time queued until it started, and time running.

    A kernel that starts before its launch call returns was never queued: its queue time is 0. All kernels of a CUDA
    graph share one launch, so their launch time is the graph's, counted once in `launch_ns` by the first of them.
    """
    if trace.kernels.is_empty() or trace.api.is_empty():
        return pl.DataFrame(
            schema={"name": pl.String, **dict.fromkeys(("count", "launch_ns", "queue_ns", "kernel_ns"), pl.Int64)}
        )
    operations = timeline.operations
    launched = operations.is_kernel & (operations.api_row >= 0)
    api_row = operations.api_row[launched]
    start, end = array_from_column(trace.api, "start_ns")[api_row], array_from_column(trace.api, "end_ns")[api_row]
    first = np.zeros(api_row.size, dtype=np.bool_)
    first[np.unique(api_row, return_index=True)[1] if (np.diff(api_row) <= 0).any() else slice(None)] = True
    started, ended = operations.starts[launched], operations.ends[launched]
    return (
        pl.DataFrame(
            {
                "name": trace.kernels["name"].gather(pl.Series(operations.row[launched])),
                "launch_ns": np.where(first, end - start, 0),
                "queue_ns": np.maximum(started - end, 0),
                "kernel_ns": ended - started,
            }
        )
        .group_by("name")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.col("launch_ns", "queue_ns", "kernel_ns").sum())
        .with_columns(pl.col("name").cast(pl.String))
        .sort("kernel_ns", "name", descending=[True, False])
    )


def compute_concurrent_ns(trace: Trace) -> int:
    """The time in which kernels of at least two streams run at once: by inclusion and exclusion over the streams.

    For two streams exact; for more, the time covered at least twice, found by sweeping the streams' own busy times.
    """
    keys = trace.kernels.select("device", "stream").unique()
    if keys.height < 2:
        return 0
    unions = [
        unite_intervals(array_from_column(part, "start_ns"), array_from_column(part, "end_ns"))
        for part in trace.kernels.partition_by("device", "stream", maintain_order=True)
    ]
    edges = np.concatenate([*(part.starts for part in unions), *(part.ends for part in unions)])
    steps = np.repeat([1, -1], [edges.size // 2, edges.size // 2])
    order = np.argsort(edges, kind="stable")
    running = np.cumsum(steps[order])[:-1]
    lengths = np.diff(edges[order])
    return int(lengths[running >= 2].sum())


def _sum_by_name(frame: pl.DataFrame) -> pl.DataFrame:
    return (
        frame.select("name", _DURATION)
        .group_by("name")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.col("duration_ns").mean().alias("mean_ns"),
            pl.col("duration_ns").median().alias("median_ns"),
            pl.col("duration_ns").min().alias("min_ns"),
            pl.col("duration_ns").max().alias("max_ns"),
        )
        .with_columns(pl.col("name").cast(pl.String))
        .sort("total_ns", "name", descending=[True, False])
    )


def _add_shares(table: pl.DataFrame) -> pl.DataFrame:
    """Adds `share`, and `in_classic_list`: the shortest head of the table that reaches 90 %."""
    total = pl.col("total_ns").sum()
    share = pl.when(total > 0).then(pl.col("total_ns") / total).otherwise(0.0)
    return table.with_columns(share.alias("share")).with_columns(
        ((pl.col("share").cum_sum() - pl.col("share")) < CLASSIC_SHARE - 1e-12).alias("in_classic_list")
    )


def tabulate_metrics(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """GPU metrics sampled inside the timeline: mean, mean while a kernel runs, and most; frequencies in MHz."""
    inside = trace.metrics.filter(pl.col("time_ns").is_between(timeline.start_ns, timeline.end_ns))
    at = array_from_column(inside, "time_ns")
    busy = sum_within(timeline.busy, at, at + 1) > 0
    # nsys names the unit MHz and exports the value in Hz.
    in_hertz = pl.col("name").cast(pl.String).str.contains("[MHz]", literal=True) & (
        pl.col("value") > _HERTZ_PER_MEGAHERTZ
    )
    value = pl.when(in_hertz).then(pl.col("value") / _HERTZ_PER_MEGAHERTZ).otherwise(pl.col("value"))
    return (
        inside.with_columns(value.alias("value"), pl.Series("busy", busy, dtype=pl.Boolean))
        .group_by("device", pl.col("name").cast(pl.String))
        .agg(
            pl.len().cast(pl.Int64).alias("samples"),
            pl.col("value").mean().alias("mean"),
            pl.col("value").filter(pl.col("busy")).mean().alias("mean_busy"),
            pl.col("value").max().alias("max"),
        )
        .sort("device", "name")
    )
