"""Documents, pages, and frames of a model's history."""

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import polars as pl

from optpipe import __version__
from optpipe.core.history import Finding, History, HistoryChange, HistoryRun, HistorySeries
from optpipe.core.quantity import Dimension, Estimate, format_interval, format_quantity
from optpipe.report.charts import FEWEST_POINTS, Point, draw_points
from optpipe.report.document import (
    TONES,
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Page,
    Part,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    make_document,
    make_table,
)

AXES = {
    Dimension.TIME: (1e-6, "ms"),
    Dimension.SIZE: (2.0**-20, "MiB"),
    Dimension.SHARE: (100.0, "%"),
    Dimension.ENERGY: (1e3, "mJ"),
    Dimension.SAMPLE_ENERGY: (1e3, "mJ"),
}
"""Factor and unit of an axis; others are shown as they are."""
MAX_FIGURES = 24
"""Drawings of a page; those with a change come first."""
MOST_RUNS_SHOWN = 20
"""Runs in the terminal; a page has all."""


def document_from_history(history: History) -> Document:
    return make_document(_list_parts(history, most=MOST_RUNS_SHOWN))


def _list_parts(history: History, *, most: int | None = None) -> Iterator[Part]:
    yield Sentence(
        summarize_history(history),
        {
            Finding.REGRESSION: Tone.BAD,
            Finding.NO_REGRESSION: Tone.GOOD,
            Finding.TOO_FEW: Tone.DOUBTFUL,
        }[history.finding],
        history.finding,
    )
    if any(series.changes for series in history.series):
        yield tabulate_changes(history)
    if any(series.judged for series in history.series):
        yield tabulate_series(history)
    yield tabulate_runs(history, most)
    yield from list_remarks(history)


def list_remarks(history: History) -> Iterator[Sentence]:
    if history.left_out:
        listed = tuple(f"{name}: {why}" for name, why in history.left_out.items())
        count = len(listed)
        text = f"{count} run{'s' if count > 1 else ''} could not be read, and count{'' if count > 1 else 's'} nowhere"
        more = (f"and {count - 5} more",) if count > 5 else ()
        yield Sentence(text, Tone.DOUBTFUL, "left out", (*listed[:5], *more))
    yield from (Sentence(warning, Tone.DOUBTFUL, "warning") for warning in history.warnings)


def summarize_history(history: History) -> str:
    """`digits: p50 latency of onnxruntime int8 is 3.1% worse since bench-…; 30 runs since 2026-11-02.`"""
    runs = [run for run in history.runs if not run.doubt]
    span = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    if runs:
        first, last = runs[0].started_utc[:10], runs[-1].started_utc[:10]
        span += f" on {first}" if first == last else f" from {first} to {last}"
    changed = [(series, change) for series in history.series for change in series.regressions]
    if changed:
        series, change = max(changed, key=lambda pair: abs(pair[1].ratio or 0.0))
        worst = f"{series.label}: {_describe_change(series, change)} since {change.first_after}"
        more = f"; {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{history.model}: {worst}{more}; {span}."
    if history.finding is Finding.TOO_FEW:
        return f"{history.model}: {span}; a change can show from {history.runs_needed} runs of one figure on."
    count = sum(series.judged for series in history.series)
    return f"{history.model}: no figure is worse than it was; {span}, {count} figures."


def _describe_change(series: HistorySeries, change: HistoryChange) -> str:
    before, after = (
        format_quantity(estimate.value, series.unit) for estimate in (change.before, change.after)
    )
    ratio = change.ratio
    share = "" if ratio is None else f" ({100 * ratio:+.1f}%)"
    return f"{before} to {after}{share}"


def tabulate_changes(history: History) -> Table:
    """The changes of all figures, in order of the runs between which they lie."""
    order = {run.name: at for at, run in enumerate(history.runs)}
    every = [(series, change) for series in history.series for change in series.changes]
    every.sort(key=lambda pair: order.get(pair[1].first_after, 0))
    columns = (
        Column("figure", rank=0),
        Column("change", ColumnKind.STATE, rank=0),
        figure_column("from"),
        figure_column("to"),
        figure_column("by", rank=0),
        Column("last before", ColumnKind.NAME, rank=1),
        Column("first after", ColumnKind.NAME, rank=1),
        Column("what differs", rank=2),
    )
    rows = []
    for series, change in every:
        state, tone = ("better", Tone.GOOD) if not change.worse else ("worse", Tone.BAD)
        if change.worse and change.recovered:
            state, tone = "worse, recovered", Tone.DOUBTFUL
        ratio = change.ratio
        differing = (
            "; ".join(change.differences) or "nothing that was recorded: look at the machine"
        )
        rows.append(
            (
                series.label,
                Cell(state, tone),
                _cell(change.before, series.unit),
                _cell(change.after, series.unit),
                Cell("" if ratio is None else f"{100 * ratio:+.1f}%", value=ratio),
                change.last_before,
                change.first_after,
                differing,
            )
        )
    caption = f"A change lies between two runs. One history in {1 / history.risk:.0f} without a change shows one."
    return make_table(columns, rows, title="Changes", caption=caption, id="changes")


def tabulate_series(history: History) -> Table:
    several = len({series.machine for series in history.series if series.machine}) > 1
    columns = (
        Column("build", rank=0),
        Column("load or data", shared=True),
        Column("machine", rank=2, shared=True),
        Column("figure", rank=0),
        figure_column("runs"),
        figure_column("newest", rank=0),
        figure_column("mean", rank=1),
    )
    rows = [
        (
            series.build,
            series.about,
            series.machine if several else "",
            series.title,
            str(len(series.points)),
            _cell(series.points[-1].figure, series.unit),
            _cell(series.mean, series.unit),
        )
        for series in history.series
        if series.judged
    ]
    caption = "The mean is that of the runs since the last change, with its 95% interval over runs."
    return make_table(columns, rows, title="Figures", caption=caption, id="figures-of-runs")


def tabulate_runs(history: History, most: int | None = None) -> Table:
    shown = history.runs if most is None else history.runs[-most:]
    many = len(history.workspaces) > 1
    columns = (
        Column("time (UTC)", rank=0),
        Column("kind", ColumnKind.STATE, rank=0),
        Column("name", ColumnKind.NAME, rank=1),
        Column("model", rank=2, shared=True),
        Column("builds"),
        Column("result", rank=0),
        Column("commit", ColumnKind.NAME, rank=1),
        Column("workspace", ColumnKind.NAME, rank=2),
    )
    rows = [(*_list_run_cells(run), run.workspace if many else "") for run in shown]
    earlier = len(history.runs) - len(shown)
    caption = f"The newest {len(shown)} of {len(history.runs)} runs." if earlier else ""
    return make_table(columns, rows, title="Runs", caption=caption, id="runs")


def _list_run_cells(run: HistoryRun) -> tuple[Cell | str, ...]:
    result = Cell(run.result)
    if run.verdict is not None:
        result = Cell(run.verdict, TONES[run.verdict], run.result)
    elif run.doubt:
        result = Cell(run.result, Tone.DOUBTFUL, f"in no series: {run.doubt}")
    return (
        run.started_utc[:16].replace("T", " "),
        run.kind,
        run.name,
        run.model,
        ", ".join(run.builds),
        result,
        run.commit[:12],
    )


def _cell(figure: Estimate | None, unit: Dimension) -> Cell:
    if figure is None or not isfinite(figure.value):
        return Cell("")
    text, note = format_quantity(figure.value, unit), ""
    if figure.low is not None and figure.high is not None:
        note = format_interval(figure.low, figure.high, unit, text)
    return Cell(text, note=note, value=figure.value)


def draw_series(series: HistorySeries) -> Figure:
    """One figure run by run, with its intervals; every level between two changes has its own color."""
    scale, unit = AXES.get(series.unit, (1.0, str(series.unit)))
    starts = {change.first_after: change for change in series.changes}
    level, points = "since the first run", list[Point]()
    for number, point in enumerate(series.points, start=1):
        if (change := starts.get(point.run)) is not None:
            level = f"from run {number}: {_describe_change(series, change)}"
        shown = point.figure.scale(scale)
        name = f"{point.run}; {point.started_utc[:16]}; {format_quantity(point.figure.value, series.unit)}"
        points.append(
            Point(level, name, number, shown.value, group=level, low=shown.low, high=shown.high)
        )
    if not series.changes:
        points = [
            Point("", point.label, point.x, point.y, low=point.low, high=point.high, group="all")
            for point in points
        ]
    title = series.label + (f", {series.machine}" if series.machine else "")
    caption = "Each point is a run with its 95% interval over processes, or over samples."
    return draw_points(title, caption, points, "run", f"{series.title} ({unit})", linear=True)


def choose_drawn(history: History) -> list[HistorySeries]:
    """The series with enough runs for a drawing: those that changed first."""
    able = [
        series for series in history.series if series.judged and len(series.points) >= FEWEST_POINTS
    ]
    return sorted(able, key=lambda series: -len(series.changes))[:MAX_FIGURES]


def page_from_history(history: History) -> Page:
    drawn = [draw_series(series) for series in choose_drawn(history)]
    changes = (
        [tabulate_changes(history)] if any(series.changes for series in history.series) else []
    )
    figures = [tabulate_series(history)] if any(series.judged for series in history.series) else []
    sections = (
        Section("Changes", tuple(changes), "changes-of-figures"),
        Section("Figures", tuple(figures), "series"),
        Section("Run by run", tuple(drawn), "drawings"),
        Section("Runs", (tabulate_runs(history), *list_remarks(history)), "all-runs"),
    )
    return Page(
        f"History of {history.model}",
        summarize_history(history),
        tuple(section for section in sections if section.parts),
        optpipe=__version__,
    )


def frame_from_history(series: Sequence[HistorySeries]) -> pl.DataFrame:
    """A row for each figure of each run, with the bounds of its interval in the unit's base, and the number of its level."""
    rows = []
    for line in series:
        starts, level = {change.first_after for change in line.changes}, 0
        for point in line.points:
            level += point.run in starts
            rows.append(
                {
                    "build": line.build,
                    "about": line.about,
                    "machine": line.machine,
                    "metric": line.metric,
                    "unit": str(line.unit),
                    "run": point.run,
                    "started_utc": point.started_utc,
                    "artifact": point.artifact,
                    "value": point.figure.value,
                    "low": point.figure.low,
                    "high": point.figure.high,
                    "level": level,
                }
            )
    kinds = {"value": pl.Float64, "low": pl.Float64, "high": pl.Float64, "level": pl.Int64}
    names = ("build", "about", "machine", "metric", "unit", "run", "started_utc", "artifact")
    return pl.DataFrame(rows, schema={**dict.fromkeys(names, pl.String), **kinds})


def frame_from_changes(series: Sequence[HistorySeries]) -> pl.DataFrame:
    """A row for each change."""
    rows = [
        {
            "build": line.build,
            "about": line.about,
            "machine": line.machine,
            "metric": line.metric,
            "before": change.before.value,
            "after": change.after.value,
            "worse": change.worse,
            "recovered": change.recovered,
            "last_before": change.last_before,
            "first_after": change.first_after,
            "p_value": change.p_value,
            "differences": list(change.differences),
        }
        for line in series
        for change in line.changes
    ]
    texts = ("build", "about", "machine", "metric", "last_before", "first_after")
    kinds: dict[str, Any] = {
        **dict.fromkeys(texts, pl.String),
        **dict.fromkeys(("before", "after", "p_value"), pl.Float64),
        **dict.fromkeys(("worse", "recovered"), pl.Boolean),
        "differences": pl.List(pl.String),
    }
    return pl.DataFrame(rows, schema=kinds)
