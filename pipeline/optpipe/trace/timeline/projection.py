"""NVTX ranges projected on the GPU: what a range launched, when that ran, and what limited it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.intervals import TimeArray, sum_within
from optpipe.trace.timeline.timeline import IdleCause, Timeline, array_from_column

_NUMBERED = r"(?i)^((?:.*[^a-z])?(?:iter|iteration|step|batch|frame|request|profilerstep)[\s_#:=.-]*)\d+$"
"""Repetitions that are numbered: `iteration 7`, `step_7`, `ProfilerStep#7`. Layers are numbered too, but do not repeat."""


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
    parts = [_project(part, _collect_launched_by(trace, timeline, thread)) for thread, part in _by_thread(ranges)]
    order = ("start_ns", "end_ns", "depth")
    table = pl.concat(parts).sort(*order, descending=[False, True, False]) if parts else _project_nothing(ranges)
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


def _by_thread(ranges: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    parts = ranges.partition_by("thread", maintain_order=True)
    return [(int(part["thread"][0] or 0), part) for part in parts]


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


def _project_nothing(ranges: pl.DataFrame) -> pl.DataFrame:
    added = ("gpu_start_ns", "gpu_end_ns", "gpu_ns", "kernel_ns", "kernels", "depth")
    return ranges.with_columns(pl.lit(None, dtype=pl.Int64).alias(column) for column in added)
