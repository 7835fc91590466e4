"""A profile on the terminal: the verdict and what to do first, the evidence after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.units import format_bytes, format_count, format_duration
from optpipe.core.verdict import Verdict
from optpipe.report.profile_tables import (
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
from optpipe.report.records import VERDICT_STYLES
from optpipe.trace.findings.bottleneck import LimitingFactor
from optpipe.trace.findings.quality import Quality
from optpipe.trace.findings.records import ProfileFinding, TraceProfile
from optpipe.trace.findings.report import DiffRow, ProfileDiff, TraceChange
from optpipe.trace.findings.rules import WITHOUT_PROFILER
from optpipe.trace.layers.ncu import KernelCounters
from optpipe.trace.layers.roofline import Roofline
from optpipe.trace.layers.tensor_cores import TensorCores
from optpipe.trace.timeline.kernels import shorten_name

if TYPE_CHECKING:
    from optpipe.profile.profile_model import ModelProfileDocument

WITHHELD = "withheld"
"""Shown for a stage whose two measurements disagree: no time, and no share of it."""


def render_profile(profile: TraceProfile, counters: Sequence[KernelCounters] = ()) -> RenderableType:
    """One profile; `counters` are what ncu counted beside it."""
    distorted, measured = profile.trace_quality.distorts_host, profile.measured
    host = [] if distorted else [*render_gap_tables(profile.gaps), *render_range_tables(measured.ranges)]
    return Group(
        *_render_verdict(profile),
        *_render_findings(profile.findings, distorted=distorted),
        *render_kernel_tables(measured.kernels, distorted=distorted),
        *render_call_tables("API call", measured.api, distorted=distorted),
        *render_call_tables("OS call", measured.os_runtime[:5], distorted=distorted),
        *render_copy_tables(measured.copies, measured.totals),
        *host,
        *render_requested_tables(profile),
        *_render_tensor_cores(profile.tensor_cores),
        *_render_roofline(profile.roofline),
        *render_counter_tables(counters, profile.roofline.peaks if profile.roofline else None),
        *_render_quality(profile.trace_quality),
    )


def render_profiles(record: "ModelProfileDocument") -> RenderableType:
    """A profile of several stages: one line for each, then the main one in full."""
    shown = make_table("stage", right=("time", "GPU busy", "gain"), left=("limited by", "first thing to try"))
    for stage in record.stages:
        bottleneck, findings = stage.profile.bottleneck, stage.profile.findings
        time = _format_time(stage.profile)
        gain = time if time == WITHHELD else f"{findings[0].gain_share:.0%}" if findings else ""
        shown.add_row(
            stage.subject.name,
            time,
            f"{bottleneck.busy_share:.0%}" if bottleneck.busy_share is not None else "",
            gain,
            Text(bottleneck.verdict, style="bold"),
            findings[0].advice if findings else "",
        )
    for failed in record.failed:
        shown.add_row(failed.name, "", "", "", Text("failed", style="red"), failed.error)
    parts: list[RenderableType] = [shown]
    if any(stage.profile.trace_quality.distorts_host for stage in record.stages):
        said = (
            "*: measured without the profiler, which slowed the host too much; withheld: the two measurements disagree"
        )
        parts.append(Text(said, style="dim"))
    main = next((stage for stage in record.stages if stage.subject.name == record.main), None)
    if main is not None:
        title = Text(f"\n{main.subject.name} in full", style="bold")
        parts += [title, render_profile(main.profile, main.counters)]
    return Group(*parts, Text(f"kept in {record.run_dir}", style="dim"))


def render_diff(diff: ProfileDiff) -> RenderableType:
    """Two profiles side by side, the largest change first."""
    unit = "per iteration" if diff.per_iteration else "in total"
    rows = [(f"time {unit}{', without the profiler' if diff.unprofiled else ''}", diff.host_ns)]
    on_gpu = any(diff.busy_ns)
    if on_gpu:
        rows += [(f"GPU time span {unit}", diff.span_ns), ("GPU busy", diff.busy_ns), ("GPU idle", diff.idle_ns)]
    shown = make_table("", right=("before", "after", "change"), left=())
    for label, times in rows:
        shown.add_row(label, *map(format_duration, times), _format_change(*times))
    second = _render_changes("kernel", diff.kernels) if on_gpu else _render_changes("range", diff.ranges)
    return Group(shown, *_render_changes("layer", diff.layers), *second)


def _render_changes(kind: str, found: Sequence[DiffRow]) -> list[RenderableType]:
    rows = [row for row in found if row.change is not TraceChange.SAME]
    if not rows:
        return [Text(f"no {kind} changed notably" if found else f"no {kind}s to compare", style="dim")]
    shown = make_table(kind, right=("before", "after", "change"), left=("",))
    for row in rows[:15]:
        times = row.before_ns, row.after_ns
        called = format_name(shorten_name(row.name) if kind == "kernel" else row.name)
        shown.add_row(called, *map(format_duration, times), _format_change(*times), row.change)
    more = len(rows) - 15
    return [shown, *([Text(f"and {more} more; see --json", style="dim")] if more > 0 else [])]


def _format_time(profile: TraceProfile) -> str:
    """One iteration, or the stage where nothing repeats; outside the profiler where that slowed it too much."""
    iterations = profile.iterations
    if profile.trace_quality.distorts_host:
        unprofiled_ns = iterations.unprofiled_ns if iterations else None
        return f"{format_duration(unprofiled_ns)}*" if unprofiled_ns else WITHHELD
    period_ns = iterations.period_ns if iterations else None
    return format_duration(period_ns or profile.measured.totals.span_ns)


def _render_verdict(profile: TraceProfile) -> list[RenderableType]:
    found, totals, quality = profile.bottleneck, profile.measured.totals, profile.trace_quality
    of_span = "" if quality.distorts_host else f" of {format_duration(totals.span_ns)}"
    verdict = Text.assemble("limited by ", (found.verdict, "bold"), f" ({found.share:.0%}{of_span}): {found.why}")
    if found.verdict is LimitingFactor.WITHHELD:
        verdict = Text(f"no verdict: {found.why}", style="yellow")
    trusted = (quality.verdict, VERDICT_STYLES[quality.verdict])
    source = f"{_format_scope(profile.scope)} of {profile.source}, {profile.tracer}; trace quality "
    lines: list[RenderableType] = [verdict, Text.assemble(source, trusted)]
    if totals.busy_ns is not None:
        idle = ", ".join(
            f"{label} {totals.idle_by_cause[cause] / totals.span_ns:.0%}" for cause, label in CAUSES.items()
        )
        busy = f"{totals.busy_ns / totals.span_ns:.0%}{of_span}"
        if found.idle_scale != 1 and found.busy_share is not None:
            busy = f"{found.busy_share:.0%} without the profiler, which verdict and gains are corrected for; with it {busy}"
        lines.append(Text(f"GPU busy {busy}; idle: {idle}"))
    return [*lines, *_render_iterations(profile)]


def _format_scope(scope: str) -> str:
    if scope == "trace":
        return "the whole trace"
    return f"{scope}, selectable with --range," if scope.startswith("iterations ") else f"range {scope}"


def _render_iterations(profile: TraceProfile) -> list[RenderableType]:
    found = profile.iterations
    if found is None:
        return []
    gpu = (
        f", of which GPU {format_duration(found.median_gpu_ns)} in {found.kernels:.0f} kernels" if found.kernels else ""
    )
    counted = f"{found.count} iterations ({found.range})"
    if found.period_ns is None or found.first_wall_ns is None or found.median_other_wall_ns is None:
        each = f": {format_duration(found.unprofiled_ns)} each without the profiler" if found.unprofiled_ns else ""
        return [Text(f"{counted}{each}{gpu}")]
    first, others = format_duration(found.first_wall_ns), format_duration(found.median_other_wall_ns)
    each = f"{counted}: {format_duration(found.period_ns)} each{gpu}"
    return [Text(f"{each}; the first takes {first} on the host, the others {others}")]


def _render_findings(findings: Sequence[ProfileFinding], *, distorted: bool) -> list[RenderableType]:
    if not findings:
        return []
    lines: list[RenderableType] = [Text("\nRecommendations, by the time they could save", style="bold")]
    for number, finding in enumerate(findings, 1):
        evidence, gain = finding.evidence, f"{finding.gain_share:.0%}"
        if distorted and finding.host_times:  # all its times but the last were taken under the profiler
            evidence = f"{finding.rule}{''.join(evidence.partition(WITHOUT_PROFILER)[1:])}"
        gain = gain if distorted else f"{format_duration(finding.gain_ns)} ({gain})"
        lines.append(Text.assemble(f"{number}. ", (gain, "bold"), f"  {evidence}"))
        lines.append(Text(f"   try: {finding.advice}", style="green"))
    return lines


def _render_tensor_cores(found: TensorCores | None) -> list[RenderableType]:
    if found is None:
        return []
    unknown = f", {found.unknown} cannot be determined from the kernel's name" if found.unknown else ""
    used = f"{found.used} of {found.eligible} eligible {found.basis} use them{unknown}"
    each = "; times per iteration" if found.iterations > 1 else ""
    lines: list[RenderableType] = [Text(f"\nTensor Cores: {used}; {found.time_share:.0%} of kernel time{each}")]
    for what, layers in (("missed", found.missed), ("ineligible", found.ineligible)):
        if layers:
            shown = make_table(what, right=("share", "time", "could save"), left=("why",))
            for row in layers[:10]:
                times = (format_duration(ns / found.iterations) for ns in (row.time_ns, row.could_save_ns))
                name = f"{row.op} {row.name}" if row.op else row.name
                shown.add_row(format_name(name), f"{row.share:.1%}", *times, row.reason)
            lines.append(shown)
    return lines


def _render_roofline(found: Roofline | None) -> list[RenderableType]:
    if found is None:
        return []
    peaks, fused = found.peaks, found.fused
    rates = ", ".join(f"{kind} {format_count(rate)}FLOP/s" for kind, rate in peaks.flops_per_s.items())
    text = f"\nRoofline at batch {found.batch_size}: at least {format_duration(found.bound_ns)}"
    if found.times_bound is not None and found.measured_ns is not None:
        text += f"; measured {format_duration(found.measured_ns)}, {found.times_bound:.1f}× the bound"
        text += " (weights in a cache, Winograd, or a probe on a busy machine)" if found.times_bound < 1 else ""
    if found.types_without_peak:
        text += f" ({', '.join(found.types_without_peak)} arithmetic has no known peak and is left out)"
    text += f". Layer by layer {format_duration(fused.ns)} with elementwise operators fused"
    text += f" ({fused.math_share:.0%} of it arithmetic), {format_duration(found.unfused.ns)} node by node"
    device = f"peaks of {peaks.device} ({peaks.source})"
    lines: list[RenderableType] = [
        Text(text),
        Text(f"{device}: {rates}; memory {format_bytes(peaks.bytes_per_s)}/s", style="dim"),
    ]
    timed = [(row, row.measured_ns) for row in found.layers if row.measured_ns]
    if timed:
        shown = make_table("layers farthest above their bound", right=("time", "bound", "FLOP/byte"), left=("regime",))
        for row, measured_ns in timed[:8]:
            durations = format_duration(measured_ns), format_duration(row.bound_ns)
            shown.add_row(format_name(row.cost.name), *durations, f"{row.intensity:.1f}", row.quadrant or "")
        lines.append(shown)
    return lines


def _render_quality(quality: Quality) -> list[RenderableType]:
    lines: list[RenderableType] = [
        Text(f"quality, {check.name.replace('_', ' ')}: {check.verdict}, {check.detail}", style="yellow")
        for check in quality.checks
        if check.verdict is not Verdict.PASS
    ]
    reasons: dict[str, list[str]] = {}
    for view, why in quality.withheld.items():
        reasons.setdefault(why, []).append(view)
    lines += [Text(f"withheld: {', '.join(views)} ({why})", style="yellow") for why, views in reasons.items()]
    return [Text(), *lines] if lines else []


def _format_change(before: float, after: float) -> Text:
    if before == after:
        return Text("0%")
    if not before:
        return Text("new", style="red")
    return Text(f"{after / before - 1:+.0%}", style="green" if after < before else "red")
