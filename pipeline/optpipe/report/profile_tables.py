"""The tables of a profile on the terminal: kernels, API calls, copies, ranges, gaps, and what is recorded on request."""

from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_bytes, format_duration
from optpipe.trace.findings.bottleneck import Gaps
from optpipe.trace.findings.records import CallRow, CopyRow, KernelRow, RangeRow, Totals, TraceProfile
from optpipe.trace.layers.ncu import KernelCounters
from optpipe.trace.layers.roofline import Peaks
from optpipe.trace.timeline.kernels import shorten_name
from optpipe.trace.timeline.timeline import IdleCause

CAUSES = {
    IdleCause.HOST_WAIT: "host wait",
    IdleCause.KERNEL_WAIT: "kernel wait",
    IdleCause.COPY: "copy",
    IdleCause.SYNCHRONIZATION: "synchronization",
}
_NAME_WIDTH = 60
_ROWS = 20


def render_kernel_tables(rows: Sequence[KernelRow], *, distorted: bool) -> list[RenderableType]:
    """The kernels that together take 90 %; how long each was launched and queued unless the host's times are distorted."""
    head = [row for row in rows if row.in_classic_list]
    if not head:
        return []
    queued = not distorted and any(row.queue_ns is not None for row in head)
    columns = ("share", "total", "count", "mean", *(("launch", "queue") if queued else ()))
    shown = make_table("top kernels (90 % of time)", right=columns, left=("Tensor Cores",))
    for row in head[:_ROWS]:
        waits = (
            ["" if ns is None else format_duration(ns / row.count) for ns in (row.launch_ns, row.queue_ns)]
            if queued
            else []
        )
        shown.add_row(
            format_name(shorten_name(row.name)),
            f"{row.share:.1%}",
            format_duration(row.total_ns),
            str(row.count),
            format_duration(row.mean_ns),
            *waits,
            "?" if row.tensor_core is None else "yes" if row.tensor_core else "",
        )
    said = "launch: time in the launching call; queue: from its return to the kernel's start; both per kernel"
    return [Text(), shown, *_format_more(head), *([Text(said, style="dim")] if queued else [])]


def render_call_tables(what: str, rows: Sequence[CallRow], *, distorted: bool) -> list[RenderableType]:
    """The calls that together take 90 % of the time in such calls; as shares only where the host's times are distorted."""
    head = [row for row in rows if row.in_classic_list]
    if not head:
        return []
    columns = ("share", "count") if distorted else ("share", "total", "count")
    shown = make_table(f"top {what}s (90 % of time)", right=columns, left=())
    for row in head[:_ROWS]:
        total = [] if distorted else [format_duration(row.total_ns)]
        shown.add_row(format_name(row.name), f"{row.share:.1%}", *total, str(row.count))
    return [Text(), shown, *_format_more(head)]


def render_copy_tables(rows: Sequence[CopyRow], totals: Totals) -> list[RenderableType]:
    """Copies by kind and memory, and how much ran beside kernels; and kernels of several streams."""
    parts: list[RenderableType] = []
    if rows:
        shown = make_table("copies", right=("total", "count", "size", "rate"), left=("from", "to"))
        for row in rows[:8]:
            rate = "" if row.bytes_per_s is None else f"{format_bytes(row.bytes_per_s)}/s"
            size = format_duration(row.total_ns), str(row.count), format_bytes(row.bytes), rate
            shown.add_row(row.kind or "unknown", *size, row.source_memory or "", row.target_memory or "")
        parts += [Text(), shown]
    if rows and totals.copy_beside_compute_ns is not None:
        copies_ns = (totals.memcpy_ns or 0) + (totals.memset_ns or 0)
        beside = f"{format_duration(totals.copy_beside_compute_ns)} of {format_duration(copies_ns)} overlaps kernels"
        parts.append(Text(beside, style="dim"))
    if totals.streams > 1 and totals.streams_concurrent_ns is not None:
        both = f"{totals.streams} streams run kernels; two or more run at once for {format_duration(totals.streams_concurrent_ns)}"
        parts.append(Text(both, style="dim"))
    return parts


def render_gap_tables(found: Gaps | None) -> list[RenderableType]:
    """The longest gaps, with what each waited for."""
    if found is None or not found.count:
        return []
    title = (
        f"{found.count} gaps of {format_duration(found.least_ns)} or more, {format_duration(found.total_ns)} in total"
    )
    shown = make_table("at", right=("gap",), left=("waits for", "then runs", "host meanwhile"))
    for gap in found.longest[:5]:
        cause = max(gap.by_cause, key=gap.by_cause.__getitem__, default=None)
        shown.add_row(
            format_duration(gap.start_ns),
            format_duration(gap.duration_ns),
            CAUSES[cause] if cause else "",
            format_name(gap.before or "end of trace"),
            format_name(gap.host),
        )
    return [Text(f"\n{title}", style="bold"), shown]


def render_range_tables(rows: Sequence[RangeRow]) -> list[RenderableType]:
    """NVTX ranges: on the host, and on the GPU where they launched anything."""
    if not rows:
        return []
    on_gpu = any(row.gpu_ns for row in rows)
    columns = ("count", "host", "GPU", "projected", "busy") if on_gpu else ("count", "host")
    shown = make_table("range", right=columns, left=("limited by",) if on_gpu else ())
    for row in rows[:12]:
        host = format_name(row.name), str(row.count), format_duration(row.wall_ns)
        if not on_gpu:
            shown.add_row(*host)
            continue
        projected_ns = row.projected_ns or 0
        busy = f"{row.busy_ns / projected_ns:.0%}" if projected_ns else ""
        gpu = format_duration(row.gpu_ns or 0), format_duration(projected_ns), busy
        shown.add_row(*host, *gpu, row.bottleneck or "")
    said = "GPU: total time of what the range launched; projected: from its first start to its last end on the GPU; busy: share of the "
    said += "projected time in which kernels run"
    return [Text(), shown, *([Text(said, style="dim")] if on_gpu else [])]


def render_requested_tables(profile: TraceProfile) -> list[RenderableType]:
    """GPU metrics, where they were recorded."""
    parts: list[RenderableType] = []
    metrics = [each for each in profile.gpu_metrics if each.max]
    if metrics:
        shown = make_table("GPU metric", right=("mean", "while a kernel runs", "max", "samples"), left=())
        for each in metrics:
            values = ("" if value is None else f"{value:.0f}" for value in (each.mean, each.mean_busy, each.max))
            shown.add_row(format_name(each.name), *values, str(each.samples))
        parts.append(shown)
    return parts


def render_counter_tables(rows: Sequence[KernelCounters], peaks: Peaks | None) -> list[RenderableType]:
    """What ncu counted, the mean of a kernel's launches, and the share of the memory's peak where `peaks` are known."""
    if not rows:
        return []
    columns = ("launches", "time", "DRAM", "DRAM rate", "of peak", "cycles", "compute")
    shown = make_table("ncu counters, mean per launch", right=columns, left=())
    for row in rows:
        rate = row.dram_bytes_per_s
        shown.add_row(
            format_name(shorten_name(row.name)),
            str(row.launches),
            "" if row.duration_ns is None else format_duration(row.duration_ns),
            "" if row.dram_bytes is None else format_bytes(row.dram_bytes),
            "" if rate is None else f"{format_bytes(rate)}/s",
            "" if rate is None or peaks is None else f"{rate / peaks.bytes_per_s:.0%}",
            "" if row.cycles is None else f"{row.cycles:,.0f}",
            "" if row.compute_peak_percent is None else f"{row.compute_peak_percent:.0f} %",
        )
    return [shown]


def _format_more(rows: Sequence[object]) -> list[RenderableType]:
    return [Text(f"and {len(rows) - _ROWS} more", style="dim")] if len(rows) > _ROWS else []


def format_name(text: str) -> Text:
    """A name as it is: brackets in it are not markup."""
    return Text(text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…")


def make_table(first: str, *, right: Sequence[str], left: Sequence[str]) -> Table:
    """A table whose columns stand right or left; the first may be folded."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(first, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    for name in left:
        made.add_column(name, overflow="fold")
    return made
