"""Views of what is recorded on request only: memory use and GPU metrics."""

import polars as pl

from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline.intervals import sum_within
from optpipe.trace.timeline.timeline import Timeline, array_from_column

_HERTZ_PER_MEGAHERTZ = 1e6


def tabulate_memory(trace: Trace, timeline: Timeline) -> pl.DataFrame:
    """Memory by device and kind inside the timeline: how much is live at its start, at most, and at its end.

    Only what was allocated since the recording began is known; freeing something older counts as a call and no bytes.
    """
    rows = [
        {"device": key[0], "kind": key[1], **_sum_levels(part, timeline.start_ns, timeline.end_ns)}
        for key, part in sorted(trace.memory.group_by("device", "kind"), key=lambda item: str(item[0]))
    ]
    schema = {"device": pl.Int64, "kind": pl.String, **dict.fromkeys(_LEVELS, pl.Int64)}
    return pl.DataFrame(rows, schema=schema).sort("peak_bytes", "device", "kind", descending=[True, False, False])


_LEVELS = ("start_bytes", "peak_bytes", "end_bytes", "allocations", "frees", "allocated_bytes")


def _sum_levels(events: pl.DataFrame, start_ns: int, end_ns: int) -> dict[str, int]:
    live: dict[tuple[int, int], int] = {}
    level = peak = at_start = 0
    allocations = frees = allocated = 0
    for time_ns, pid, address, size, allocates in (
        events.sort("time_ns", maintain_order=True)
        .select("time_ns", "pid", "address", "bytes", "allocates")
        .iter_rows()
    ):
        if time_ns > end_ns:
            break
        inside = time_ns >= start_ns
        if allocates:
            live[pid, address] = size
            level += size
            allocations, allocated = allocations + inside, allocated + inside * size
        else:
            level -= live.pop((pid, address), 0)
            frees += inside
        at_start = at_start if inside else level
        peak = max(peak, level) if inside else peak
    values = (at_start, max(peak, at_start), level, allocations, frees, allocated)
    return dict(zip(_LEVELS, (int(value) for value in values), strict=True))


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
