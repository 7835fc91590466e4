"""Every view of one trace, made once: what rules, reports and the diff read."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from optpipe.core.errors import BadInputError
from optpipe.trace.ranges import ITERATION_RANGE, LIBRARY_RANGES, MEASURED_RANGE
from optpipe.trace.recording.frames import Trace
from optpipe.trace.timeline import requested, views
from optpipe.trace.timeline.projection import project_ranges, tabulate_ranges
from optpipe.trace.timeline.timeline import Split, Timeline, array_from_column, split_timeline, timeline_from_trace

_WARMED_UP = 2.0


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
    memory: pl.DataFrame
    metrics: pl.DataFrame

    @property
    def kernel_ns(self) -> int:
        """Summed kernel time; more than the busy time where kernels overlap."""
        return int(self.kernels["total_ns"].sum())

    @property
    def copy_ns(self) -> int:
        """Summed time of copies and memsets."""
        return int(self.copies["total_ns"].sum())

    @property
    def overlapped_copy_ns(self) -> int:
        """Copy time that runs beside a kernel."""
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
    kernels = views.tabulate_kernels(trace.kernels)
    projection = project_ranges(trace, timeline)
    return Analysis(
        trace=trace,
        scope=scope,
        timeline=timeline,
        split=split_timeline(timeline),
        kernels=kernels,
        kinds=views.tabulate_kinds(kernels),
        api=views.tabulate_api_calls(trace.api),
        copies=views.tabulate_copies(trace.copies),
        executions=views.tabulate_executions(trace, timeline),
        os_runtime=views.tabulate_os_calls(trace.os_runtime),
        projection=projection,
        ranges=tabulate_ranges(projection),
        iterations=_find_iterations(projection),
        concurrent_ns=views.compute_concurrent_ns(trace),
        memory=requested.tabulate_memory(trace, timeline),
        metrics=requested.tabulate_metrics(trace, timeline),
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
