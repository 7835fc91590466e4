"""The gaps that matter for inference: times without a kernel over 50 µs, or over 5 % of an iteration where that is less.

`nsys analyze` begins at 500 ms, the length of a training step; an inference is over by then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from optpipe.trace.findings.bottleneck import GAP_NS
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.intervals import (
    TimeArray,
    TimeIntervals,
    complement_intervals,
    sum_within,
)
from optpipe.trace.timeline.kernels import shorten_name
from optpipe.trace.timeline.timeline import IdleCause
from optpipe.trace.timeline.views import VERSION_SUFFIX

GAP_SHARE = 0.05
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Gaps:
    """All gaps of at least `least_ns`, and the longest of them with what they waited for."""

    least_ns: int
    count: int
    total_ns: int
    rows: tuple[dict[str, Any], ...]


def find_gaps(measured: Analysis) -> Gaps:
    """The times in which no kernel runs, as far as each one matters; the longest first."""
    least_ns = choose_gap_threshold_ns(measured)
    free = complement_intervals(measured.timeline.busy, measured.timeline.start_ns, measured.timeline.end_ns)
    lengths = free.ends - free.starts
    kept = np.flatnonzero(lengths >= least_ns)
    kept = kept[np.argsort(-lengths[kept], kind="stable")]
    longest = kept[:_SHOWN]
    causes = {
        cause: sum_within(measured.timeline.idle[cause], free.starts[longest], free.ends[longest])
        for cause in IdleCause
    }
    rows = describe_gaps(measured, free.starts[longest], free.ends[longest], most=_SHOWN)
    by_cause = [{str(cause): int(ns[place]) for cause, ns in causes.items() if ns[place]} for place in range(len(rows))]
    return Gaps(
        least_ns,
        int(kept.size),
        int(lengths[kept].sum()),
        tuple({**row, "by_cause": split} for row, split in zip(rows, by_cause, strict=True)),
    )


def choose_gap_threshold_ns(measured: Analysis) -> int:
    """How long a gap must be to matter."""
    iteration_ns = measured.iteration_ns
    return GAP_NS if iteration_ns is None else int(min(GAP_NS, GAP_SHARE * iteration_ns))


def has_notable_gaps(measured: Analysis, gaps: TimeIntervals) -> bool:
    """Whether one of `gaps` matters, or all of an iteration's together do: a hundred launches that each wait 3 µs."""
    if not gaps.starts.size:
        return False
    least_ns = choose_gap_threshold_ns(measured)
    iterations = max(measured.iterations.height, 1)
    return bool((gaps.ends - gaps.starts).max() >= least_ns or gaps.total_ns >= least_ns * iterations)


def describe_gaps(measured: Analysis, starts: TimeArray, ends: TimeArray, most: int = 5) -> tuple[dict[str, Any], ...]:
    """The longest gaps: where they are in the trace, what ends them, and what the host did meanwhile."""
    longest = np.argsort(starts - ends, kind="stable")[:most]
    operations, trace = measured.timeline.operations, measured.trace
    rows = []
    for index in longest.tolist():
        following = int(np.searchsorted(operations.starts, ends[index]))
        row: dict[str, Any] = {"start_ns": int(starts[index]), "duration_ns": int(ends[index] - starts[index])}
        if following < operations.starts.size and operations.is_kernel[following]:
            row["before"] = shorten_name(str(trace.kernels["name"][int(operations.row[following])]))
        elif following < operations.starts.size:
            row["before"] = str(trace.copies["kind"][int(operations.row[following])])
        row["host"] = ", ".join(_find_calls_during(measured, int(starts[index]), int(ends[index]))) or "no CUDA call"
        rows.append(row)
    return tuple(rows)


def _find_calls_during(measured: Analysis, start_ns: int, end_ns: int) -> Iterable[str]:
    api = measured.trace.api
    if api["start_ns"].is_sorted():  # as in almost every export: then nothing that starts later has to be looked at
        api = api.head(int(api["start_ns"].search_sorted(end_ns)))
    overlapping = api.filter(pl.col("end_ns") > start_ns)
    overlapping = overlapping.filter(pl.col("start_ns") < end_ns)
    names = overlapping.with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("ns")).sort("ns", descending=True)[
        "name"
    ]
    return names.cast(pl.String).str.replace(VERSION_SUFFIX, "").unique(maintain_order=True).head(2).to_list()
