"""Two profiles side by side, per iteration where both have iterations: what became faster or slower, came or went."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import polars as pl

from optpipe.trace.layers.layers import attribute_kernels
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.timeline import array_from_column

_NOTABLE_SHARE = 0.05
_NOTABLE_NS = 1_000.0


class TraceChange(StrEnum):
    """What happened to a kernel or a layer from the first profile to the second."""

    FASTER = "faster"
    SLOWER = "slower"
    APPEARED = "appeared"
    VANISHED = "vanished"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class DiffSide:
    """One of the two profiles: the measured part, and what is known of it beside its recording."""

    measured: Analysis
    layered: Analysis | None = None
    """Where the layers are marked, when that is not the measured part."""
    layer_ns: Mapping[str, float] = field(default_factory=dict)
    """Times of one inference's layers on a CPU, which no recording has."""
    unprofiled_iteration_ns: float | None = None


@dataclass(frozen=True, slots=True)
class DiffRow:
    """A kernel, layer or range in both profiles; 0 where one has none. Times are nanoseconds, as `ProfileDiff` counts them."""

    name: str
    before_ns: float
    after_ns: float
    change_ns: float
    before_count: float
    after_count: float
    change: TraceChange


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """Times are (before, after) in nanoseconds per iteration where `per_iteration`, else over the whole measured part."""

    per_iteration: bool
    iterations: tuple[int, int]
    host_ns: tuple[float, float]
    """One iteration on the host, or all of the measured part; outside the profiler where `unprofiled`."""
    unprofiled: bool
    span_ns: tuple[float, float]
    busy_ns: tuple[float, float]
    idle_ns: tuple[float, float]
    """On the GPU."""
    kernels: tuple[DiffRow, ...]
    """The largest change first, as everywhere here."""
    layers: tuple[DiffRow, ...]
    """Empty where layers are not known in both."""
    ranges: tuple[DiffRow, ...]
    """Time on the host by range."""


def diff_profiles(one: DiffSide, other: DiffSide) -> ProfileDiff:
    """Aligns kernels by name, layers and ranges by the range's name."""
    before, after = one.measured, other.measured
    per_iteration = bool(before.iterations.height and after.iterations.height)
    counts = (max(before.iterations.height, 1), max(after.iterations.height, 1)) if per_iteration else (1, 1)
    sides = list(zip((before, after), counts, strict=True))
    kernels, ranges = (
        [make(side, per_iteration=per_iteration).with_columns(pl.col("ns", "count") / count) for side, count in sides]
        for make in (_list_kernels, _list_ranges)
    )
    layers = [_list_layers(side, per_iteration=per_iteration) for side in (one, other)]
    host_ns, unprofiled = _compare_host_times(one, other, per_iteration=per_iteration)
    spans, busy = zip(*(_sum_gpu_time(each, per_iteration=per_iteration) for each in (before, after)), strict=True)
    span_ns, busy_ns = ((values[0] / counts[0], values[1] / counts[1]) for values in (spans, busy))
    return ProfileDiff(
        per_iteration=per_iteration,
        iterations=counts,
        host_ns=host_ns,
        unprofiled=unprofiled,
        span_ns=span_ns,
        busy_ns=busy_ns,
        idle_ns=(span_ns[0] - busy_ns[0], span_ns[1] - busy_ns[1]),
        kernels=_align_rows(*kernels),
        layers=_align_rows(*layers) if all(each.height for each in layers) else (),
        ranges=_align_rows(*ranges),
    )


def _list_ranges(analysis: Analysis, *, per_iteration: bool) -> pl.DataFrame:
    """Without the ranges that bound iterations, where it is these that are compared."""
    own = ~pl.col("name").str.starts_with("optpipe.")
    return analysis.ranges.filter(own if per_iteration else True).select("name", "count", ns="wall_ns")


def _list_kernels(analysis: Analysis, *, per_iteration: bool) -> pl.DataFrame:
    """Per iteration only what iterations launched: what runs beside them is not to be divided by their number."""
    if not per_iteration:
        return analysis.kernels.select("name", "count", ns="total_ns")
    operations = analysis.timeline.operations
    launched = operations.is_kernel & (operations.api_row >= 0)
    start = array_from_column(analysis.trace.api, "start_ns")[operations.api_row[launched]]
    starts, ends = array_from_column(analysis.iterations, "start_ns"), array_from_column(analysis.iterations, "end_ns")
    index = starts.searchsorted(start, side="right") - 1
    inside = (index >= 0) & (start < ends[index.clip(0)])
    rows = analysis.trace.kernels[operations.row[launched][inside]]
    duration = (pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")
    table: pl.DataFrame = rows.group_by(pl.col("name").cast(pl.String)).agg(pl.len().alias("count"), duration)
    return table


def _list_layers(side: DiffSide, *, per_iteration: bool) -> pl.DataFrame:
    part = side.layered or side.measured
    marked = attribute_kernels(part)
    if marked.height:
        count = max(part.iterations.height, 1) if per_iteration else 1
        sums = marked.group_by(pl.col("layer").alias("name")).agg(
            count=pl.col("kernels").sum(), ns=pl.col("kernel_ns").sum()
        )
        return sums.with_columns(pl.col("ns", "count") / count)
    schema = {"name": pl.String, "count": pl.Float64, "ns": pl.Float64}
    return pl.DataFrame([(name, 1.0, ns) for name, ns in side.layer_ns.items()], schema=schema, orient="row")


def _compare_host_times(one: DiffSide, other: DiffSide, *, per_iteration: bool) -> tuple[tuple[float, float], bool]:
    if per_iteration and one.unprofiled_iteration_ns and other.unprofiled_iteration_ns:
        return (one.unprofiled_iteration_ns, other.unprofiled_iteration_ns), True
    found = [side.measured.iteration_ns if per_iteration else side.measured.split.span_ns for side in (one, other)]
    return (found[0] or 0.0, found[1] or 0.0), False


def _sum_gpu_time(analysis: Analysis, *, per_iteration: bool) -> tuple[int, int]:
    """The time span on the GPU, and what of it kernels run: of the iterations alone where these are compared."""
    if not per_iteration:
        return analysis.split.span_ns, analysis.split.busy_ns
    rows = analysis.iterations
    return int((rows["gpu_end_ns"] - rows["gpu_start_ns"]).sum()), int(rows["busy_ns"].sum())


def _align_rows(before: pl.DataFrame, after: pl.DataFrame) -> tuple[DiffRow, ...]:
    joined = before.join(after, on="name", how="full", coalesce=True, suffix="_after")
    columns = ("name", "ns", "ns_after", "count", "count_after")
    rows = []
    for name, before_ns, after_ns, before_count, after_count in joined.select(columns).iter_rows():
        change = _classify_change(before_ns, after_ns)
        times = float(before_ns or 0.0), float(after_ns or 0.0)
        rows.append(DiffRow(name, *times, times[1] - times[0], before_count or 0.0, after_count or 0.0, change))
    return tuple(sorted(rows, key=lambda row: (-abs(row.change_ns), row.name)))


def _classify_change(before_ns: float | None, after_ns: float | None) -> TraceChange:
    if before_ns is None:
        return TraceChange.APPEARED
    if after_ns is None:
        return TraceChange.VANISHED
    if abs(after_ns - before_ns) < max(_NOTABLE_SHARE * max(before_ns, after_ns), _NOTABLE_NS):
        return TraceChange.SAME
    return TraceChange.FASTER if after_ns < before_ns else TraceChange.SLOWER
