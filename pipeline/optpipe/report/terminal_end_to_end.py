"""Files to predictions on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.units import format_duration
from optpipe.report.records import VERDICT_STYLES, format_rate_interval
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.preprocess.end_to_end import EndToEndFigures, EndToEndRecord, EndToEndResult

_COLUMNS = (
    "batch",
    "images/s",
    "95 % interval",
    "p50",
    "p99",
    "preprocess alone",
    "inference alone",
    "vs. slower part",
)


def render_end_to_end(record: "EndToEndRecord") -> RenderableType:
    """One row per artifact, then what limits each, and where its time went."""
    table = make_table("artifact", right=_COLUMNS, last=("bottleneck",))
    lines: list[Text] = []
    for each in record.results:
        if each.figures is None:
            lines.append(Text(f"failed  {each.label}: {each.error}", style="red"))
        else:
            table.add_row(each.label, str(each.plan.batch_size), *_format_row(each.figures))
            lines += _render_details(each, each.figures)
    head = Text(f"{record.images} images from {record.folder}, page cache warm")
    return Group(head, table, *lines, Text(f"evidence  {record.run_dir}"))


def _format_row(figures: "EndToEndFigures") -> list[str]:
    parts = figures.parts_images_per_s
    return [
        f"{figures.images_per_s:,.0f}",
        format_rate_interval(figures.ci),
        *("too few" if ns is None else format_duration(ns) for ns in (figures.latency_p50_ns, figures.latency_p99_ns)),
        f"{parts.preprocess:,.0f}",
        f"{parts.inference:,.0f}",
        f"{figures.of_slower_part:.2f}",
        figures.bottleneck.name,
    ]


def _render_details(result: "EndToEndResult", figures: "EndToEndFigures") -> list[Text]:
    line, check = figures.timeline, figures.check
    checked = f"  outputs of the timed run: {check.equal} of {check.predictions} match the reference"
    if check.classes < 2:
        checked += ", all of one class, so this proves nothing"
    lines = [
        Text(f"{result.label}  {figures.bottleneck.name}: {figures.bottleneck.reason}"),
        Text(
            f"  timeline: waiting for preprocessing {line.waiting_for_preprocessing:.0%}, launching {line.launching:.0%}, "
            f"waiting for outputs {line.waiting_for_outputs:.0%}, other {line.other:.0%}; handover {figures.handover}",
            style="dim",
        ),
        Text(checked, style="dim" if result.verdict == "PASS" else VERDICT_STYLES[result.verdict]),
    ]
    if figures.environment:
        settings = " ".join(f"{name}={value}" for name, value in figures.environment.items())
        lines.append(Text(f"  also set in your own process: {settings}", style="dim"))
    return lines
