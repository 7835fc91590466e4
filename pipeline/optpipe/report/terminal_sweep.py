"""A sweep on the terminal: what is planned or what came of it, one row per cell."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.estimate import Estimate
from optpipe.core.measurement import Mode, Scenario, name_sample
from optpipe.core.units import format_duration
from optpipe.report.markdown import format_figure, format_ms, render_table_lines
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.sweep.merge import MergeRecord
    from optpipe.sweep.neighbors import NeighborEffect
    from optpipe.sweep.rows import SweepRecord, SweepRow

_STYLES = {"done": "green", "invalid": "red", "failed": "red", "impossible": "yellow", "elsewhere": "yellow"}


def render_sweep(record: "SweepRecord") -> RenderableType:
    """The table, the reasons of rows without a figure, and the sum."""
    table = make_table("GPU", "model", "build", "load", right=_list_figures(record), last=("state",), dense=True)
    for row in record.rows:
        state = f"{row.state} (stored)" if row.stored and row.state != "stored" else row.state
        table.add_row(*_list_texts(row), Text(state, style=_STYLES.get(row.state, "")))
    return Group(table, *map(Text, _list_reasons(record.rows)), *map(Text, _sum_up(record)), *map(Text, _judge(record)))


def _list_figures(record: "SweepRecord") -> tuple[str, ...]:
    return "p50 ms", "p99 ms", f"{name_sample(row.sample for row in record.rows)}s/s"


def _list_texts(row: "SweepRow") -> tuple[str, ...]:
    recipe, load, figures = row.cell.recipe, row.cell.load, row.figures or {}
    return (
        row.cell.kind,
        recipe.model,
        " ".join([recipe.backend, recipe.precision, *(each.partition(".")[2] for each in row.cell.options)]),
        _describe_load(row),
        format_ms(figures.get("p50")),
        format_ms(figures.get("p99") if load.percentile >= 99 else None),
        format_figure(figures.get("throughput"), "{:,.0f}"),
    )


def _describe_load(row: "SweepRow") -> str:
    load = row.cell.load
    usual = load.scenario is Scenario.SINGLE_STREAM and load.mode is Mode.COMPUTE
    return load.size if usual else str(load)


def _list_reasons(rows: "Sequence[SweepRow]") -> Iterator[str]:
    """One line for each reason, however many cells have it; then what was tried before."""
    same: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason and row.state != "done":
            same.setdefault((row.state, row.reason), []).append(row.cell.label)
    for (state, reason), labels in same.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        yield f"{state}  {labels[0]}{more}: {reason}"
    for row in rows:
        for why in row.attempts:
            yield f"tried again  {row.cell.label}: {why}"


def _sum_up(record: "SweepRecord") -> Iterator[str]:
    counts = ", ".join(f"{count} {state}" for state, count in record.counts.items())
    slots = f"{len(record.slots)} slot{'' if len(record.slots) == 1 else 's'}"
    yield f"{len(record.rows)} cell{'' if len(record.rows) == 1 else 's'} on {slots}: {counts}"
    if record.dry_run:
        left = record.counts.get("to run", 0)
        known = "unknown, no earlier jobs" if record.estimate_s is None else format_duration(record.estimate_s * 1e9)
        yield f"{left} job{'' if left == 1 else 's'} to run; estimated time: {known}" if left else "nothing to run"
        return
    told = ", timing one GPU after the other (neighbor effect)" if record.serialized else ""
    yield f"took {format_duration(record.seconds * 1e9)}{told}"


def _judge(record: "SweepRecord") -> Iterator[str]:
    """The verdict against the baseline, cell by cell."""
    found = record.regression
    if found is None:
        return
    for one in found.cells:
        ratio = "" if one.ratio is None else f"p50 {format_figure(one.ratio, '{:.3f}', interval=True)} of the baseline"
        yield "  ".join(each for each in (one.verdict, one.label, ratio, one.reason) if each)
    counts = Counter(one.verdict for one in found.cells)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield (
        f"{found.verdict} against {found.baseline}: {told}; tolerance {found.tolerance:.1%}, "
        f"at most {found.level:.1%} false FAIL over all cells ({found.method})"
    )


def render_sweep_markdown(record: "SweepRecord") -> str:
    """The same as Markdown, for a report."""
    heads = ("GPU", "model", "build", "load", *_list_figures(record), "processes", "state", "run")
    rows = [(*_list_texts(row), str(row.processes), row.state, row.run or "") for row in record.rows]
    lines = ["# Sweep", "", *render_table_lines(heads, rows), "", *(f"- {each}" for each in _list_reasons(record.rows))]
    return "\n".join([*lines, "", *_sum_up(record), "", *(f"- {each}" for each in _judge(record)), ""])


def render_neighbor_effect(found: "NeighborEffect") -> RenderableType:
    """The effect with its interval and what follows from it."""
    low, high = found.ratio.ci
    effect = Estimate(found.ratio.value - 1, low - 1, high - 1)
    follows = (
        "timing is serialized on this host: the interval does not exclude an effect over 2 %; builds stay parallel"
        if found.serializes
        else "figures taken side by side may be compared with figures taken alone"
    )
    return Group(
        Text(
            f"neighbor effect of {found.slots - 1} busy neighbor{'s' if found.slots > 2 else ''}: "
            f"{effect.value:+.2%} ({effect.bounds[0]:+.2%} … {effect.bounds[1]:+.2%}) of the time per query, "
            f"{found.ratio.rounds} rounds"
        ),
        Text(f"{found.label}, batch {found.batch_size}, on host {found.host}"),
        Text(follows),
    )


def render_merge(record: "MergeRecord") -> RenderableType:
    """What was added, what differs, what was left out."""
    lines = [f"conflict  {each}" for each in record.conflicts] + [f"not merged  {each}" for each in record.damaged]
    many = "" if len(record.sources) == 1 else "s"
    total = f"{len(record.sources)} workspace{many}: {record.added} added, {record.present} already here"
    count = len(record.conflicts)
    return Group(*map(Text, [*lines, f"{total}, {count} conflict{'' if count == 1 else 's'}"]))
