"""A report as Markdown, for a pull request or a CI step summary: the answer first, then tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optpipe.core.comparison import Comparison, Interval, Row
from optpipe.core.units import bytes_text
from optpipe.reporters.answer import answer_text
from optpipe.reporters.records import observed_text
from optpipe.reporters.report import Report

MARKS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "⚠️"}


def markdown_report(report: Report) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    lines = [f"## {_heading(report)}", "", _escaped(answer_text(report)), ""]
    if report.verdict:
        lines += _criteria(report.verdict)
    if report.comparison.rows:
        lines += ["### Builds", "", *comparison_lines(report.comparison), ""]
    if report.verdict:
        lines += ["<details><summary>Void if</summary>", ""]
        lines += [f"- {_escaped(one)}" for one in report.verdict["expires_if"]]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _heading(report: Report) -> str:
    if report.verdict is None:
        return _escaped(report.title)
    verdict = str(report.verdict["verdict"])
    return f"{MARKS[verdict]} {verdict}: {_escaped(report.title)}"


def _criteria(verdict: Mapping[str, Any]) -> list[str]:
    lines = [
        f"> **WAIVED** `{one['name']}` is {one['verdict']} and does not count: {_escaped(one['waived'])}"
        for one in verdict["criteria"]
        if one["waived"]
    ]
    lines += [""] if lines else []
    rows = [
        (
            f"`{one['name']}`",
            f"{MARKS[one['verdict']]} {one['verdict']}" + (" (waived)" if one["waived"] else ""),
            observed_text(one),
            str(one["limit"]),
            one["reason"] + (f" → {one['remedy']}" if one["remedy"] and one["verdict"] != "PASS" else ""),
        )
        for one in verdict["criteria"]
    ]
    notes = [f"\n> Note: {_escaped(one['message'])} → {_escaped(one['remedy'])}" for one in verdict.get("notes", ())]
    return [*lines, *table_lines(("criterion", "verdict", "observed", "limit", "why"), rows), *notes, ""]


def comparison_lines(comparison: Comparison) -> list[str]:
    """The table of builds, best goals above it, warnings below."""
    header = ("build", "batch", "load", "p50 ms", "p99 ms", "images/s", "speed-up", "memory", "standing")
    lines = list(table_lines(header, [_cells(row) for row in comparison.rows], right=range(3, 8)))
    if comparison.baseline:
        lines += ["", f"Baseline: {_escaped(str(comparison.baseline['name']))}."]
    lines += [f"\n> {_escaped(warning)}" for warning in comparison.warnings]
    lines += [f"- no counterpart: {_escaped(one['label'])}: {_escaped(one['reason'])}" for one in comparison.unmatched]
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    standing = "**frontier**" if row.on_frontier else "dominated" if row.valid else "INVALID"
    return (
        row.configuration,
        str(row.batch_size),
        f"{row.load}, {row.mode}",
        figure_text(row.latency_ms.get("p50"), "{:.3g}"),
        figure_text(row.latency_ms.get("p99"), "{:.3g}"),
        figure_text(row.throughput_images_per_s, "{:,.0f}"),
        figure_text(row.speedup, "{:.2f}×", interval=True),
        bytes_text(row.memory_bytes) if row.memory_bytes else "–",
        standing,
    )


def figure_text(figure: Interval | None, form: str, *, interval: bool = False) -> str:
    """A figure by its format, with its interval if asked for; a dash for none."""
    if figure is None:
        return "–"
    text = form.format(figure.value)
    if not interval or figure.low is None or figure.high is None:
        return text
    return f"{text} [{form.format(figure.low)}, {form.format(figure.high)}]"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """A table's lines; the columns `right` are aligned to the right."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if at in right else "---" for at in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(_escaped(cell) for cell in row) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
