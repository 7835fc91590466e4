"""Documents of bench runs, paired comparisons and comparisons of builds."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.load import name_sample
from optpipe.core.measurement import Measurement, Validity
from optpipe.core.measurement_group import GroupFigure, MeasurementGroup
from optpipe.core.metrics.measured import (
    BUILD_TIME,
    CV,
    EFFICIENCY,
    ENERGY,
    MEMORY,
    P50,
    P90,
    P99,
    P999,
    THROUGHPUT,
    TOKENS,
)
from optpipe.core.metrics.registry import find_metric
from optpipe.core.params import make_call
from optpipe.core.quantity import (
    Dimension,
    Estimate,
    format_bytes,
    format_duration,
    format_quantity,
)
from optpipe.core.records import plain_from_record
from optpipe.core.settings import format_settings
from optpipe.core.wording import Argument, join_texts
from optpipe.measure.figures import read_samples
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.pair import BenchRecord
from optpipe.measure.search import ArtifactLimit, name_point
from optpipe.measure.validity import HOST_CAUSES
from optpipe.report.charts import Curve, Point
from optpipe.report.comparison_charts import draw_comparison
from optpipe.report.document import (
    PAGE_ONLY,
    TEXT_ONLY,
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Part,
    RawFile,
    RawFiles,
    Row,
    Sentence,
    Table,
    Tone,
    cell_from_estimate,
    cell_from_latency,
    figure_column,
    make_document,
    make_table,
)
from optpipe.stats.percentiles import count_samples_needed
from optpipe.stats.ratio import EQUAL_ROUNDS, Change
from optpipe.workspace.entry import Run

MAX_REASONS_SHOWN = 4
"""Maximum reasons of one kind that are listed individually."""
EFFECTS = frozenset(
    {"not-steady", "drift", "bimodal", "dispersion", "too-few-samples"}
)  # of a disturbed machine
MEAN_P50 = "mean p50"
"""Mean of the processes' medians. Higher percentiles are over all requests of all processes."""
VERDICT_COLUMN = Column("verdict", ColumnKind.STATE, rank=0)


def document_from_bench(record: BenchRecord) -> Document:
    rows, groups = record.measurements, record.groups
    called = _name_artifacts(rows)
    few = {group.processes for group in groups if 0 < group.processes < 3}
    what = "1 process" if few == {1} else "fewer than 3 processes"
    codes = sorted(
        {code for row in rows for code in row.invalid_codes},
        key=lambda code: (code in EFFECTS, code),
    )
    models = {
        str(group.subject.model) for group in groups if group.processes and group.subject.model
    }
    return make_document(
        [
            Sentence(f"No measurement is VALID: {', '.join(codes)}", Tone.BAD)
            if codes and not models
            else None,
            _tabulate_groups(groups, called),
            *_answer_limits(record.limits, called),
            Sentence(f"{what}: no interval; use " + Argument("processes", 5), Tone.DOUBTFUL)
            if few
            else None,
            *_describe_lengths(rows),
            *_list_reasons(rows, called),
            *_explain_withheld(rows, called),
            Sentence(record.run_dir, Tone.FAINT, "run"),
            Sentence(make_call("compare", model=min(models)), Tone.STRONG, "next")
            if len(models) == 1
            else None,
        ]
    )


def _tabulate_groups(groups: Sequence[MeasurementGroup], called: Mapping[str, str]) -> Table:
    tails = [
        name
        for name in (P90.name, P99.name, P999.name)
        if any(name in group.figures for group in groups)
    ]
    listed = sorted(
        {
            name
            for group in groups
            for name, figure in group.figures.items()
            if figure.unit is not None
        }
    )
    sample = name_sample(group.load.sample for group in groups)
    columns = (
        *(Column(name, shared=True) for name in ("model", "artifact", "device", "load")),
        figure_column("batch", rank=0),
        figure_column("length"),
        figure_column("rate/s"),
        figure_column(MEAN_P50, "ms", 1),
        *(figure_column(name, "ms", 2 if name == P90.name else 1) for name in tails),
        figure_column("between", rank=2),
        figure_column("inside", rank=2),
        figure_column("CV", rank=2),
        figure_column(f"{sample}s/s"),
        figure_column("tokens/s"),
        figure_column("batches/s", rank=3),
        figure_column("memory", rank=3),
        figure_column(f"J/{sample}", rank=2),
        figure_column(f"{sample}s/s/W", rank=2),
        *(figure_column(find_metric(name).title, rank=2) for name in listed),
        figure_column("processes"),
        VERDICT_COLUMN,
    )
    one_model = len({group.subject.model for group in groups}) == 1
    rows = [
        _list_group_cells(
            group, called[group.subject.artifact], tails, listed, shows_model=one_model
        )
        for group in groups
    ]
    return make_table(columns, rows)


_GRAPH = {True: ", CUDA graph", False: ", no CUDA graph", None: ""}


def _list_group_cells(
    group: MeasurementGroup,
    name: str,
    tails: Sequence[str],
    listed: Sequence[str],
    *,
    shows_model: bool,
) -> tuple[Cell | str, ...]:
    """The row of a group; `tails` are its percentiles above p50, `listed` the figures that lie in no field."""
    p50, memory, joules = (group.figures.get(metric.name) for metric in (P50, MEMORY, ENERGY))
    per_watt = joules.estimate.invert() if joules and joules.estimate else None
    rate, cv = _get_value(group, THROUGHPUT.name), _get_value(group, CV.name)
    return (
        str(group.subject.model) if shows_model else "",
        name,
        f"{group.subject.device}{_GRAPH[group.subject.cuda_graph]}",
        f"{group.load.scenario}, {group.load.mode}"
        + (f", {group.load.streams} streams" if group.load.streams > 1 else ""),
        str(group.load.batch_size),
        "" if group.load.length is None else str(group.load.length),
        _format_number(group.load.rate_per_s),
        *(_format_with_interval(group, figure) for figure in (P50.name, *tails)),
        *(
            "" if share is None else f"{share:.1%}"
            for share in ((p50.between, p50.inside) if p50 else (None, None))
        ),
        "" if cv is None else f"{cv:.1%}",
        _format_number(rate),
        _format_number(_get_value(group, TOKENS.name)),
        _format_number(None if rate is None else rate / group.load.batch_size),
        format_bytes(max(memory.processes))
        if memory and memory.processes
        else "",  # the largest, as in a sign-off
        _format_number(_get_value(group, ENERGY.name), "≈"),
        _format_number(None if per_watt is None else per_watt.value, "≈"),
        *(_cell_from_listed(group.figures.get(figure), figure) for figure in listed),
        f"{group.processes} of {group.processes + len(group.left_out)}"
        if group.left_out
        else str(group.processes),
        Cell("VALID", Tone.GOOD) if group.processes else Cell("INVALID", Tone.BAD),
    )


def _describe_lengths(rows: Sequence[Measurement]) -> Iterator[Sentence]:
    """Describes the padding of texts: to the build's only length, or as in the inputs."""
    texts: dict[str, None] = {}
    for row in rows:
        if row.load.length is None or row.inputs is None or row.inputs.lengths is None:
            continue
        low, high = row.inputs.lengths
        fixed = f"fixed at {low} tokens: shorter texts are padded to it"
        build = fixed if low == high else f"dynamic, {low} to {high} tokens"
        filled = f"{row.inputs.padding:.0%} padding" if row.inputs.padding else "no padding"
        texts[f"sequence length {build}; inputs of {row.load.length} have {filled}"] = None
    return (Sentence(text, Tone.FAINT) for text in texts)


def _name_artifacts(rows: Sequence[Measurement]) -> dict[str, str]:
    model = len({row.subject.model for row in rows}) > 1
    subjects = [row.subject for row in rows]
    names = {
        subject.artifact: f"{subject.model if model else ''} {subject.backend} {subject.precision}".strip()
        for subject in subjects
    }
    like = [(names[subject.artifact], subject.device, subject.artifact) for subject in subjects]
    twice = {
        row[2] for row in like if any(row[:2] == other[:2] and row[2] != other[2] for other in like)
    }
    return {
        artifact: f"{artifact} {name}" if artifact in twice else name
        for artifact, name in names.items()
    }


def document_from_pair(record: BenchRecord) -> Document:
    comparison = record.comparison
    if comparison is None:
        ended = "interrupted" if record.interrupted else "stopped"
        text = f"{ended} before the last round: no comparison; the measurements are kept in {record.run_dir}"
        return make_document([Sentence(text, Tone.DOUBTFUL)])
    ratio = comparison.ratio
    tone = Tone.GOOD if ratio.change is Change.FASTER else Tone.BAD
    answer = Sentence(f"{record.contender} is {ratio.change} than {record.baseline}", tone)
    if ratio.change is Change.NO_DIFFERENCE:
        answer = Sentence(f"no difference shown between {record.baseline} and {record.contender}")
    interval = f"[{ratio.ci[0]:.4f}, {ratio.ci[1]:.4f}] at {ratio.confidence:.0%}"
    visible = f"; a difference of {ratio.smallest_visible:.1%} would be detected"
    detail = f"{record.measurements[0].load}: {comparison.metric} ratio {ratio.value:.4f} "
    detail += f"{interval if ratio.is_known else f'({EQUAL_ROUNDS})'} over {ratio.rounds} rounds"
    detail += f" of fresh processes{visible if ratio.is_known else ''}"
    codes = ", ".join(f"{code} {count}" for code, count in comparison.invalid.items())
    count = f"{comparison.invalid_processes} of {len(comparison.measurements)} processes"
    invalid = f"{count} ({codes}); they count, because the builds alternate"
    return make_document(
        [
            answer,
            Sentence(detail),
            Sentence(invalid, Tone.DOUBTFUL, "INVALID") if comparison.invalid_processes else None,
            Sentence(record.run_dir, Tone.FAINT, "run"),
        ]
    )


def _answer_limits(
    limits: Sequence[ArtifactLimit], called: Mapping[str, str]
) -> Iterator[Sentence]:
    for limit in limits:
        what, label = name_point(limit.batch_size, limit.rate_per_s), _format_label(limit, called)
        value = "" if limit.value_ns is None else f" ({format_duration(limit.value_ns)})"
        doubt = "" if limit.verdict is Validity.VALID else ", from an INVALID measurement"
        if limit.inside:
            text = f"{label}: largest within {limit.slo} is {what}{value}{doubt}"
            yield Sentence(text, Tone.DOUBTFUL if doubt else Tone.GOOD)
        elif limit.measurement is None:
            yield Sentence(f"{label}: {limit.slo} could not be judged", Tone.DOUBTFUL)
        else:
            failed = limit.met is False
            says = f"nothing meets {limit.slo}" if failed else f"no measurement proves {limit.slo}"
            text = f"{label}: {says}; closest is {what}{value}{_format_upper_bound(limit)}{doubt}"
            yield Sentence(text, Tone.BAD if failed else Tone.DOUBTFUL)
        if unknown := limit.not_judged:
            why = next(iter(unknown.values()))
            text = f"{label}: not judged at {', '.join(unknown)}: " + why
            text += "; measure longer (" + Argument("min_time") + ")"
            yield Sentence(text, Tone.DOUBTFUL)


def _format_upper_bound(record: ArtifactLimit) -> str:
    """`, whose interval reaches to 6.10 ms`; empty if the limit is broken, or without an interval."""
    if record.met is False or record.upper_bound_ns is None:
        return ""
    return f", whose interval reaches to {format_duration(record.upper_bound_ns)}"


def _format_label(record: ArtifactLimit, called: Mapping[str, str]) -> str:
    """`onnxruntime fp32 (cpu)`, with the artifact's unique name."""
    plain, _, device = record.label.partition(" (")
    return f"{called.get(record.artifact, plain)} ({device}" if device else plain


def _list_reasons(rows: Sequence[Measurement], called: Mapping[str, str]) -> Iterator[Sentence]:
    listed: dict[tuple[bool, str, str], list[str]] = {}
    effects: set[str] = set()
    for row in rows:
        disturbed = any(reason.code in HOST_CAUSES for reason in row.reasons)
        for reason in row.reasons:
            if disturbed and reason.code in EFFECTS:
                effects.add(reason.code)
                continue
            key = (reason.invalidates, reason.code, reason.remedy)
            listed.setdefault(key, []).append(f"{_format_where(row, called)}: " + reason.message)
    causes_first = sorted(
        listed.items(), key=lambda item: (not item[0][0], item[0][1] not in HOST_CAUSES)
    )
    for (invalid, code, remedy), seen in causes_first:
        tone, label = (Tone.DOUBTFUL, "INVALID") if invalid else (Tone.FAINT, "note")
        yield Sentence(code, tone, label, _shorten_list(seen), remedy)
    if effects:
        yield Sentence(
            f"{', '.join(sorted(effects))}, often effects of these causes", Tone.FAINT, "also"
        )
    if listed:
        yield Sentence("docs/reference/codes.md explains each of these codes", Tone.FAINT, "codes")


def _explain_withheld(rows: Sequence[Measurement], called: Mapping[str, str]) -> Iterator[Sentence]:
    """Reasons for missing percentiles of VALID processes that have enough samples; the others were not requested."""
    seen = [
        f"{_format_where(row, called)}: {name}: {why}"
        for row in rows
        for name, why in (
            row.latency_ns.withheld if row.latency_ns and row.is_valid else {}
        ).items()
        if row.samples >= count_samples_needed(float(name[1:]))
    ]
    if seen:
        remedy = "measure longer (" + Argument("min_time") + "), or on a quieter machine"
        yield Sentence("percentiles not shown", Tone.FAINT, "note", _shorten_list(seen), remedy)


def _shorten_list(seen: Sequence[str]) -> tuple[str, ...]:
    more = len(seen) - MAX_REASONS_SHOWN
    return (*seen[:MAX_REASONS_SHOWN], *([f"… and {more} more"] if more > 0 else []))


def _format_where(row: Measurement, called: Mapping[str, str]) -> str:
    rate = "" if row.load.rate_per_s is None else f" at {row.load.rate_per_s:.4g}/s"
    return f"{called[row.subject.artifact]} {row.load.size}{rate}"


def _cell_from_listed(figure: GroupFigure | None, name: str) -> Cell:
    """A figure without a field of its own, with half its interval."""
    if figure is None or figure.unit is None:
        return Cell("")
    return _cell_from_figure(figure.estimate, figure.unit, name)


def _cell_from_figure(estimate: Estimate | None, unit: Dimension, name: str) -> Cell:
    if estimate is None:
        return Cell("")
    text, note = find_metric(name).mark + format_quantity(estimate.value, unit), ""
    if estimate.high is not None and estimate.value > 0:
        note = f"±{(estimate.high - estimate.value) / estimate.value:.1%}"
    return Cell(text, note=note, value=estimate.value)


def _get_value(group: MeasurementGroup, name: str) -> float | None:
    figure = group.figures.get(name)
    return None if figure is None else figure.estimate.value


def _format_with_interval(group: MeasurementGroup, name: str) -> Cell:
    """`0.2632 ±0.4%`: the value with half its interval over processes; both bounds are in the JSON."""
    if name not in group.figures:
        return Cell("")
    estimate = group.figures[name].estimate
    note = (
        "" if estimate.high is None else f"±{(estimate.high - estimate.value) / estimate.value:.1%}"
    )
    return Cell(_format_number(estimate.value / 1e6), note=note, value=estimate.value)


def _format_number(value: float | None, prefix: str = "") -> str:
    if value is None:
        return ""
    return f"{prefix}{value:,.0f}" if value >= 1000 else f"{prefix}{value:.4g}"


def document_from_comparison(comparison: Comparison) -> Document:
    best = [
        Sentence(
            comparison.row(row).label + "  " + comparison.best_reason[goal],
            Tone.STRONG,
            f"best for {goal}",
        )
        if row is not None
        else Sentence("– " + comparison.best_reason[goal], Tone.FAINT, f"best for {goal}")
        for goal, row in comparison.best.items()
    ]
    if not any(row is not None for row in comparison.best.values()):
        best = [Sentence(summarize_comparison(comparison), Tone.DOUBTFUL)]
    limit = Sentence(
        f"only builds that meet {comparison.slo}, judged by the interval's upper bound", Tone.FAINT
    )
    return make_document(
        [*best, limit if comparison.slo else None, *list_comparison_parts(comparison)]
    )


def summarize_comparison(comparison: Comparison) -> str:
    best = {
        goal: comparison.row(row).label for goal, row in comparison.best.items() if row is not None
    }
    winners = [
        f"{label} for {goal} (" + comparison.best_reason[goal] + ")" for goal, label in best.items()
    ]
    if not winners:
        reasons = join_texts(", ", dict.fromkeys(comparison.best_reason.values()))
        return "No build can be recommended: " + reasons + "."
    limit = f" under {comparison.slo}" if comparison.slo else ""
    return f"Best{limit}: " + join_texts("; ", winners) + "."


def list_comparison_parts(comparison: Comparison) -> Iterator[Part]:
    if comparison.rows:
        yield _tabulate_comparison(comparison)
    for row in comparison.rows:
        if not row.valid:
            yield Sentence(f"{row.label}: {', '.join(row.reason_codes)}", Tone.BAD, "INVALID")
    if comparison.baseline:
        yield Sentence(
            f"{comparison.baseline}; speedups are those of p50 latency", Tone.FAINT, "baseline"
        )
    if count := len(comparison.unmatched):
        listed = _shorten_list(
            [f"{label}: " + reason for label, reason in comparison.unmatched.items()]
        )
        yield Sentence(
            f"{count} row{' has' if count == 1 else 's have'} no baseline",
            Tone.FAINT,
            "note",
            listed,
        )
    yield from (Sentence(warning, Tone.DOUBTFUL, "warning") for warning in comparison.warnings)


def _tabulate_comparison(comparison: Comparison) -> Table:
    sample = name_sample(row.load.sample for row in comparison.rows)
    columns: list[Column | str] = [
        Column("build", rank=0),
        Column("status", ColumnKind.STATE, rank=0),
        Column("dominated by", rank=PAGE_ONLY, below=True),
        figure_column("batch", rank=0),
        Column("load", shared=True, below=True),
        figure_column(MEAN_P50, "ms", rank=0),
        figure_column("p99", "ms"),
        figure_column(f"{sample}s/s"),
        figure_column("speedup"),
        Column("change", rank=2, below=True),
        figure_column("tokens/s", rank=2),
        figure_column(f"{sample}s/J", rank=2),
        figure_column("top-1", rank=2),
        figure_column("memory", rank=2),
        figure_column("size", rank=2),
        *(figure_column(find_metric(name).title, rank=2) for name in _list_listed(comparison)),
        figure_column(BUILD_TIME.title, rank=TEXT_ONLY),
        figure_column("processes", rank=TEXT_ONLY),
        Column("artifact", ColumnKind.NAME, rank=TEXT_ONLY + 1),
    ]
    on_frontier = sum(row.on_frontier for row in comparison.rows)
    count = len(comparison.rows)
    caption = f"{count} measurement{'' if count == 1 else 's'}, {on_frontier} on the frontier"
    caption += _describe_levels(comparison)
    rows = [_list_comparison_cells(row, comparison) for row in comparison.rows]
    return make_table(columns, rows, id="builds", caption=caption)


def _list_listed(comparison: Comparison) -> list[str]:
    """The names of figures without a field of their own that any row has."""
    return sorted({name for row in comparison.rows for name in row.figures})


def _describe_levels(comparison: Comparison) -> str:
    """The confidences of the intervals that the table shows; empty if it shows none."""
    levels = comparison.confidence
    shown = (
        ("speedups", levels.speedup, [row.speedup for row in comparison.rows]),
        ("top-1", levels.top1, [row.top1 for row in comparison.rows]),
    )
    said = [
        f"{name} at {100 * level:.4g}%"
        for name, level, figures in shown
        if any(figure is not None and figure.low is not None for figure in figures)
    ]
    return f"; brackets are confidence intervals, {' and '.join(said)}" if said else ""


def _list_comparison_cells(row: ComparisonRow, comparison: Comparison) -> Row:
    state, tone = ("dominated", Tone.PLAIN) if row.valid else ("INVALID", Tone.BAD)
    if row.on_frontier:
        state, tone = "frontier", Tone.GOOD
    per_watt = EFFICIENCY.read_row(row)
    return (
        row.configuration,
        Cell(state, tone),
        f"by {comparison.row(row.dominated_by.split(': ', 1)[0]).label}"
        if row.dominated_by
        else "",
        str(row.load.batch_size),
        ", ".join([*row.load.list_lengths(), row.scenario, row.load.mode]),
        cell_from_latency(row.latency_ns.get(P50.name)),
        cell_from_latency(row.latency_ns.get(P99.name)),
        cell_from_estimate(row.throughput_images_per_s, "{:,.0f}"),
        cell_from_estimate(row.speedup, "{:.2f}×", interval=True),
        row.change,
        cell_from_estimate(row.throughput_tokens_per_s, "{:,.0f}"),
        Cell("") if per_watt is None else Cell(f"{per_watt.value:.3g}", value=per_watt.value),
        cell_from_estimate(row.top1, "{:.2%}", interval=True),
        Cell(format_bytes(row.memory_bytes) if row.memory_bytes else "", value=row.memory_bytes),
        Cell(format_bytes(row.size_bytes) if row.size_bytes else "", value=row.size_bytes),
        *(_cell_from_listed(row.figures.get(name), name) for name in _list_listed(comparison)),
        _cell_from_figure(BUILD_TIME.read_row(row), BUILD_TIME.dimension, BUILD_TIME.name),
        str(row.processes),
        row.artifact[:12],
    )


CURVES = 8
POINTS = 160


def draw_measurements(
    comparison: Comparison, measured: Sequence[RecordedMeasurement], runs: Sequence[Run], root: Path
) -> list[Figure | Sentence]:
    """Figures of `comparison`; file paths are relative to the report's folder `root`."""
    folders = {run.name: run for run in runs}
    chosen = _choose_curves(measured, comparison)
    latencies = tuple(
        _curve_from_measurement(label, recorded, folders[recorded.run], root)
        for label, recorded in chosen.items()
    )
    return draw_comparison(comparison, latencies, tuple(_list_processes(comparison, measured)))


def _list_processes(
    comparison: Comparison, measured: Sequence[RecordedMeasurement]
) -> Iterator[Point]:
    """The p50 of each process, relative to the median of the VALID processes of its row."""
    for row in comparison.rows[:CURVES]:
        processes = [
            (measurement, measurement.latency_ns.median)
            for measurement in (recorded.measurement for recorded in measured)
            if measurement.subject.artifact == row.artifact
            and measurement.load == row.load
            and measurement.subject.settings == row.settings
            if measurement.latency_ns and measurement.latency_ns.median
        ]
        valid = [p50 for measurement, p50 in processes if measurement.is_valid]
        why = ", ".join(
            dict.fromkeys(
                code for measurement, _ in processes for code in measurement.invalid_codes
            )
        )
        label = f"{row.label} (rejected: {why})" if why else row.label
        for measurement, p50 in processes:
            codes = ", ".join(measurement.invalid_codes)
            name = f"{row.label}; process: {measurement.process}; p50: {format_duration(p50)}; {codes or 'counted'}"
            yield Point(
                label, name, p50 / median(valid or [p50 for _, p50 in processes]), 0.0, flag=codes
            )


def list_raw_files(runs: Sequence[Run], root: Path, name: str | None = None) -> RawFiles:
    """Every existing file of `runs`, or each run's file `name`, with its hash from the manifest."""
    return tuple(
        RawFile(
            os.path.relpath((run.path / path).resolve(), root.resolve()),
            file.sha256,
            file.size_bytes,
        )
        for run in runs
        for path, file in run.manifest.files.items()
        if name in (None, path) and run.files.has(path)
    )


def _choose_curves(
    measured: Sequence[RecordedMeasurement], comparison: Comparison
) -> dict[str, RecordedMeasurement]:
    """The measurements to draw, by label: the best ones, then the smallest batch of each build."""
    by_id = {
        f"{recorded.run}/{recorded.measurement.id}": recorded
        for recorded in measured
        if recorded.measurement.samples
    }
    rows = sorted(comparison.rows, key=lambda row: (row.load.batch_size, row.configuration))
    smallest = {row.configuration: row.id for row in reversed(rows)}
    best = [row for row in comparison.best.values() if row]
    frontier = (row.id for row in rows if row.on_frontier)
    wanted = dict.fromkeys([*best, *smallest.values(), *frontier, *(row.id for row in rows)])
    drawn = [row_id for row_id in wanted if row_id in by_id][:CURVES]
    return {comparison.row(row_id).label: by_id[row_id] for row_id in drawn}


def _curve_from_measurement(
    label: str, recorded: RecordedMeasurement, run: Run, root: Path
) -> Curve:
    name = str(recorded.measurement.samples_file)
    frame = read_samples(run.files, name)
    ordered, count = np.sort((frame["end_ns"] - frame["scheduled_ns"]).to_numpy()) / 1e6, len(frame)
    tail = count - 1 - np.arange(min(8, count))
    at = np.unique(np.concatenate([np.linspace(0, count - 1, POINTS), tail]).astype(int))
    points = tuple((float(ordered[index]), (index + 1) / count) for index in at)
    return Curve(label, points, list_raw_files((run,), root, name))


def frame_from_comparison(comparison: Comparison) -> pl.DataFrame:
    """One row per build and load, with the values and names of the JSON document: `load_batch_size`, `latency_ns_p50_value`."""
    rows = [
        {
            name: "; ".join(value) if isinstance(value, list) else value
            for name, value in plain_from_record(row).items()
        }
        | {"settings": format_settings(row.settings, row.settings)}
        for row in comparison.rows
    ]
    frame = pl.json_normalize(rows, separator="_", infer_schema_length=None)
    # of own metrics, the figures of the processes; a CSV file has no lists
    frame = frame.with_columns(pl.col(pl.List).cast(pl.List(pl.String)).list.join("; "))
    return frame.select(column.name for column in frame if column.null_count() < frame.height)
