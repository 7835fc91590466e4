"""A profile on the terminal: the verdict and what to do first, the evidence after it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.units import format_bytes, format_count, format_duration
from optpipe.reporters.profile_tables import (
    CAUSES,
    format_name,
    make_table,
    render_call_tables,
    render_copy_tables,
    render_counter_tables,
    render_gap_tables,
    render_kernel_tables,
    render_range_tables,
    render_requested_tables,
)
from optpipe.reporters.records import VERDICT_STYLES
from optpipe.trace.findings.rules import WITHOUT_PROFILER


def render_profile(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """One profile; `short_name` makes a kernel's name readable."""
    distorted = _is_distorted(document)
    parts: list[RenderableType] = [
        *_render_verdict(document),
        *_render_findings(document["findings"], distorted=distorted),
    ]
    views = document["measured_views"]
    parts += render_kernel_tables(views["kernels"], short_name, distorted=distorted)
    parts += render_call_tables("API call", views["api"], distorted=distorted)
    parts += render_call_tables("OS call", views["os_runtime"][:5], distorted=distorted)
    parts += render_copy_tables(views["copies"], document["measured"], views["streams"])
    parts += [
        *([] if distorted else [*render_gap_tables(document["gaps"]), *render_range_tables(views["ranges"])]),
        *render_requested_tables(document),
        *_render_tensor_cores(document["tensor_cores"]),
        *_render_roofline(document["roofline"]),
        *render_counter_tables(document["roofline"].get("ncu") or [], short_name),
        *_render_quality(document),
    ]
    return Group(*parts)


def render_profiles(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """A profile of several stages: one line for each, then the main one in full."""
    shown = make_table("stage", right=("time", "GPU busy", "gain"), left=("limited by", "first thing to try"))
    for stage in document["stages"]:
        if "error" in stage:
            shown.add_row(stage["name"], "", "", "", Text("failed", style="red"), stage["error"])
            continue
        first = stage["findings"][0] if stage["findings"] else None
        totals = stage["measured"]
        shown.add_row(
            stage["name"],
            _format_time(stage),
            f"{_compute_busy_share(stage):.0%}" if totals["busy_ns"] is not None else "",
            f"{first['gain_share']:.0%}" if first else "",
            Text(stage["bottleneck"]["verdict"], style="bold"),
            first["advice"] if first else "",
        )
    parts: list[RenderableType] = [shown]
    if any("error" not in stage and _is_distorted(stage) for stage in document["stages"]):
        said = (
            "*: measured without the profiler, which slowed the host too much; withheld: the two measurements disagree"
        )
        parts.append(Text(said, style="dim"))
    if document.get("kernels") is not None:
        parts += [Text(f"\n{document['stage']} in full", style="bold"), render_profile(document, short_name)]
    if document.get("run_dir"):
        parts.append(Text(f"kept in {document['run_dir']}", style="dim"))
    return Group(*parts)


def render_diff(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """Two profiles side by side, the largest change first."""
    unit = "per iteration" if document["per_iteration"] else "in total"
    host = f"time {unit}" + (", without the profiler" if document["unprofiled"] else "")
    rows = [("host_ns", host)]
    if any(document["busy_ns"]):
        rows += [("span_ns", f"GPU time span {unit}"), ("busy_ns", "GPU busy"), ("idle_ns", "GPU idle")]
    shown = make_table("", right=("before", "after", "change"), left=())
    for field, label in rows:
        before, after = document[field]
        shown.add_row(label, format_duration(before), format_duration(after), _format_change(before, after))
    parts: list[RenderableType] = [shown]
    for kind in ("layers", "kernels") if any(document["busy_ns"]) else ("layers", "ranges"):
        parts += _render_changes(kind, document[kind], short_name)
    return Group(*parts)


def _render_changes(kind: str, found: Sequence[Mapping[str, Any]], short_name: Any) -> list[RenderableType]:
    rows = [row for row in found if row["change"] != "same"]
    if not rows:
        return [Text(f"no {kind[:-1]} changed notably" if found else f"no {kind} to compare", style="dim")]
    shown = make_table(kind[:-1], right=("before", "after", "change"), left=("",))
    for row in rows[:15]:
        called = short_name(row["name"]) if kind == "kernels" else row["name"]
        times = format_duration(row["before_ns"]), format_duration(row["after_ns"])
        shown.add_row(format_name(called), *times, _format_change(row["before_ns"], row["after_ns"]), row["change"])
    more = len(rows) - 15
    return [shown, *([Text(f"and {more} more; see --json", style="dim")] if more > 0 else [])]


def _is_distorted(document: Mapping[str, Any]) -> bool:
    """Whether the profiler slowed the host so much that its times say nothing; shares and kernel times still do."""
    return "absolute times" in document["trace_quality"]["withheld"]


def _format_time(stage: Mapping[str, Any]) -> str:
    """One iteration, or the stage where nothing repeats; outside the profiler where that slowed it too much."""
    iterations = stage["iterations"]
    if _is_distorted(stage):
        unprofiled_ns = iterations.get("unprofiled_ns")
        return f"{format_duration(unprofiled_ns)}*" if unprofiled_ns else "withheld"
    return format_duration(iterations.get("period_ns") or stage["measured"]["span_ns"])


def _render_verdict(document: Mapping[str, Any]) -> list[RenderableType]:
    limit, totals, quality = document["bottleneck"], document["measured"], document["trace_quality"]
    of_span = "" if _is_distorted(document) else f" of {format_duration(totals['span_ns'])}"
    scope = _format_scope(document["scope"])
    verdict = Text.assemble(
        "limited by ", (limit["verdict"], "bold"), f" ({limit['share']:.0%}{of_span}): {limit['why']}"
    )
    if limit["verdict"] == "withheld":
        verdict = Text(f"no verdict: {limit['why']}", style="yellow")
    trusted = (quality["verdict"], VERDICT_STYLES[quality["verdict"]])
    lines: list[RenderableType] = [verdict]
    lines.append(Text.assemble(f"{scope} of {document['source']}, {document['tracer']}; trace quality ", trusted))
    if totals["busy_ns"] is not None:
        idle = ", ".join(
            f"{label} {totals['idle_by_cause'][cause] / totals['span_ns']:.0%}" for cause, label in CAUSES.items()
        )
        busy = f"{totals['busy_ns'] / totals['span_ns']:.0%}{of_span}"
        if "busy_share" in limit:
            busy = f"{limit['busy_share']:.0%} without the profiler, which verdict and gains are corrected for; with it {busy}"
        lines.append(Text(f"GPU busy {busy}; idle: {idle}"))
    return [*lines, *_render_iterations(document)]


def _compute_busy_share(document: Mapping[str, Any]) -> float:
    """How much of the time a kernel runs; of the time without the profiler where that slowed the host too much."""
    totals = document["measured"]
    return float(document["bottleneck"].get("busy_share", totals["busy_ns"] / totals["span_ns"]))


def _format_scope(scope: str) -> str:
    if scope == "trace":
        return "the whole trace"
    return f"{scope}, selectable with --range," if scope.startswith("iterations ") else f"range {scope}"


def _render_iterations(document: Mapping[str, Any]) -> list[RenderableType]:
    found = document["iterations"]
    if "count" not in found:
        return []
    gpu = (
        f", of which GPU {format_duration(found['median_gpu_ns'])} in {found['kernels']:.0f} kernels"
        if found["kernels"]
        else ""
    )
    counted = f"{found['count']} iterations ({found['range']})"
    if _is_distorted(document):
        each = (
            f": {format_duration(found['unprofiled_ns'])} each without the profiler" if found["unprofiled_ns"] else ""
        )
        return [Text(f"{counted}{each}{gpu}")]
    first, others = format_duration(found["first_wall_ns"]), format_duration(found["median_other_wall_ns"])
    each = f"{counted}: {format_duration(found['period_ns'])} each{gpu}"
    return [Text(f"{each}; the first takes {first} on the host, the others {others}")]


def _render_findings(findings: Sequence[Mapping[str, Any]], *, distorted: bool) -> list[RenderableType]:
    if not findings:
        return []
    lines: list[RenderableType] = [Text("\nRecommendations, by the time they could save", style="bold")]
    for number, finding in enumerate(findings, 1):
        evidence = finding["evidence"]
        if distorted and finding["host_times"]:  # all its times but the last were taken under the profiler
            evidence = f"{finding['rule']}{''.join(evidence.partition(WITHOUT_PROFILER)[1:])}"
        lines.append(
            Text.assemble(f"{number}. ", (_format_gain(finding, distorted=distorted), "bold"), f"  {evidence}")
        )
        lines.append(Text(f"   try: {finding['advice']}", style="green"))
    return lines


def _format_gain(finding: Mapping[str, Any], *, distorted: bool) -> str:
    share = f"{finding['gain_share']:.0%}"
    return share if distorted else f"{format_duration(finding['gain_ns'])} ({share})"


def _render_tensor_cores(found: Mapping[str, Any]) -> list[RenderableType]:
    if found["eligible"] is None:
        return []
    unknown = f", {found['unknown']} cannot be determined from the kernel's name" if found["unknown"] else ""
    used = f"{found['used']} of {found['eligible']} eligible {found['basis']} use them{unknown}"
    each = "; times per iteration" if found["iterations"] > 1 else ""
    lines: list[RenderableType] = [Text(f"\nTensor Cores: {used}; {found['time_share']:.0%} of kernel time{each}")]
    for what in ("missed", "ineligible"):
        if found[what]:
            shown = make_table(what, right=("share", "time", "could save"), left=("why",))
            for row in found[what][:10]:
                times = (format_duration(row[column] / found["iterations"]) for column in ("time_ns", "could_save_ns"))
                name = f"{row['op']} {row['name']}" if row["op"] else row["name"]
                shown.add_row(format_name(name), f"{row['share']:.1%}", *times, row["reason"])
            lines.append(shown)
    return lines


def _render_roofline(found: Mapping[str, Any]) -> list[RenderableType]:
    if "withheld" in found:
        return []
    peaks = found["peaks"]
    rates = ", ".join(f"{kind} {format_count(rate)}FLOP/s" for kind, rate in peaks["flops_per_s"].items())
    fused, unfused = found["fused"], found["unfused"]
    text = f"\nRoofline at batch {found['batch_size']}: at least {format_duration(found['bound_ns'])}"
    if found["times_bound"]:
        text += f"; measured {format_duration(found['measured_ns'])}, {found['times_bound']:.1f}× the bound"
        text += " (weights in a cache, Winograd, or a probe on a busy machine)" if found["times_bound"] < 1 else ""
    if found["types_without_peak"]:
        text += f" ({', '.join(found['types_without_peak'])} arithmetic has no known peak and is left out)"
    text += f". Layer by layer {format_duration(fused['ns'])} with elementwise operators fused"
    text += f" ({fused['math_share']:.0%} of it arithmetic), {format_duration(unfused['ns'])} node by node"
    device = f"peaks of {peaks['device']} ({peaks['source']})"
    lines: list[RenderableType] = [
        Text(text),
        Text(f"{device}: {rates}; memory {format_bytes(peaks['bytes_per_s'])}/s", style="dim"),
    ]
    timed = [row for row in found["layers"] if row["measured_ns"]]
    if timed:
        shown = make_table("layers farthest above their bound", right=("time", "bound", "FLOP/byte"), left=("regime",))
        for row in timed[:8]:
            durations = format_duration(row["measured_ns"]), format_duration(row["bound_ns"])
            shown.add_row(format_name(row["name"]), *durations, f"{row['intensity']:.1f}", row["quadrant"] or "")
        lines.append(shown)
    return lines


def _render_quality(document: Mapping[str, Any]) -> list[RenderableType]:
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


def _format_change(before: float, after: float) -> Text:
    if before == after:
        return Text("0%")
    if not before:
        return Text("new", style="red")
    style = "green" if after < before else "red" if after > before else ""
    return Text(f"{after / before - 1:+.0%}", style=style)
