"""Two profiles side by side, per iteration where both have iterations: what became faster or slower, came or went."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import polars as pl

from optpipe.trace.layers.layers import attribute_kernels
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.kernels import classify_kernel

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
class ProfileDiff:
    """Times are nanoseconds per iteration where `per_iteration`, else over the whole measured part."""

    per_iteration: bool
    iterations: tuple[int, int]
    host_ns: tuple[float, float]
    """One iteration on the host, or all of the measured part; outside the profiler where `unprofiled`."""
    unprofiled: bool
    span_ns: tuple[float, float]
    busy_ns: tuple[float, float]
    idle_ns: tuple[float, float]
    """On the GPU."""
    kernels: pl.DataFrame
    kinds: pl.DataFrame
    layers: pl.DataFrame
    """Empty where layers are not known in both."""
    ranges: pl.DataFrame
    """Time on the host by range."""

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "per_iteration": self.per_iteration,
            "iterations": list(self.iterations),
            "host_ns": list(self.host_ns),
            "unprofiled": self.unprofiled,
            "span_ns": list(self.span_ns),
            "busy_ns": list(self.busy_ns),
            "idle_ns": list(self.idle_ns),
            "kernels": self.kernels.to_dicts(),
            "kinds": self.kinds.to_dicts(),
            "layers": self.layers.to_dicts(),
            "ranges": self.ranges.to_dicts(),
        }


def diff_profiles(one: DiffSide, other: DiffSide) -> ProfileDiff:
    """Aligns kernels by name, layers and ranges by the range's name."""
    before, after = one.measured, other.measured
    per_iteration = bool(before.iterations.height and after.iterations.height)
    counts = (max(before.iterations.height, 1), max(after.iterations.height, 1)) if per_iteration else (1, 1)
    pair = (
        (_sum_iteration_kernels(before), _sum_iteration_kernels(after))
        if per_iteration
        else (before.kernels, after.kernels)
    )
    kernels = _align_tables(
        *(_sum_times(table, "name", "total_ns", count) for table, count in zip(pair, counts, strict=True))
    )
    layers = [_layers(side, per_iteration=per_iteration) for side in (one, other)]
    ranges = [
        _sum_times(_own_ranges(each, per_iteration=per_iteration), "name", "wall_ns", count)
        for each, count in zip((before, after), counts, strict=True)
    ]
    host_ns, unprofiled = _host(one, other, per_iteration=per_iteration)
    return ProfileDiff(
        per_iteration=per_iteration,
        iterations=counts,
        host_ns=host_ns,
        unprofiled=unprofiled,
        span_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="span"),
        busy_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="busy"),
        idle_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="idle"),
        kernels=kernels,
        kinds=_sum_by_kind(kernels),
        layers=_align_tables(*layers)
        if layers[0].height and layers[1].height
        else _align_tables(layers[0].clear(), layers[1].clear()),
        ranges=_align_tables(*ranges),
    )


def _own_ranges(analysis: Analysis, *, per_iteration: bool) -> pl.DataFrame:
    """Without the ranges that bound iterations, where it is these that are compared."""
    return analysis.ranges.filter(~pl.col("name").str.starts_with("optpipe.")) if per_iteration else analysis.ranges


def _host(one: DiffSide, other: DiffSide, *, per_iteration: bool) -> tuple[tuple[float, float], bool]:
    if per_iteration and one.unprofiled_iteration_ns and other.unprofiled_iteration_ns:
        return (one.unprofiled_iteration_ns, other.unprofiled_iteration_ns), True
    found = [side.measured.iteration_ns if per_iteration else side.measured.split.span_ns for side in (one, other)]
    return (found[0] or 0.0, found[1] or 0.0), False


def _layers(side: DiffSide, *, per_iteration: bool) -> pl.DataFrame:
    part = side.layered or side.measured
    marked = attribute_kernels(part)
    if marked.height:
        return _sum_times(marked, "layer", "kernel_ns", max(part.iterations.height, 1) if per_iteration else 1)
    schema = {"name": pl.String, "ns": pl.Float64, "count": pl.Float64}
    return pl.DataFrame([(name, ns, 1.0) for name, ns in side.layer_ns.items()], schema=schema, orient="row")


def _sum_iteration_kernels(analysis: Analysis) -> pl.DataFrame:
    """Kernel time by name of what iterations launched, so that what runs beside them is not divided by their number."""
    operations = analysis.timeline.operations
    launched = operations.is_kernel & (operations.api_row >= 0)
    start = analysis.trace.api["start_ns"].gather(pl.Series(operations.api_row[launched])).to_numpy()
    starts, ends = analysis.iterations["start_ns"].to_numpy(), analysis.iterations["end_ns"].to_numpy()
    index = starts.searchsorted(start, side="right") - 1
    inside = (index >= 0) & (start < ends[index.clip(0)])
    rows = analysis.trace.kernels[operations.row[launched][inside]]
    table: pl.DataFrame = (
        rows.group_by(pl.col("name").cast(pl.String))
        .agg(pl.len().cast(pl.Int64).alias("count"), (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns"))
        .sort("total_ns", "name", descending=[True, False])
    )
    return table


def _per_iteration(
    before: Analysis, after: Analysis, counts: tuple[int, int], *, per_iteration: bool, column: str
) -> tuple[float, float]:
    values = []
    for analysis, count in zip((before, after), counts, strict=True):
        if per_iteration:
            projected = analysis.iterations.select(
                span=(pl.col("gpu_end_ns") - pl.col("gpu_start_ns")).sum(), busy=pl.col("busy_ns").sum()
            ).row(0, named=True)
        else:
            projected = {"span": analysis.split.span_ns, "busy": analysis.split.busy_ns}
        projected["idle"] = projected["span"] - projected["busy"]
        values.append(projected[column] / count)
    return values[0], values[1]


def _sum_times(table: pl.DataFrame, key: str, column: str, count: int) -> pl.DataFrame:
    number = "kernels" if key == "layer" else "count"
    return table.group_by(pl.col(key).alias("name")).agg(
        (pl.col(column).sum() / count).alias("ns"), (pl.col(number).sum() / count).alias("count")
    )


def _align_tables(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    joined = before.join(after, on="name", how="full", coalesce=True, suffix="_after")
    change = (pl.col("after_ns") - pl.col("before_ns")).alias("change_ns")
    notable = change.abs() >= pl.max_horizontal(
        _NOTABLE_SHARE * pl.max_horizontal("before_ns", "after_ns"), pl.lit(_NOTABLE_NS)
    )
    return (
        joined.select(
            "name",
            before_ns=pl.col("ns").fill_null(0.0),
            after_ns=pl.col("ns_after").fill_null(0.0),
            before_count=pl.col("count").fill_null(0.0),
            after_count=pl.col("count_after").fill_null(0.0),
            was=pl.col("ns").is_not_null(),
            stays=pl.col("ns_after").is_not_null(),
        )
        .with_columns(change)
        .with_columns(
            pl.when(~pl.col("was")).then(pl.lit(str(TraceChange.APPEARED)))
            .when(~pl.col("stays")).then(pl.lit(str(TraceChange.VANISHED)))
            .when(~notable).then(pl.lit(str(TraceChange.SAME)))
            .when(pl.col("change_ns") < 0).then(pl.lit(str(TraceChange.FASTER)))
            .otherwise(pl.lit(str(TraceChange.SLOWER)))
            .alias("change")
        )
        .drop("was", "stays")
        .sort(pl.col("change_ns").abs(), "name", descending=[True, False])
    )  # fmt: skip


def _sum_by_kind(kernels: pl.DataFrame) -> pl.DataFrame:
    kinds = pl.Series("kind", [str(classify_kernel(name)) for name in kernels["name"].to_list()], dtype=pl.String)
    return (
        kernels.with_columns(kinds)
        .group_by("kind")
        .agg(pl.col("before_ns", "after_ns", "before_count", "after_count", "change_ns").sum())
        .sort(pl.col("change_ns").abs(), "kind", descending=[True, False])
    )
