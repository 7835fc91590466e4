from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from optpipe.core.quantity import format_bytes, format_count, format_duration
from optpipe.core.records import group_pairs
from optpipe.core.verdict import Verdict
from optpipe.core.wording import Argument
from optpipe.report.charts import Bar, Point, draw_bars, draw_or_state_points, draw_timeline
from optpipe.report.document import (
    Cell,
    Column,
    Document,
    Figure,
    Part,
    RawFiles,
    Row,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    figure_columns,
    make_document,
    make_table,
)
from optpipe.trace.analysis import Analysis, IdleCause, sum_within
from optpipe.trace.bottleneck import Gap, LimitingFactor, Quality
from optpipe.trace.document_details import (
    describe_energy,
    list_detail_parts,
    list_difference_parts,
    tabulate_trials,
)
from optpipe.trace.kernels import shorten_name
from optpipe.trace.program import describe_end
from optpipe.trace.report import (
    CallRow,
    CopyRow,
    KernelRow,
    ModelProfileDocument,
    ProgramRun,
    RangeRow,
    RecordingProfile,
    Totals,
    TraceProfile,
)
from optpipe.trace.roofline import Roofline
from optpipe.trace.rules import WITHOUT_PROFILER, ProfileFinding
from optpipe.trace.tensor_cores import TensorCores
from optpipe.trace.workers import list_trials

CAUSES = {cause: cause.replace("_", " ") for cause in IdleCause}
_NAME_WIDTH, _ROWS = 60, 20


def document_from_profile(profile: TraceProfile) -> Document:
    parts = list(list_profile_parts(profile))
    if isinstance(profile, RecordingProfile):
        parts += list_detail_parts(
            profile,
            profile.details,
            profile.modules,
            profile.loop,
            profile.counters,
            profile.energy,
        )
        if profile.against is not None:
            parts += list_difference_parts(profile.against)
    return make_document(parts)


def list_profile_parts(profile: TraceProfile) -> Iterator[Part]:
    """Leaves out host times if the profiler distorts them."""
    distorted, measured = profile.trace_quality.distorts_host, profile.measured
    yield from _answer(profile)
    if profile.findings:
        advice = tuple(_list_advice(profile.findings, distorted=distorted))
        yield Section("Recommendations, by the time they could save", advice)
    yield from _tabulate_kernels(measured.kernels)
    yield from _tabulate_calls(measured.api, distorted=distorted)
    yield from _tabulate_copies(measured.copies, measured.totals)
    if not distorted:
        yield from _tabulate_gaps(profile.gaps)
        yield from _tabulate_ranges(measured.ranges)
    if profile.tensor_cores is not None:
        yield from _describe_tensor_cores(profile.tensor_cores)
    if profile.roofline is not None:
        yield from _describe_roofline(profile.roofline)
    yield from _describe_quality(profile.trace_quality)


def _answer(profile: TraceProfile) -> Iterator[Sentence]:
    bottleneck, totals, quality = profile.bottleneck, profile.measured.totals, profile.trace_quality
    of_span = "" if quality.distorts_host else f" of {format_duration(totals.span_ns)}"
    if bottleneck.verdict is LimitingFactor.WITHHELD:
        yield Sentence(f"no verdict: {bottleneck.why}", Tone.DOUBTFUL)
    else:
        yield Sentence(
            f"({bottleneck.share:.0%}{of_span}): {bottleneck.why}",
            Tone.STRONG,
            f"limited by {bottleneck.verdict}",
        )
    scope = f"range {profile.scope}"
    if profile.scope == "trace":
        scope = "the whole trace"
    elif profile.scope.startswith("iterations "):
        scope = f"{profile.scope}, selectable with " + Argument("range") + ","
    yield Sentence(
        scope + f" of {profile.source}, {profile.tracer}; trace quality {quality.verdict}"
    )
    if totals.busy_ns is not None:
        idle = ", ".join(
            f"{name} {totals.idle_by_cause[cause] / totals.span_ns:.0%}"
            for cause, name in CAUSES.items()
        )
        busy = f"{totals.busy_ns / totals.span_ns:.0%}{of_span}"
        if bottleneck.idle_scale != 1 and bottleneck.busy_share is not None:
            busy = f"{bottleneck.busy_share:.0%} without the profiler, which verdict and gains are corrected for; with it {busy}"
        yield Sentence(f"GPU busy {busy}; idle: {idle}")
    if (rounds := profile.iterations) is None:
        return
    counted = f"{rounds.count} iterations ({rounds.range})"
    gpu = ""
    if rounds.kernels:
        gpu = f", of which GPU {format_duration(rounds.median_gpu_ns)} in {rounds.kernels:.0f} kernels"
    if (
        rounds.period_ns is None
        or rounds.first_wall_ns is None
        or rounds.median_other_wall_ns is None
    ):
        times = (
            f": {format_duration(rounds.unprofiled_ns)} each without the profiler"
            if rounds.unprofiled_ns
            else ""
        )
        yield Sentence(f"{counted}{times}{gpu}")
        return
    first, others = (
        format_duration(rounds.first_wall_ns),
        format_duration(rounds.median_other_wall_ns),
    )
    times = f"{counted}: {format_duration(rounds.period_ns)} each{gpu}"
    yield Sentence(f"{times}; the first takes {first} on the host, the others {others}")


def _list_advice(findings: Sequence[ProfileFinding], *, distorted: bool) -> Iterator[Sentence]:
    for number, finding in enumerate(findings, 1):
        evidence, gain = finding.evidence, f"{finding.gain_share:.0%}"
        if (
            distorted and finding.host_times
        ):  # all times except the last were taken under the profiler
            evidence = f"{finding.rule}{''.join(evidence.partition(WITHOUT_PROFILER)[1:])}"
        gain = gain if distorted else f"{format_duration(finding.gain_ns)} ({gain})"
        yield Sentence(evidence, Tone.STRONG, f"{number}. {gain}", remedy=finding.advice)


def _tabulate_kernels(rows: Sequence[KernelRow]) -> Iterator[Part]:
    """The kernels that together take 90% of the time."""
    head = [row for row in rows if row.in_classic_list]
    cells: list[Row] = [
        (
            _shorten(shorten_name(row.name)),
            f"{row.share:.1%}",
            format_duration(row.total_ns),
            str(row.count),
            format_duration(row.mean_ns),
            "?" if row.tensor_core is None else "yes" if row.tensor_core else "",
        )
        for row in head[:_ROWS]
    ]
    figures = figure_columns("share", "total", "count", "mean")
    yield from _list_table(
        ["top kernels (90% of time)", *figures, "Tensor Cores"], cells, len(head)
    )


def _list_table(
    columns: Sequence[Column | str],
    cells: Sequence[Sequence[Cell | str | None]],
    count: int,
    caption: str = "",
) -> Iterator[Table]:
    """One table with the number of rows that are left out; nothing if `cells` is empty."""
    if cells:
        more = f"and {count - len(cells)} more" if count > len(cells) else ""
        yield make_table(columns, cells, caption="\n".join(filter(None, (more, caption))))


def _tabulate_calls(rows: Sequence[CallRow], *, distorted: bool) -> Iterator[Part]:
    """The calls that together take 90% of the time in such calls; shares only if host times are distorted."""
    head = [row for row in rows if row.in_classic_list]
    cells: list[Row] = [
        (
            _shorten(row.name),
            f"{row.share:.1%}",
            "" if distorted else format_duration(row.total_ns),
            str(row.count),
        )
        for row in head[:_ROWS]
    ]
    columns = figure_columns("share", "total", "count")
    yield from _list_table(["top API calls (90% of time)", *columns], cells, len(head))


def _tabulate_copies(rows: Sequence[CopyRow], totals: Totals) -> Iterator[Part]:
    cells: list[Row] = [
        (
            row.kind or "unknown",
            format_duration(row.total_ns),
            str(row.count),
            format_bytes(row.bytes),
            "" if row.bytes_per_s is None else f"{format_bytes(row.bytes_per_s)}/s",
            row.source_memory,
            row.target_memory,
        )
        for row in rows[:8]
    ]
    figures = figure_columns("total", "count", "size", "rate")
    yield from _list_table(["copies", *figures, "from", "to"], cells, len(rows))
    if rows and totals.copy_beside_compute_ns is not None:
        copies_ns = (totals.memcpy_ns or 0) + (totals.memset_ns or 0)
        beside = f"{format_duration(totals.copy_beside_compute_ns)} of {format_duration(copies_ns)} overlaps kernels"
        yield Sentence(beside, Tone.FAINT)


def _tabulate_gaps(gaps: Sequence[Gap]) -> Iterator[Part]:
    rows: list[Row] = []
    for gap in gaps[:5]:
        cause = max(gap.by_cause, key=gap.by_cause.__getitem__, default=None)
        times = format_duration(gap.start_ns), format_duration(gap.duration_ns)
        waits_for = CAUSES[cause] if cause else ""
        rows.append((*times, waits_for, _shorten(gap.before or "end of trace"), _shorten(gap.host)))
    columns: list[Column | str] = [
        "at",
        figure_column("longest gaps"),
        "waits for",
        "then runs",
        "host meanwhile",
    ]
    yield from _list_table(columns, rows, len(rows))


def _tabulate_ranges(rows: Sequence[RangeRow]) -> Iterator[Part]:
    on_gpu = any(row.gpu_ns for row in rows)
    cells: list[Row] = []
    for row in rows[:12]:
        projected_ns = row.projected_ns or 0
        busy = f"{row.busy_ns / projected_ns:.0%}" if projected_ns else ""
        gpu = (format_duration(row.gpu_ns or 0), format_duration(projected_ns), busy)
        host = (_shorten(row.name), str(row.count), format_duration(row.wall_ns))
        cells.append((*host, *(gpu if on_gpu else ("", "", ""))))
    columns: list[Column | str] = [
        "range",
        *figure_columns("count", "host", "GPU", "projected", "busy"),
    ]
    caption = (
        "GPU: total time of what the range launched; projected: from its first start to its last end on the GPU; "
        "busy: share of the projected time in which kernels run"
    )
    yield from _list_table(columns, cells, len(cells), caption if on_gpu else "")


def _describe_tensor_cores(cores: TensorCores) -> Iterator[Part]:
    unknown = (
        f", {cores.unknown} cannot be determined from the kernel's name" if cores.unknown else ""
    )
    used = f"{cores.used} of {cores.eligible} eligible {cores.basis} use them{unknown}"
    unit = "; times per iteration" if cores.iterations > 1 else ""
    yield Sentence(
        f"{used}; {cores.time_share:.0%} of kernel time{unit}", Tone.STRONG, "Tensor Cores"
    )
    for what, layers in (("missed", cores.missed), ("ineligible", cores.ineligible)):
        cells: list[Row] = []
        for row in layers[:10]:
            name = _shorten(f"{row.op} {row.name}" if row.op else row.name)
            times = (
                format_duration(ns / cores.iterations) for ns in (row.time_ns, row.could_save_ns)
            )
            cells.append((name, f"{row.share:.1%}", *times, row.reason))
        yield from _list_table(
            [what, *figure_columns("share", "time", "could save"), "why"], cells, len(cells)
        )


def _describe_roofline(roofline: Roofline) -> Iterator[Part]:
    peaks = roofline.peaks
    rates = ", ".join(
        f"{kind} {format_count(rate)}FLOP/s" for kind, rate in peaks.flops_per_s.items()
    )
    if roofline.contradiction is not None:
        measured_ns, least_ns = map(format_duration, roofline.contradiction)
        text = f"at batch {roofline.batch_size}: no bound, because {measured_ns} were measured where the probed peaks "
        text += f"require {least_ns} (other work during the probe, weights in a cache, or Winograd)"
        yield Sentence(text + "; profile again on an idle machine", Tone.DOUBTFUL, "Roofline")
    else:
        yield Sentence(_compare_with_bound(roofline), Tone.STRONG, "Roofline")
    device = f"peaks of {peaks.device} ({peaks.source})"
    yield Sentence(f"{device}: {rates}; memory {format_bytes(peaks.bytes_per_s)}/s", Tone.FAINT)
    yield from _list_slow_layers(roofline)


def _compare_with_bound(roofline: Roofline) -> str:
    text = f"at batch {roofline.batch_size}: at least {format_duration(roofline.bound_ns)}"
    if roofline.times_bound is not None and roofline.measured_ns is not None:
        measured = format_duration(roofline.measured_ns)
        text += f"; measured {measured}, {roofline.times_bound:.1f}× the bound"
    if roofline.types_without_peak:
        text += f" ({', '.join(roofline.types_without_peak)} arithmetic has no known peak and is left out)"
    text += (
        f". Layer by layer {format_duration(roofline.layers_ns)} with elementwise operators fused"
    )
    return text + f" ({roofline.math_share:.0%} of it arithmetic)"


def _list_slow_layers(roofline: Roofline) -> Iterator[Part]:
    """The layers farthest above their bound; without bounds that can be true, the slowest ones."""
    timed = [row for row in roofline.layers if row.measured_ns]
    if roofline.contradiction is not None:
        timed.sort(key=lambda row: -(row.measured_ns or 0))
        bounds: tuple[str, ...] = ("FLOP/byte",)
        title = "slowest layers"
    else:
        timed = [row for row in timed if not row.is_contradicted]
        bounds, title = ("bound", "FLOP/byte"), "layers farthest above their bound"
    cells: list[Row] = []
    for row in timed[:_MOST_LAYERS]:
        texts = {"bound": format_duration(row.bound_ns), "FLOP/byte": f"{row.intensity:.1f}"}
        time = format_duration(row.measured_ns or 0)
        cells.append((_shorten(row.cost.name), time, *(texts[name] for name in bounds)))
    yield from _list_table([title, *figure_columns("time", *bounds)], cells, 0)


_MOST_LAYERS = 8


def _describe_quality(quality: Quality) -> Iterator[Sentence]:
    for check in quality.checks:
        if check.verdict is not Verdict.PASS:
            name = check.name.replace("_", " ")
            yield Sentence(
                f"trace check '{name}': {check.verdict.lower()} ({check.detail})", Tone.DOUBTFUL
            )
    for why, views in group_pairs((why, view) for view, why in quality.withheld.items()).items():
        yield Sentence(f"not shown: {', '.join(views).replace('_', ' ')} ({why})", Tone.DOUBTFUL)


def _shorten(text: str) -> str:
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 1]}…"


NOT_SHOWN = "not shown"
"""Replaces a stage's time if its profiled and unprofiled measurements disagree."""


def document_from_stages(record: ModelProfileDocument) -> Document:
    rows: list[tuple[Cell | str, ...]] = []
    for stage in record.stages:
        bottleneck, findings = stage.profile.bottleneck, stage.profile.findings
        time = _format_time(stage.profile)
        busy = "" if bottleneck.busy_share is None else f"{bottleneck.busy_share:.0%}"
        gain, advice = (
            (f"{findings[0].gain_share:.0%}", findings[0].advice) if findings else ("", "")
        )
        limit = Cell(bottleneck.verdict, Tone.STRONG)
        rows.append(
            (
                stage.subject.name,
                time,
                busy,
                NOT_SHOWN if time == NOT_SHOWN else gain,
                limit,
                advice,
            )
        )
    rows += [
        (name, "", "", "", Cell("failed", Tone.BAD), error) for name, error in record.failed.items()
    ]
    distorted = any(stage.profile.trace_quality.distorts_host for stage in record.stages)
    caption = "*: measured without the profiler, which slowed the host too much; not shown: profiled and unprofiled times disagree"
    main = next((stage for stage in record.stages if stage.subject.name == record.main), None)
    full: tuple[Part, ...] = ()
    if main is not None:
        own = list_detail_parts(
            main.profile,
            main.details,
            main.modules,
            main.loop,
            main.counters,
            main.energy,
            main.subject.batch_size,
        )
        full = (*list_profile_parts(main.profile), *own)
    figures = figure_columns("time", "GPU busy", "gain")
    columns: list[Column | str] = ["stage", *figures, "limited by", "first thing to try"]
    return make_document(
        [
            make_table(columns, rows, caption=caption if distorted else ""),
            None if main is None else Section(f"{main.subject.name} in full", full),
            *tabulate_trials(list_trials(record.stages)),
            *(() if record.against is None else list_difference_parts(record.against)),
            None if record.program is None else _describe_program(record.program),
            None
            if record.program is None or record.program.energy is None
            else describe_energy(record.program.energy),
            Sentence(str(record.run_dir), Tone.FAINT, "run"),
        ]
    )


def _describe_program(run: ProgramRun) -> Sentence:
    name, seconds = run.command[0], f"{run.wall_s:.1f} s under the profiler"
    if run.exit_status == 0:
        return Sentence(f"{name} ended with status 0 after {seconds}", Tone.FAINT, "program")
    text = f"{describe_end(run)} under the profiler"
    return Sentence(text, Tone.BAD, "program", details=tuple(run.output_tail.splitlines()))


def _format_time(profile: TraceProfile) -> str:
    """One iteration, or the stage if nothing repeats; without the profiler (`*`) if that slowed the host too much."""
    iterations = profile.iterations
    if profile.trace_quality.distorts_host:
        unprofiled_ns = iterations.unprofiled_ns if iterations else None
        return f"{format_duration(unprofiled_ns)}*" if unprofiled_ns else NOT_SHOWN
    period_ns = iterations.period_ns if iterations else None
    return format_duration(period_ns or profile.measured.totals.span_ns)


_UNITS = {True: "Tensor Cores", False: "other units"}


def draw_profile(
    profile: TraceProfile, files: RawFiles, trace: Analysis | None
) -> Iterator[Figure | Sentence]:
    """Draws one iteration of `trace`, and the longest kernels and the roofline of `profile`."""
    if trace is not None:
        yield from _draw_inference(trace, files)
    measured, unit = profile.measured, "ms of kernel time"
    if measured.kernels:
        longest = measured.kernels[:12]
        bars = [
            Bar(shorten_name(row.name, 44), _UNITS[bool(row.tensor_core)], row.total_ns / 1e6)
            for row in longest
        ]
        caption = "The kernels that take the most time, each over all its launches."
        yield draw_bars("Kernels", caption, bars, unit, files)
    if profile.roofline is not None:
        yield from _draw_roofline(profile.roofline, files)


_MOST_BARS = 400


def _draw_inference(measured: Analysis, files: RawFiles) -> Iterator[Figure]:
    """The iteration of median length: CUDA calls, copies, kernels, and why the GPU was idle. Nothing without kernels."""
    rows = measured.iterations.drop_nulls("gpu_start_ns")
    rows = rows.with_columns(until=pl.max_horizontal("end_ns", "gpu_end_ns")).sort(
        pl.col("until") - pl.col("start_ns")
    )
    if rows.is_empty() or measured.kernels.is_empty():
        return
    begin, end = (int(rows[name][rows.height // 2]) for name in ("start_ns", "until"))
    trace, bars = measured.trace, []

    def add(label: str, part: str, name: str, start_ns: int, end_ns: int) -> None:
        low, high = max(start_ns, begin), min(end_ns, end)
        if low < high:
            bars.append(
                Bar(
                    label, part, (high - low) / 1e6, (low - begin) / 1e6, (high - begin) / 1e6, name
                )
            )

    on_cores = dict(zip(measured.kernels["name"], measured.kernels["tensor_core"], strict=True))
    for table, frame in (
        ("CUDA calls", trace.api),
        ("copies", trace.copies),
        ("kernels", trace.kernels),
    ):
        inside = frame.filter((pl.col("end_ns") > begin) & (pl.col("start_ns") < end))
        names = inside["kind" if table == "copies" else "name"].cast(pl.String)
        for name, start_ns, end_ns in zip(names, inside["start_ns"], inside["end_ns"], strict=True):
            part = table if table != "kernels" else f"kernels on {_UNITS[bool(on_cores[name])]}"
            add(table, part, shorten_name(name), start_ns, end_ns)
    for cause, idle in measured.timeline.idle.items():
        for start_ns, end_ns in zip(idle.starts.tolist(), idle.ends.tolist(), strict=True):
            if cause != IdleCause.COPY:
                add("GPU idle", f"idle: {CAUSES[cause]}", CAUSES[cause], start_ns, end_ns)
    shown = sorted(bars, key=lambda bar: -bar.value)[:_MOST_BARS]
    busy = sum_within(measured.timeline.busy, np.array([begin]), np.array([end])).item() / (
        end - begin
    )
    finding = f"A kernel runs for {busy:.1%} of an inference of {(end - begin) / 1e6:.3g} ms"
    left_out = (
        f"; the {len(bars) - len(shown)} shortest bars are left out"
        if len(bars) > len(shown)
        else ""
    )
    caption = f"The iteration of median length, as the profiler recorded it{left_out}."
    order = {bar.label: at for at, bar in enumerate(bars)}
    shown.sort(key=lambda bar: (order[bar.label], bar.low))
    yield replace(draw_timeline("One inference", caption, shown, "ms", files), finding=finding)


def _draw_roofline(roofline: Roofline, files: RawFiles) -> Iterator[Figure | Sentence]:
    """Draws layers as measured if most of the arithmetic was timed, otherwise at their bounds."""
    layers = [layer for layer in roofline.layers if layer.intensity and layer.bound_ns]
    types = [layer.cost.type for layer in layers]
    peak = roofline.peaks.flops_per_s.get(max(types, key=types.count)) if types else None
    bandwidth = roofline.peaks.bytes_per_s
    if not peak:
        return
    if roofline.contradiction is not None:
        text = "not drawn: an inference was faster than the probed peaks allow; profile again on an idle machine"
        yield Sentence(text, Tone.DOUBTFUL, "Roofline")
        return
    timed = [layer for layer in layers if layer.measured_ns]
    if 2 * sum(layer.cost.macs for layer in timed) < sum(layer.cost.macs for layer in layers):
        timed = []
    shown = [
        (layer, (layer.measured_ns if timed else None) or layer.bound_ns)
        for layer in timed or layers
    ]
    points = [
        Point("", layer.cost.name, layer.intensity, 2e-3 * layer.cost.macs / ns)
        for layer, ns in shown
    ]
    intensities, ridge = [point.x for point in points], peak / bandwidth
    roof = [
        (x, min(peak, x * bandwidth) / 1e12)
        for x in (min(*intensities, 1.0), ridge, max(*intensities, ridge * 4))
    ]
    what = "Each point is a layer"
    what += "" if timed else " at its bound: layers were not timed individually"
    caption = f"{what}; the line is the device's limit (peaks: {roofline.peaks.source})."
    yield draw_or_state_points(
        "Roofline", caption, points, "operations per byte", "TFLOP/s", files, limit=roof
    )
