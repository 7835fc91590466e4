"""Kinds of GPU side by side on the terminal: engines, costs, how many a load needs, what is missing."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.measurement import name_sample
from optpipe.report.markdown import format_figure, format_ms
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.core.estimate import Estimate
    from optpipe.sweep.fleet import FleetRecord, FleetRow


def render_fleet(record: "FleetRecord") -> RenderableType:
    """The table, then the warnings and the cells that are missing with the commands that fill them."""
    rate = f"{name_sample(row.sample for row in record.rows)}s/s"
    heads = ["length"] if any(row.length is not None for row in record.rows) else []
    heads += ["batch", (record.slo or "p50").partition(" ")[0] + " ms", rate]
    heads += [f"{record.currency}/million"] if record.currency else []
    heads += ["kWh/million"] if any(row.kwh_per_million for row in record.rows) else []
    heads += ["GPUs"] if record.load_per_s else []
    heads += [f"{record.currency}/hour"] if record.load_per_s and record.currency else []
    table = make_table("model", "GPU", "build", right=heads, last=("standing",), dense=True)
    for row in record.rows:
        texts = {
            "length": "–" if row.length is None else str(row.length),
            "batch": str(row.batch_size),
            rate: format_figure(row.throughput, "{:,.0f}"),
            "kWh/million": format_figure(row.kwh_per_million, "{:.3g}"),
            "GPUs": _format_count(row.gpus),
            f"{record.currency}/million": format_figure(row.cost_per_million, "{:.3g}"),
            f"{record.currency}/hour": format_figure(row.cost_per_hour, "{:,.2f}"),
        }
        shown = [texts.get(name, format_ms(row.latency_ns)) for name in heads]
        table.add_row(row.model, row.kind, row.build, *shown, _name_standing(row), style="" if row.best else "dim")
    lines = [f"warning  {each}" for each in record.warnings]
    for each in record.missing:
        lines += [f"missing  {each.kind}: {each.label}: {each.why}", f"         {each.command}"]
    notes = [f"batch sizes are the fastest that meet {record.slo}"] if record.slo else []
    if record.load_per_s:
        how = "simulated queue with batching" if record.slo else "throughput alone; --slo adds the queue"
        notes.append(f"GPUs for {record.load_per_s:,.0f} {rate}: {how}")
    return Group(table, *map(Text, lines), *(Text(each, style="dim") for each in notes))


def _format_count(count: "Estimate | None") -> str:
    if count is None:
        return "–"
    low, high = count.bounds
    return f"{count.value:,.0f}" if low == high else f"{count.value:,.0f} [{low:,.0f}, {high:,.0f}]"


def _name_standing(row: "FleetRow") -> str:
    return ", ".join(name for name, is_so in (("best", row.best), ("frontier", row.on_frontier)) if is_so)
