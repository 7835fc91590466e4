"""A comparison on the terminal: the best builds, then a table for each kind of load, then what is known of each build.

A table that is wider than the terminal cannot be read: columns are left out from the end of `_OPTIONAL` until it fits.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.estimate import Estimate
from optpipe.core.measurement import name_sample
from optpipe.core.units import format_bytes, format_duration
from optpipe.report.markdown import format_figure, format_ms, list_unmatched
from optpipe.report.tables import FittingTable, make_table

DROPPABLE_COLUMNS = ("processes", "images/J", "samples/J", "memory", "tokens/s")
"""What a narrow terminal goes without, in this order."""


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
        lines += [Text(""), Text(f"{scenario}, {mode}", style="bold"), _render_measurements(rows)]
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


def _format_range(figure: Estimate | None) -> str:
    if figure is None:
        return "–"
    return f"{figure.value:.2f}" if figure.low is None else f"{figure.low:.2f} … {figure.high:.2f}"


def _render_measurements(rows: Sequence[ComparisonRow]) -> FittingTable:
    """The measurements under one kind of load, as wide as the terminal."""
    sample = name_sample(row.load.sample for row in rows)
    columns: list[tuple[str, Sequence[str | Text]]] = [
        ("build", [row.configuration for row in rows]),
        ("batch", [f"{row.load.batch_size} {row.load.arrivals}".rstrip() for row in rows]),
        ("length", [str(row.load.length or "–") for row in rows]),
        ("p50 ms", [format_ms(row.latency_ns.get("p50")) for row in rows]),
        ("p99 ms", [format_ms(row.latency_ns.get("p99")) for row in rows]),
        (f"{sample}s/s", [format_figure(row.throughput_images_per_s, "{:,.0f}") for row in rows]),
        ("speed-up", [_format_range(row.speedup) for row in rows]),
        ("tokens/s", [format_figure(row.throughput_tokens_per_s, "{:,.0f}") for row in rows]),
        ("memory", [format_bytes(row.memory_bytes) if row.memory_bytes else "–" for row in rows]),
        (
            f"{sample}s/J",
            [f"{1 / row.energy_j_per_image.value:.3g}" if row.energy_j_per_image else "–" for row in rows],
        ),
        ("processes", [str(row.processes) for row in rows]),
        ("standing", [_format_standing(row) for row in rows]),
    ]
    optional = ("length", *DROPPABLE_COLUMNS)
    kept = [(name, cells) for name, cells in columns if name not in optional or set(cells) != {"–"}]
    return FittingTable(kept, ("build", "standing"), DROPPABLE_COLUMNS, dense=True)


def _format_standing(row: ComparisonRow) -> Text:
    if row.on_frontier:
        return Text("frontier", style="green")
    return Text("" if row.valid else "INVALID", style="red")


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
