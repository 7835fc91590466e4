"""Two profiles side by side, per iteration where both have iterations: what became faster or slower, came or went."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import polars as pl

from optpipe.trace.analysis import Analysis
from optpipe.trace.kernels import kind_of
from optpipe.trace.layers import layer_kernels

_NOTABLE_SHARE = 0.05
_NOTABLE_NS = 1_000.0


class Change(StrEnum):
    """What happened to a kernel or a layer from the first profile to the second."""

    FASTER = "faster"
    SLOWER = "slower"
    APPEARED = "appeared"
    VANISHED = "vanished"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Diff:
    """Times are nanoseconds per iteration where `per_iteration`, else over the whole measured part."""

    per_iteration: bool
    iterations: tuple[int, int]
    span_ns: tuple[float, float]
    busy_ns: tuple[float, float]
    idle_ns: tuple[float, float]
    kernels: pl.DataFrame
    kinds: pl.DataFrame
    layers: pl.DataFrame
    """Empty where NVTX does not name layers in both."""

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "per_iteration": self.per_iteration,
            "iterations": list(self.iterations),
            "span_ns": list(self.span_ns),
            "busy_ns": list(self.busy_ns),
            "idle_ns": list(self.idle_ns),
            "kernels": self.kernels.to_dicts(),
            "kinds": self.kinds.to_dicts(),
            "layers": self.layers.to_dicts(),
        }


def diff(before: Analysis, after: Analysis) -> Diff:
    """Aligns kernels by name and layers by their range's name."""
    per_iteration = bool(before.iterations.height and after.iterations.height)
    counts = (max(before.iterations.height, 1), max(after.iterations.height, 1)) if per_iteration else (1, 1)
    pair = (_in_iterations(before), _in_iterations(after)) if per_iteration else (before.kernels, after.kernels)
    kernels = _aligned(*(_times(table, "name", "total_ns", count) for table, count in zip(pair, counts, strict=True)))
    layers = [
        _times(layer_kernels(each), "layer", "kernel_ns", count)
        for each, count in zip((before, after), counts, strict=True)
    ]
    return Diff(
        per_iteration=per_iteration,
        iterations=counts,
        span_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="span"),
        busy_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="busy"),
        idle_ns=_per_iteration(before, after, counts, per_iteration=per_iteration, column="idle"),
        kernels=kernels,
        kinds=_by_kind(kernels),
        layers=_aligned(*layers) if layers[0].height and layers[1].height else layers[0].clear(),
    )


def _in_iterations(analysis: Analysis) -> pl.DataFrame:
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


def _times(table: pl.DataFrame, key: str, column: str, count: int) -> pl.DataFrame:
    number = "kernels" if key == "layer" else "count"
    return table.group_by(pl.col(key).alias("name")).agg(
        (pl.col(column).sum() / count).alias("ns"), (pl.col(number).sum() / count).alias("count")
    )


def _aligned(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
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
            pl.when(~pl.col("was")).then(pl.lit(str(Change.APPEARED)))
            .when(~pl.col("stays")).then(pl.lit(str(Change.VANISHED)))
            .when(~notable).then(pl.lit(str(Change.SAME)))
            .when(pl.col("change_ns") < 0).then(pl.lit(str(Change.FASTER)))
            .otherwise(pl.lit(str(Change.SLOWER)))
            .alias("change")
        )
        .drop("was", "stays")
        .sort(pl.col("change_ns").abs(), "name", descending=[True, False])
    )  # fmt: skip


def _by_kind(kernels: pl.DataFrame) -> pl.DataFrame:
    kinds = pl.Series("kind", [str(kind_of(name)) for name in kernels["name"].to_list()], dtype=pl.String)
    return (
        kernels.with_columns(kinds)
        .group_by("kind")
        .agg(pl.col("before_ns", "after_ns", "before_count", "after_count", "change_ns").sum())
        .sort(pl.col("change_ns").abs(), "kind", descending=[True, False])
    )
