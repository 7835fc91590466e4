"""A training or inference loop: how long each iteration waits for data, and how long it computes.

The wait is what ranges of the iteration say that are named after loading (`data`, `load`, `fetch`, `next batch`, or the
`optpipe.data` that optpipe marks around torch's DataLoader). Without such a range it is not known, and the idle time before
the first launch of each iteration stands beside it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from optpipe.trace.analysis import (
    Analysis,
    TimeArray,
    TimeIntervals,
    array_from_column,
    sum_within,
    unite_intervals,
)
from optpipe.trace.read import match_names

DATA_RANGES = (
    r"(?i)(^|[^a-z])(optpipe\.data|data_?load(er|ing)?|load_?(data|batch)|fetch(_?(data|batch))?|"
    r"(next|get)_?batch|input_?pipeline|data|dataloader|enumerate\(DataLoader\).*__next__|batch_?wait)([^a-z]|$)"
)
_BLOCKING_COPIES = r"^(cudaMemcpy|cuMemcpy)(2D|3D|[DH]to[DH])?(_v\d+)?(_ptsz|_ptds)?$"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Loop:
    """One iteration of a loop, in ns; parts that cannot be told are None."""

    range: str
    iterations: int
    iterations_per_s: float
    period_ns: Spread
    data_range: str | None
    """The range that waits for data; None if none is named after it."""
    data_wait_ns: Spread | None
    gpu_busy_ns: Spread | None
    """None without kernels."""
    idle_before_first_launch_ns: Spread | None
    """The GPU is idle from the start of the iteration to its first operation."""
    blocking_copies: float
    """Copies per iteration whose call returns only when they are done."""
    blocking_copy_ns: float


def describe_loop(measured: Analysis) -> Loop | None:
    """None if fewer than two iterations were measured."""
    rows = measured.iterations.sort("start_ns")
    if rows.height < 2:
        return None
    starts, ends = array_from_column(rows, "start_ns"), array_from_column(rows, "end_ns")
    periods = np.append(np.diff(starts), ends[-1] - starts[-1])
    waits = find_data_waits(measured)
    data_wait = (
        None if waits is None else _spread(sum_within(waits.times, starts, starts + periods))
    )
    busy = idle = None
    if measured.trace.kernels.height:
        busy = _spread(sum_within(measured.timeline.busy, starts, starts + periods))
        launched = rows.drop_nulls("gpu_start_ns")
        before = array_from_column(launched, "gpu_start_ns") - array_from_column(
            launched, "start_ns"
        )
        idle = _spread(np.maximum(before, 0)) if launched.height else None
    copies = measured.trace.api.filter(match_names(measured.trace.api, _BLOCKING_COPIES))
    copy_ns = int((copies["end_ns"] - copies["start_ns"]).sum())
    total_ns = max(int(ends[-1] - starts[0]), 1)
    return Loop(
        range=str(rows["family"][0]),
        iterations=rows.height,
        iterations_per_s=rows.height / total_ns * 1e9,
        period_ns=_spread(periods),
        data_range=None if waits is None else waits.name,
        data_wait_ns=data_wait,
        gpu_busy_ns=busy,
        idle_before_first_launch_ns=idle,
        blocking_copies=copies.height / rows.height,
        blocking_copy_ns=copy_ns / rows.height,
    )


class DataWaits(NamedTuple):
    name: str
    """The range that waits longest."""
    times: TimeIntervals


def find_data_waits(measured: Analysis) -> DataWaits | None:
    """The ranges of a repeated loop that are named after loading; None without iterations or such a range."""
    if measured.iterations.height < 2:
        return None
    own = str(measured.iterations["family"][0])
    named = match_names(measured.projection, DATA_RANGES)
    waits = measured.projection.filter(named, pl.col("family") != own).sort("start_ns")
    if waits.is_empty():
        return None
    longest = waits.group_by("family").agg(pl.col("wall_ns").sum()).sort("wall_ns", "family")
    times = unite_intervals(*(array_from_column(waits, edge) for edge in ("start_ns", "end_ns")))
    return DataWaits(str(longest["family"][-1]), times)


def _spread(values: TimeArray) -> Spread:
    low, median, high = np.percentile(values.astype(np.float64), [25, 50, 75])
    return Spread(float(median), float(low), float(high))
