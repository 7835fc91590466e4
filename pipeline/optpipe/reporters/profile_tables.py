"""The tables of a profile on the terminal: kernels, API calls, copies, ranges, gaps, and what is recorded on request."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_bytes, format_duration

CAUSES = {"host_wait": "host wait", "kernel_wait": "kernel wait", "copy": "copy", "synchronization": "synchronization"}
_NAME_WIDTH = 60


def render_kernel_tables(rows: Sequence[Mapping[str, Any]], name_text: Any, *, distorted: bool) -> list[RenderableType]:
    """The kernels that together take 90 %; how long each was launched and queued unless the host's times are distorted."""
    head = _select_classic(rows)
    if not head:
        return []
    queued = not distorted and any(row["queue_ns"] is not None for row in head)
    columns = ("share", "total", "count", "mean", *(("launch", "queue") if queued else ()))
    shown = make_table("top kernels (90 % of time)", right=columns, left=("Tensor Cores",))
    for row in head[:20]:
        waits = [_format_per_call(row, column) for column in ("launch_ns", "queue_ns")] if queued else []
        shown.add_row(
            format_name(name_text(row["name"])),
            f"{row['share']:.1%}",
            format_duration(row["total_ns"]),
            str(row["count"]),
            format_duration(row["mean_ns"]),
            *waits,
            "?" if row["tensor_core"] is None else "yes" if row["tensor_core"] else "",
        )
    said = (
        "launch: time in the launching call; queue: from its return to the kernel's start; both per kernel"
        if queued
        else ""
    )
    return [Text(), shown, *_format_more(head), *([Text(said, style="dim")] if said else [])]


def _format_per_call(row: Mapping[str, Any], column: str) -> str:
    return "" if row[column] is None else format_duration(row[column] / row["count"])


def render_call_tables(what: str, rows: Sequence[Mapping[str, Any]], *, distorted: bool) -> list[RenderableType]:
    """The calls that together take 90 % of the time in such calls; as shares only where the host's times are distorted."""
    head = _select_classic(rows)
    if not head:
        return []
    shown = make_table(
        f"top {what}s (90 % of time)", right=("share", "count") if distorted else ("share", "total", "count"), left=()
    )
    for row in head[:20]:
        total = [] if distorted else [format_duration(row["total_ns"])]
        shown.add_row(format_name(row["name"]), f"{row['share']:.1%}", *total, str(row["count"]))
    return [Text(), shown, *_format_more(head)]


def render_copy_tables(
    rows: Sequence[Mapping[str, Any]], totals: Mapping[str, Any], streams: int
) -> list[RenderableType]:
    """Copies by kind and memory, and how much ran beside kernels; and kernels of several streams."""
    parts: list[RenderableType] = []
    if rows:
        shown = make_table("copies", right=("total", "count", "size", "rate"), left=("from", "to"))
        for row in rows[:8]:
            rate = "" if row["bytes_per_s"] is None else f"{format_bytes(row['bytes_per_s'])}/s"
            size = format_duration(row["total_ns"]), str(row["count"]), format_bytes(row["bytes"]), rate
            shown.add_row(row["kind"] or "unknown", *size, row["source_memory"] or "", row["target_memory"] or "")
        parts += [Text(), shown]
    if totals["kernel_ns"] is None:
        return parts
    if rows:
        copies_ns = totals["memcpy_ns"] + totals["memset_ns"]
        beside = f"{format_duration(totals['copy_beside_compute_ns'])} of {format_duration(copies_ns)} overlaps kernels"
        parts.append(Text(beside, style="dim"))
    if streams > 1:
        both = f"{streams} streams run kernels; two or more run at once for {format_duration(totals['streams_concurrent_ns'])}"
        parts.append(Text(both, style="dim"))
    return parts


def render_gap_tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """The longest gaps, with what each waited for."""
    if not found.get("count"):
        return []
    title = f"{found['count']} gaps of {format_duration(found['least_ns'])} or more, {format_duration(found['total_ns'])} in total"
    shown = make_table("at", right=("gap",), left=("waits for", "then runs", "host meanwhile"))
    for row in found["rows"][:5]:
        cause = max(row["by_cause"], key=row["by_cause"].__getitem__, default="")
        shown.add_row(
            format_duration(row["start_ns"]),
            format_duration(row["duration_ns"]),
            CAUSES.get(cause, cause),
            format_name(row.get("before", "end of trace")),
            format_name(row["host"]),
        )
    return [Text(f"\n{title}", style="bold"), shown]


def render_range_tables(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """NVTX ranges: on the host, and on the GPU where they launched anything."""
    if not rows:
        return []
    on_gpu = any(row["gpu_ns"] for row in rows)
    columns = ("count", "host", "GPU", "projected", "busy") if on_gpu else ("count", "host")
    shown = make_table("range", right=columns, left=("limited by",) if on_gpu else ())
    for row in rows[:12]:
        host = format_name(row["name"]), str(row["count"]), format_duration(row["wall_ns"])
        if not on_gpu:
            shown.add_row(*host)
            continue
        busy = f"{row['busy_ns'] / row['projected_ns']:.0%}" if row["projected_ns"] else ""
        gpu = format_duration(row["gpu_ns"]), format_duration(row["projected_ns"]), busy
        shown.add_row(*host, *gpu, row["bottleneck"] or "")
    said = "GPU: total time of what the range launched; projected: from its first start to its last end on the GPU; busy: share of the "
    said += "projected time in which kernels run"
    return [Text(), shown, *([Text(said, style="dim")] if on_gpu else [])]


def render_requested_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """Memory use, GPU metrics and sampled functions, where they were recorded."""
    parts: list[RenderableType] = []
    if document["memory"]:
        shown = make_table("memory", right=("start", "peak", "end", "allocations", "frees"), left=())
        for row in document["memory"][:8]:
            levels = (format_bytes(row[name]) for name in ("start_bytes", "peak_bytes", "end_bytes"))
            shown.add_row(f"device {row['device']}, {row['kind']}", *levels, str(row["allocations"]), str(row["frees"]))
        parts.append(shown)
    if document["gpu_metrics"]:
        shown = make_table("GPU metric", right=("mean", "while a kernel runs", "max", "samples"), left=())
        for row in document["gpu_metrics"]:
            if row["max"]:
                busy = "" if row["mean_busy"] is None else f"{row['mean_busy']:.0f}"
                shown.add_row(
                    format_name(row["name"]), f"{row['mean']:.0f}", busy, f"{row['max']:.0f}", str(row["samples"])
                )
        parts.append(shown)
    if document["functions"]:
        shown = make_table("function", right=("running", "on the stack"), left=())
        for row in document["functions"][:15]:
            shown.add_row(format_name(row["name"]), f"{row['self_share']:.0%}", f"{row['total_share']:.0%}")
        parts.append(shown)
    return parts


def render_counter_tables(rows: Sequence[Mapping[str, Any]], short_name: Any) -> list[RenderableType]:
    """What ncu counted, the mean of a kernel's launches."""
    if not rows:
        return []
    shown = make_table(
        "ncu counters, mean per launch",
        right=("launches", "time", "DRAM", "DRAM rate", "of peak", "cycles", "compute"),
        left=(),
    )
    for row in rows:
        share = row.get("memory_peak_share")
        shown.add_row(
            format_name(short_name(row["name"])),
            str(row["launches"]),
            format_duration(row["duration_ns"]) if "duration_ns" in row else "",
            format_bytes(row["dram_bytes"]) if "dram_bytes" in row else "",
            f"{format_bytes(row['dram_bytes_per_s'])}/s" if row.get("dram_bytes_per_s") else "",
            f"{share:.0%}" if share is not None else "",
            f"{row['cycles']:,.0f}" if "cycles" in row else "",
            f"{row['compute_peak_percent']:.0f} %" if "compute_peak_percent" in row else "",
        )
    return [shown]


def _select_classic(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("in_classic_list", True)]


def _format_more(rows: Sequence[object]) -> list[RenderableType]:
    return [Text(f"and {len(rows) - 20} more", style="dim")] if len(rows) > 20 else []


def format_name(text: str) -> Text:
    """A name as it is: brackets in it are no markup."""
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
