"""A profile on the terminal: the verdict and what to do first, the evidence after it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import bytes_text, count_text, duration_text
from optpipe.reporters.records import VERDICT_STYLES

_CAUSES = {"host_wait": "host wait", "kernel_wait": "kernel wait", "copy": "copy", "synchronization": "synchronization"}
_NAME_WIDTH = 60


def profile_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """One profile; `short_name` makes a kernel's name readable."""
    distorted = _distorted(document)
    parts: list[RenderableType] = [*_answer(document), *_findings(document["findings"], distorted=distorted)]
    parts += _classic("kernel", document["kernels"], short_name)
    parts += _classic("API call", document["api"], str, distorted=distorted)
    parts += _classic("OS call", document["os_runtime"][:5], str, distorted=distorted)
    parts += [
        *([] if distorted else [*_gaps(document["gaps"]), *_ranges(document["ranges"])]),
        *_requested(document),
        *_tensor_cores(document["tensor_cores"]),
        *_roofline(document["roofline"]),
        *_counters(document["roofline"].get("ncu") or [], short_name),
        *_quality(document),
    ]
    return Group(*parts)


def profiles_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """A profile of several stages: one line for each, then the main one in full."""
    table = _table("stage", right=("iteration", "GPU busy", "gain"), left=("limited by", "first thing to try"))
    for stage in document["stages"]:
        if "error" in stage:
            table.add_row(stage["name"], "", "", "", Text("failed", style="red"), stage["error"])
            continue
        first = stage["findings"][0] if stage["findings"] else None
        totals = stage["measured"]
        table.add_row(
            stage["name"],
            _time_of(stage),
            f"{totals['busy_ns'] / totals['span_ns']:.0%}" if totals["kernels"] else "",
            f"{first['gain_share']:.0%}" if first else "",
            Text(stage["bottleneck"]["verdict"], style="bold"),
            first["advice"] if first else "",
        )
    parts: list[RenderableType] = [table]
    if document.get("kernels") is not None:
        parts += [Text(f"\n{document['stage']} in full", style="bold"), profile_text(document, short_name)]
    if document.get("run_dir"):
        parts.append(Text(f"kept in {document['run_dir']}", style="dim"))
    return Group(*parts)


def diff_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """Two profiles side by side, the largest change first."""
    unit = "per iteration" if document["per_iteration"] else "in all"
    table = _table("", right=("before", "after", "change"), left=())
    for name, label in (("span_ns", f"GPU time span {unit}"), ("busy_ns", "GPU busy"), ("idle_ns", "GPU idle")):
        before, after = document[name]
        table.add_row(label, duration_text(before), duration_text(after), _change_text(before, after))
    parts: list[RenderableType] = [table]
    for kind in ("layers", "kernels"):
        rows = [row for row in document[kind] if row["change"] != "same"]
        if not rows:
            parts.append(
                Text(f"no {kind[:-1]} changed notably" if document[kind] else f"no {kind} to compare", style="dim")
            )
            continue
        table = _table(kind[:-1], right=("before", "after", "change"), left=("",))
        for row in rows[:15]:
            shown = _name(short_name(row["name"]) if kind == "kernels" else row["name"])
            times = duration_text(row["before_ns"]), duration_text(row["after_ns"])
            table.add_row(shown, *times, _change_text(row["before_ns"], row["after_ns"]), row["change"])
        parts.append(table)
        if len(rows) > 15:
            parts.append(Text(f"and {len(rows) - 15} more; --json has all", style="dim"))
    return Group(*parts)


def _distorted(document: Mapping[str, Any]) -> bool:
    """Whether the profiler slowed the host so much that its times say nothing; shares and kernel times still do."""
    return "absolute times" in document["trace_quality"]["withheld"]


def _time_of(stage: Mapping[str, Any]) -> str:
    """One iteration, or the stage where nothing repeats; outside the profiler where that slowed it too much."""
    iterations = stage["iterations"]
    if _distorted(stage):
        unprofiled_ns = iterations.get("unprofiled_ns")
        return f"{duration_text(unprofiled_ns)}*" if unprofiled_ns else "withheld"
    return duration_text(iterations.get("period_ns") or stage["measured"]["span_ns"])


def _answer(document: Mapping[str, Any]) -> list[RenderableType]:
    limit, totals, quality = document["bottleneck"], document["measured"], document["trace_quality"]
    of_span = "" if _distorted(document) else f" of {duration_text(totals['span_ns'])}"
    scope = _scope_text(document["scope"])
    verdict = Text.assemble(
        "limited by ", (limit["verdict"], "bold"), f" ({limit['share']:.0%}{of_span}): {limit['why']}"
    )
    if limit["verdict"] == "withheld":
        verdict = Text(f"no verdict: {limit['why']}", style="yellow")
    trusted = (quality["verdict"], VERDICT_STYLES[quality["verdict"]])
    lines: list[RenderableType] = [verdict]
    lines.append(Text.assemble(f"{scope} of {document['source']}, {document['tracer']}; trace quality ", trusted))
    if totals["kernels"]:
        idle = ", ".join(
            f"{label} {totals['idle_by_cause'][cause] / totals['span_ns']:.0%}" for cause, label in _CAUSES.items()
        )
        lines.append(Text(f"GPU busy {totals['busy_ns'] / totals['span_ns']:.0%}{of_span}; idle: {idle}"))
    return [*lines, *_iterations(document)]


def _scope_text(scope: str) -> str:
    if scope == "trace":
        return "the whole trace"
    return f"{scope}, --range judges another part," if scope.startswith("iterations ") else f"range {scope}"


def _iterations(document: Mapping[str, Any]) -> list[RenderableType]:
    found = document["iterations"]
    if "count" not in found:
        return []
    gpu = (
        f", of which GPU {duration_text(found['median_gpu_ns'])} in {found['kernels']:.0f} kernels"
        if found["kernels"]
        else ""
    )
    counted = f"{found['count']} iterations ({found['range']})"
    if _distorted(document):
        each = f": {duration_text(found['unprofiled_ns'])} each without the profiler" if found["unprofiled_ns"] else ""
        return [Text(f"{counted}{each}{gpu}")]
    first, others = duration_text(found["first_wall_ns"]), duration_text(found["median_other_wall_ns"])
    each = f"{counted}: {duration_text(found['period_ns'])} each{gpu}"
    return [Text(f"{each}; the first takes the host {first}, the others {others}")]


def _findings(findings: Sequence[Mapping[str, Any]], *, distorted: bool) -> list[RenderableType]:
    if not findings:
        return []
    lines: list[RenderableType] = [Text("\nWhat to do, by the time it could save", style="bold")]
    for number, finding in enumerate(findings, 1):
        lines.append(
            Text.assemble(
                f"{number}. ",
                (_gain_text(finding, distorted=distorted), "bold"),
                f"  {finding['rule'] if distorted and finding['host_times'] else finding['evidence']}",
            )
        )
        lines.append(Text(f"   try: {finding['advice']}", style="green"))
    return lines


def _gain_text(finding: Mapping[str, Any], *, distorted: bool) -> str:
    share = f"{finding['gain_share']:.0%}"
    return share if distorted else f"{duration_text(finding['gain_ns'])} ({share})"


def _classic(
    what: str, rows: Sequence[Mapping[str, Any]], name_text: Any, *, distorted: bool = False
) -> list[RenderableType]:
    head = [row for row in rows if row.get("in_classic_list", True)]
    if not head:
        return []
    with_tensor_cores = "tensor_core" in head[0]
    table = _table(
        f"{what}s that take 90 %",
        right=("share", "count") if distorted else ("share", "total", "count"),
        left=("Tensor Cores",) if with_tensor_cores else (),
    )
    for row in head[:20]:
        cells: list[str | Text] = [
            _name(name_text(row["name"])),
            f"{row['share']:.1%}",
            *([] if distorted else [duration_text(row["total_ns"])]),
            str(row["count"]),
        ]
        if with_tensor_cores:
            cells.append("?" if row["tensor_core"] is None else "yes" if row["tensor_core"] else "")
        table.add_row(*cells)
    more = len(head) - 20
    return [Text(), table, *([Text(f"and {more} more", style="dim")] if more > 0 else [])]


def _gaps(found: Mapping[str, Any]) -> list[RenderableType]:
    if not found.get("count"):
        return []
    title = f"{found['count']} gaps of {duration_text(found['least_ns'])} or more, {duration_text(found['total_ns'])} in all"
    table = _table("at", right=("gap",), left=("waits for", "then runs", "host meanwhile"))
    for row in found["rows"][:5]:
        cause = max(row["by_cause"], key=row["by_cause"].__getitem__, default="")
        table.add_row(
            duration_text(row["start_ns"]),
            duration_text(row["duration_ns"]),
            _CAUSES.get(cause, cause),
            _name(row.get("before", "nothing more")),
            _name(row["host"]),
        )
    return [Text(f"\n{title}", style="bold"), table]


def _ranges(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    if not rows:
        return []
    table = _table("range", right=("count", "host", "GPU", "projected", "busy"), left=("limited by",))
    for row in rows[:12]:
        busy = f"{row['busy_ns'] / row['projected_ns']:.0%}" if row["projected_ns"] else ""
        table.add_row(
            _name(row["name"]),
            str(row["count"]),
            duration_text(row["wall_ns"]),
            duration_text(row["gpu_ns"]),
            duration_text(row["projected_ns"]),
            busy,
            row["bottleneck"] or "",
        )
    return [Text(), table]


def _requested(document: Mapping[str, Any]) -> list[RenderableType]:
    """Memory use, GPU metrics and sampled functions, where they were recorded."""
    parts: list[RenderableType] = []
    if document["memory"]:
        table = _table("memory", right=("at the start", "at most", "at the end", "allocations", "frees"), left=())
        for row in document["memory"][:8]:
            levels = (bytes_text(row[name]) for name in ("start_bytes", "peak_bytes", "end_bytes"))
            table.add_row(f"device {row['device']}, {row['kind']}", *levels, str(row["allocations"]), str(row["frees"]))
        parts.append(table)
    if document["gpu_metrics"]:
        table = _table("GPU metric", right=("mean", "while a kernel runs", "most", "samples"), left=())
        for row in document["gpu_metrics"]:
            if row["max"]:
                busy = "" if row["mean_busy"] is None else f"{row['mean_busy']:.0f}"
                table.add_row(_name(row["name"]), f"{row['mean']:.0f}", busy, f"{row['max']:.0f}", str(row["samples"]))
        parts.append(table)
    if document["functions"]:
        table = _table("function", right=("running", "on the stack"), left=())
        for row in document["functions"][:15]:
            table.add_row(_name(row["name"]), f"{row['self_share']:.0%}", f"{row['total_share']:.0%}")
        parts.append(table)
    return parts


def _tensor_cores(found: Mapping[str, Any]) -> list[RenderableType]:
    if found["eligible"] is None:
        return []
    unknown = f", {found['unknown']} cannot be told from the kernel's name" if found["unknown"] else ""
    used = f"{found['used']} of {found['eligible']} eligible {found['basis']} use them{unknown}"
    each = "; times per iteration" if found["iterations"] > 1 else ""
    lines: list[RenderableType] = [Text(f"\nTensor Cores: {used}; {found['time_share']:.0%} of kernel time{each}")]
    for what in ("missed", "ineligible"):
        if found[what]:
            table = _table(what, right=("share", "time", "could save"), left=("why",))
            for row in found[what][:10]:
                times = (duration_text(row[column] / found["iterations"]) for column in ("time_ns", "could_save_ns"))
                name = f"{row['op']} {row['name']}" if row["op"] else row["name"]
                table.add_row(_name(name), f"{row['share']:.1%}", *times, row["reason"])
            lines.append(table)
    return lines


def _roofline(found: Mapping[str, Any]) -> list[RenderableType]:
    if "withheld" in found:
        return []
    peaks = found["peaks"]
    rates = ", ".join(f"{kind} {count_text(rate)}FLOP/s" for kind, rate in peaks["flops_per_s"].items())
    fused, unfused = found["fused"], found["unfused"]
    text = f"\nRoofline at batch {found['batch_size']}: at least {duration_text(found['bound_ns'])}"
    if found["times_bound"]:
        text += f"; measured {duration_text(found['measured_ns'])}, {found['times_bound']:.1f}× the bound"
        text += " (weights in a cache, Winograd, or a probe on a busy machine)" if found["times_bound"] < 1 else ""
    if found["types_without_peak"]:
        text += f" ({', '.join(found['types_without_peak'])} arithmetic has no known peak and is left out)"
    text += f". Layer by layer {duration_text(fused['ns'])} with elementwise operators fused"
    text += f" ({fused['math_share']:.0%} of it arithmetic), {duration_text(unfused['ns'])} node by node"
    device = f"peaks of {peaks['device']} ({peaks['source']})"
    lines: list[RenderableType] = [
        Text(text),
        Text(f"{device}: {rates}; memory {bytes_text(peaks['bytes_per_s'])}/s", style="dim"),
    ]
    timed = [row for row in found["layers"] if row["measured_ns"]]
    if timed:
        table = _table("layers furthest above their bound", right=("time", "bound", "FLOP/byte"), left=("stands",))
        for row in timed[:8]:
            durations = duration_text(row["measured_ns"]), duration_text(row["bound_ns"])
            table.add_row(_name(row["name"]), *durations, f"{row['intensity']:.1f}", row["quadrant"] or "")
        lines.append(table)
    return lines


def _counters(rows: Sequence[Mapping[str, Any]], short_name: Any) -> list[RenderableType]:
    if not rows:
        return []
    table = _table(
        "counted by ncu, mean of a launch",
        right=("launches", "time", "DRAM", "DRAM rate", "of its peak", "cycles", "compute"),
        left=(),
    )
    for row in rows:
        share = row.get("memory_peak_share")
        table.add_row(
            _name(short_name(row["name"])),
            str(row["launches"]),
            duration_text(row["duration_ns"]) if "duration_ns" in row else "",
            bytes_text(row["dram_bytes"]) if "dram_bytes" in row else "",
            f"{bytes_text(row['dram_bytes_per_s'])}/s" if row.get("dram_bytes_per_s") else "",
            f"{share:.0%}" if share is not None else "",
            f"{row['cycles']:,.0f}" if "cycles" in row else "",
            f"{row['compute_peak_percent']:.0f} %" if "compute_peak_percent" in row else "",
        )
    return [table]


def _quality(document: Mapping[str, Any]) -> list[RenderableType]:
    quality = document["trace_quality"]
    lines: list[RenderableType] = [
        Text(f"quality, {name.replace('_', ' ')}: {check['verdict']}, {check['detail']}", style="yellow")
        for name, check in quality.items()
        if isinstance(check, dict) and check.get("verdict", "PASS") != "PASS"
    ]
    reasons: dict[str, list[str]] = {}
    for view, why in quality["withheld"].items():
        reasons.setdefault(why, []).append(view)
    lines += [Text(f"withheld: {', '.join(views)} ({why})", style="yellow") for why, views in reasons.items()]
    return [Text(), *lines] if lines else []


def _name(text: str) -> Text:
    """A name as it is: brackets in it are no markup."""
    return Text(text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…")


def _change_text(before: float, after: float) -> Text:
    if not before:
        return Text("new", style="red")
    style = "green" if after < before else "red" if after > before else ""
    return Text(f"{after / before - 1:+.0%}", style=style)


def _table(first: str, *, right: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in left:
        table.add_column(name, overflow="fold")
    return table
