"""The gaps that matter for inference: times without a kernel over 50 µs, or over 5 % of an iteration where that is less.

`nsys analyze` begins at 500 ms, the length of a training step; an inference is over by then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from optpipe.trace.findings.bottleneck import GAP_NS
from optpipe.trace.timeline.analysis import Analysis
from optpipe.trace.timeline.intervals import TimeArray, TimeIntervals, complement_intervals, sum_within
from optpipe.trace.timeline.kernels import shorten_name
from optpipe.trace.timeline.timeline import IdleCause
from optpipe.trace.timeline.views import VERSION_SUFFIX

GAP_SHARE = 0.05
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which no kernel runs."""

    start_ns: int
    duration_ns: int
    by_cause: Mapping[IdleCause, int]
    """What it waited for; together its duration."""
    before: str | None
    """The kernel or copy that ends it; None at the end of the trace."""
    host: str
    """The CUDA calls that the host was in."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """All gaps of at least `least_ns`, and the longest of them."""

    least_ns: int
    count: int
    total_ns: int
    longest: tuple[Gap, ...]


def find_gaps(measured: Analysis) -> Gaps:
    """The times in which no kernel runs, as far as each one matters; the longest first."""
    least_ns = choose_gap_threshold_ns(measured)
    free = complement_intervals(measured.timeline.busy, measured.timeline.start_ns, measured.timeline.end_ns)
    lengths = free.ends - free.starts
    kept = lengths >= least_ns
    longest = describe_gaps(measured, free.starts[kept], free.ends[kept], most=_SHOWN)
    return Gaps(least_ns, int(kept.sum()), int(lengths[kept].sum()), longest)


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


def describe_gaps(measured: Analysis, starts: TimeArray, ends: TimeArray, most: int = 5) -> tuple[Gap, ...]:
    """The longest gaps: where they are in the trace, what ends them, and what the host did meanwhile."""
    longest = np.argsort(starts - ends, kind="stable")[:most]
    starts, ends = starts[longest], ends[longest]
    causes = {cause: sum_within(measured.timeline.idle[cause], starts, ends).tolist() for cause in IdleCause}
    return tuple(
        Gap(
            start_ns=start,
            duration_ns=end - start,
            by_cause={cause: parts[place] for cause, parts in causes.items() if parts[place]},
            before=_find_operation_after(measured, end),
            host=", ".join(_find_calls_during(measured, start, end)) or "no CUDA call",
        )
        for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    )


def _find_operation_after(measured: Analysis, end_ns: int) -> str | None:
    operations, trace = measured.timeline.operations, measured.trace
    following = int(np.searchsorted(operations.starts, end_ns))
    if following >= operations.starts.size:
        return None
    row = int(operations.row[following])
    return (
        shorten_name(str(trace.kernels["name"][row]))
        if operations.is_kernel[following]
        else str(trace.copies["kind"][row])
    )


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
