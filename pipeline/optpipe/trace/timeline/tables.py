"""The tables an engineer would make by hand: what takes the time, by kernel, API call, copy, launch, stream and GPU metric."""

import numpy as np
import polars as pl

from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.kernels import classify_kernels
from optpipe.trace.timeline.timeline import Timeline, array_from_column, sum_within, unite_intervals

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
