"""A profile on the terminal: the verdict and what to do first, the evidence after it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.units import bytes_text, count_text, duration_text
from optpipe.reporters.profile_tables import (
    CAUSES,
    call_tables,
    copy_tables,
    counter_tables,
    gap_tables,
    kernel_tables,
    name_cell,
    range_tables,
    requested_tables,
    table,
)
from optpipe.reporters.records import VERDICT_STYLES
from optpipe.trace.findings.rules import WITHOUT_PROFILER


def profile_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """One profile; `short_name` makes a kernel's name readable."""
    distorted = _distorted(document)
    parts: list[RenderableType] = [*_answer(document), *_findings(document["findings"], distorted=distorted)]
    views = document["measured_views"]
    parts += kernel_tables(views["kernels"], short_name, distorted=distorted)
    parts += call_tables("API call", views["api"], distorted=distorted)
    parts += call_tables("OS call", views["os_runtime"][:5], distorted=distorted)
    parts += copy_tables(views["copies"], document["measured"], views["streams"])
    parts += [
        *([] if distorted else [*gap_tables(document["gaps"]), *range_tables(views["ranges"])]),
        *requested_tables(document),
        *_tensor_cores(document["tensor_cores"]),
        *_roofline(document["roofline"]),
        *counter_tables(document["roofline"].get("ncu") or [], short_name),
        *_quality(document),
    ]
    return Group(*parts)


def profiles_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """A profile of several stages: one line for each, then the main one in full."""
    shown = table("stage", right=("time", "GPU busy", "gain"), left=("limited by", "first thing to try"))
    for stage in document["stages"]:
        if "error" in stage:
            shown.add_row(stage["name"], "", "", "", Text("failed", style="red"), stage["error"])
            continue
        first = stage["findings"][0] if stage["findings"] else None
        totals = stage["measured"]
        shown.add_row(
            stage["name"],
            _time_of(stage),
            f"{_busy_share(stage):.0%}" if totals["busy_ns"] is not None else "",
            f"{first['gain_share']:.0%}" if first else "",
            Text(stage["bottleneck"]["verdict"], style="bold"),
            first["advice"] if first else "",
        )
    parts: list[RenderableType] = [shown]
    if any("error" not in stage and _distorted(stage) for stage in document["stages"]):
        said = "*: without the profiler, which slowed the host too much; withheld: the two contradict each other"
        parts.append(Text(said, style="dim"))
    if document.get("kernels") is not None:
        parts += [Text(f"\n{document['stage']} in full", style="bold"), profile_text(document, short_name)]
    if document.get("run_dir"):
        parts.append(Text(f"kept in {document['run_dir']}", style="dim"))
    return Group(*parts)


def diff_text(document: Mapping[str, Any], short_name: Any) -> RenderableType:
    """Two profiles side by side, the largest change first."""
    unit = "per iteration" if document["per_iteration"] else "in all"
    host = f"time {unit}" + (", without the profiler" if document["unprofiled"] else "")
    rows = [("host_ns", host)]
    if any(document["busy_ns"]):
        rows += [("span_ns", f"GPU time span {unit}"), ("busy_ns", "GPU busy"), ("idle_ns", "GPU idle")]
    shown = table("", right=("before", "after", "change"), left=())
    for field, label in rows:
        before, after = document[field]
        shown.add_row(label, duration_text(before), duration_text(after), _change_text(before, after))
    parts: list[RenderableType] = [shown]
    for kind in ("layers", "kernels") if any(document["busy_ns"]) else ("layers", "ranges"):
        parts += _changes(kind, document[kind], short_name)
    return Group(*parts)


def _changes(kind: str, found: Sequence[Mapping[str, Any]], short_name: Any) -> list[RenderableType]:
    rows = [row for row in found if row["change"] != "same"]
    if not rows:
        return [Text(f"no {kind[:-1]} changed notably" if found else f"no {kind} to compare", style="dim")]
    shown = table(kind[:-1], right=("before", "after", "change"), left=("",))
    for row in rows[:15]:
        called = short_name(row["name"]) if kind == "kernels" else row["name"]
        times = duration_text(row["before_ns"]), duration_text(row["after_ns"])
        shown.add_row(name_cell(called), *times, _change_text(row["before_ns"], row["after_ns"]), row["change"])
    more = len(rows) - 15
    return [shown, *([Text(f"and {more} more; --json has all", style="dim")] if more > 0 else [])]


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
    if totals["busy_ns"] is not None:
        idle = ", ".join(
            f"{label} {totals['idle_by_cause'][cause] / totals['span_ns']:.0%}" for cause, label in CAUSES.items()
        )
        busy = f"{totals['busy_ns'] / totals['span_ns']:.0%}{of_span}"
        if "busy_share" in limit:
            busy = f"{limit['busy_share']:.0%} without the profiler, which verdict and gains are corrected for; under it {busy}"
        lines.append(Text(f"GPU busy {busy}; idle: {idle}"))
    return [*lines, *_iterations(document)]


def _busy_share(document: Mapping[str, Any]) -> float:
    """How much of the time a kernel runs; of the time without the profiler where that slowed the host too much."""
    totals = document["measured"]
    return float(document["bottleneck"].get("busy_share", totals["busy_ns"] / totals["span_ns"]))


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
        evidence = finding["evidence"]
        if distorted and finding["host_times"]:  # all its times but the last were taken under the profiler
            evidence = f"{finding['rule']}{''.join(evidence.partition(WITHOUT_PROFILER)[1:])}"
        lines.append(Text.assemble(f"{number}. ", (_gain_text(finding, distorted=distorted), "bold"), f"  {evidence}"))
        lines.append(Text(f"   try: {finding['advice']}", style="green"))
    return lines


def _gain_text(finding: Mapping[str, Any], *, distorted: bool) -> str:
    share = f"{finding['gain_share']:.0%}"
    return share if distorted else f"{duration_text(finding['gain_ns'])} ({share})"


def _tensor_cores(found: Mapping[str, Any]) -> list[RenderableType]:
    if found["eligible"] is None:
        return []
    unknown = f", {found['unknown']} cannot be told from the kernel's name" if found["unknown"] else ""
    used = f"{found['used']} of {found['eligible']} eligible {found['basis']} use them{unknown}"
    each = "; times per iteration" if found["iterations"] > 1 else ""
    lines: list[RenderableType] = [Text(f"\nTensor Cores: {used}; {found['time_share']:.0%} of kernel time{each}")]
    for what in ("missed", "ineligible"):
        if found[what]:
            shown = table(what, right=("share", "time", "could save"), left=("why",))
            for row in found[what][:10]:
                times = (duration_text(row[column] / found["iterations"]) for column in ("time_ns", "could_save_ns"))
                name = f"{row['op']} {row['name']}" if row["op"] else row["name"]
                shown.add_row(name_cell(name), f"{row['share']:.1%}", *times, row["reason"])
            lines.append(shown)
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
        shown = table("layers furthest above their bound", right=("time", "bound", "FLOP/byte"), left=("stands",))
        for row in timed[:8]:
            durations = duration_text(row["measured_ns"]), duration_text(row["bound_ns"])
            shown.add_row(name_cell(row["name"]), *durations, f"{row['intensity']:.1f}", row["quadrant"] or "")
        lines.append(shown)
    return lines


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


def _change_text(before: float, after: float) -> Text:
    if before == after:
        return Text("0%")
    if not before:
        return Text("new", style="red")
    style = "green" if after < before else "red" if after > before else ""
    return Text(f"{after / before - 1:+.0%}", style=style)
