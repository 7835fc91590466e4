"""A comparison on the terminal: the best builds, then a table for each kind of load, then what is known of each build.

A table that is wider than the terminal cannot be read: columns are left out from the end of `_OPTIONAL` until it fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.estimate import Estimate
from optpipe.core.units import format_bytes, format_duration
from optpipe.reporters.markdown import format_figure, format_ms, list_unmatched
from optpipe.reporters.tables import make_table


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    text: Callable[[ComparisonRow], str]
    number: bool = True


def render_comparison(comparison: Comparison) -> RenderableType:
    """The best builds first, then every row."""
    lines: list[RenderableType] = list(_render_best(comparison))
    lines += (
        [Text(f"only what meets {comparison.slo}, judged by the interval's upper bound", style="dim")]
        if comparison.slo
        else []
    )
    loads = dict.fromkeys((row.load.scenario, row.load.mode) for row in comparison.rows)
    for scenario, mode in loads:
        rows = [row for row in comparison.rows if (row.load.scenario, row.load.mode) == (scenario, mode)]
        lines += [Text(""), Text(f"{scenario}, {mode}", style="bold"), _MeasurementTable(rows)]
        lines += [
            Text(f"INVALID  {row.label}: {', '.join(row.reason_codes)}", style="red") for row in rows if not row.valid
        ]
    lines += [Text(""), _render_builds(comparison.rows)] if comparison.rows else []
    if comparison.baseline:
        lines.append(Text(f"baseline  {comparison.baseline.name}; speed-up refers to p50 latency", style="dim"))
    lines += [Text(line, style="dim") for line in list_unmatched(comparison)]
    lines += [Text(f"warning  {one}", style="yellow") for one in comparison.warnings]
    return Group(*lines)


def _render_best(comparison: Comparison) -> Iterator[Text]:
    for goal, row_id in comparison.best.items():
        name = f"best for {goal}"
        if row_id is None:
            yield Text(f"{name:<21} – {comparison.best_reason[goal]}", style="dim")
        else:
            found = comparison.row(row_id)
            yield Text.assemble(f"{name:<21} ", (found.label, "bold"), f"  {comparison.best_reason[goal]}")


_ALWAYS = (
    _Column("build", lambda row: row.configuration, number=False),
    _Column("batch", lambda row: f"{row.load.batch_size} {row.load.arrivals}".rstrip()),
    _Column("p50 ms", lambda row: format_ms(row.latency_ns.get("p50"))),
    _Column("p99 ms", lambda row: format_ms(row.latency_ns.get("p99"))),
    _Column("images/s", lambda row: format_figure(row.throughput_images_per_s, "{:,.0f}")),
    _Column("speed-up", lambda row: _format_range(row.speedup)),
    _Column("standing", lambda row: "frontier" if row.on_frontier else "" if row.valid else "INVALID", number=False),
)
_LENGTH = _Column("length", lambda row: str(row.load.length or "–"))
_OPTIONAL = (
    _Column("tokens/s", lambda row: format_figure(row.throughput_tokens_per_s, "{:,.0f}")),
    _Column("memory", lambda row: format_bytes(row.memory_bytes) if row.memory_bytes else "–"),
    _Column("images/J", lambda row: f"{1 / row.energy_j_per_image.value:.3g}" if row.energy_j_per_image else "–"),
    _Column("processes", lambda row: str(row.processes)),
)


def _format_range(figure: Estimate | None) -> str:
    if figure is None:
        return "–"
    return f"{figure.value:.2f}" if figure.low is None else f"{figure.low:.2f} … {figure.high:.2f}"


@dataclass(frozen=True, slots=True)
class _MeasurementTable:
    """The measurements under one kind of load, as wide as the terminal."""

    rows: Sequence[ComparisonRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = [column for column in _OPTIONAL if any(column.text(row) != "–" for row in self.rows)]
        first = (*_ALWAYS[:2], _LENGTH) if any(row.load.length for row in self.rows) else _ALWAYS[:2]
        while True:
            table = _make_table((*first, *_ALWAYS[2:-1], *known, _ALWAYS[-1]), self.rows)
            if not known or console.measure(table, options=options.update(width=10_000)).maximum <= options.max_width:
                break
            known.pop()
        yield table


def _make_table(columns: Sequence[_Column], rows: Sequence[ComparisonRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="right" if column.number else "left", overflow="fold")
    for row in rows:
        style = "green" if row.on_frontier else "red" if not row.valid else ""
        table.add_row(*(Text(column.text(row), style=style if column.name == "standing" else "") for column in columns))
    return table


def _render_builds(rows: Sequence[ComparisonRow]) -> Table:
    """What holds for a build at every batch size."""
    table = make_table("build", "artifact", right=("top-1", "size", "build time"), dense=True)
    for row in {row.artifact: row for row in rows}.values():
        table.add_row(
            row.build,
            row.artifact[:12],
            format_figure(row.top1, "{:.2%}", interval=True),
            format_bytes(row.size_bytes) if row.size_bytes else "–",
            format_duration(row.build_s * 1e9) if row.build_s is not None else "–",
        )
    return table
