"""A report as Markdown, for a pull request or a CI step summary: the answer first, then tables."""

from collections.abc import Iterator, Sequence

from optpipe.core.comparison import ComparedValue, Comparison, ComparisonRow
from optpipe.core.units import format_bytes
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.reporters.answer import format_summary
from optpipe.reporters.records import format_observed
from optpipe.reporters.report import Report

MARKS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "⚠️"}


def render_markdown(report: Report) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    lines = [f"## {_format_heading(report)}", "", _escape(format_summary(report)), ""]
    if report.verdict:
        lines += _render_criteria(report.verdict)
    if report.comparison.rows:
        lines += ["### Builds", "", *render_comparison_lines(report.comparison), ""]
    if report.verdict:
        lines += ["<details><summary>Void if</summary>", ""]
        lines += [f"- {_escape(one)}" for one in report.verdict.expires_if]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _format_heading(report: Report) -> str:
    if report.verdict is None:
        return _escape(report.title)
    verdict = report.verdict.verdict
    return f"{MARKS[verdict]} {verdict}: {_escape(report.title)}"


def _render_criteria(record: VerdictRecord) -> list[str]:
    lines = [
        f"> **WAIVED** `{one.name}` is {one.verdict} and does not count: {_escape(str(one.waived))}"
        for one in record.waived
    ]
    lines += [""] if lines else []
    rows = [
        (
            f"`{one.name}`",
            f"{MARKS[one.verdict]} {one.verdict}" + (" (waived)" if one.waived else ""),
            format_observed(one),
            one.limit,
            one.reason + (f" → {one.remedy}" if one.remedy else ""),
        )
        for one in record.criteria
    ]
    notes = [f"\n> Note: {_escape(one.message)} → {_escape(one.remedy)}" for one in record.notes]
    return [*lines, *render_table_lines(("criterion", "verdict", "observed", "limit", "why"), rows), *notes, ""]


def render_comparison_lines(comparison: Comparison) -> list[str]:
    """The table of builds, best goals above it, warnings below."""
    header = ("build", "batch", "load", "p50 ms", "p99 ms", "images/s", "speed-up", "memory", "standing")
    lines = list(render_table_lines(header, [_format_cells(row) for row in comparison.rows], right=range(3, 8)))
    if comparison.baseline:
        lines += ["", f"Baseline: {_escape(str(comparison.baseline['name']))}."]
    lines += [f"\n> {_escape(warning)}" for warning in comparison.warnings]
    lines += [f"- no counterpart: {_escape(one['label'])}: {_escape(one['reason'])}" for one in comparison.unmatched]
    return lines


def _format_cells(row: ComparisonRow) -> tuple[str, ...]:
    standing = "**frontier**" if row.on_frontier else "dominated" if row.valid else "INVALID"
    return (
        row.configuration,
        str(row.batch_size),
        f"{row.load}, {row.mode}",
        format_figure(row.latency_ms.get("p50"), "{:.3g}"),
        format_figure(row.latency_ms.get("p99"), "{:.3g}"),
        format_figure(row.throughput_images_per_s, "{:,.0f}"),
        format_figure(row.speedup, "{:.2f}×", interval=True),
        format_bytes(row.memory_bytes) if row.memory_bytes else "–",
        standing,
    )


def format_figure(figure: ComparedValue | None, form: str, *, interval: bool = False) -> str:
    """A figure by its format, with its interval if asked for; a dash for none."""
    if figure is None:
        return "–"
    text = form.format(figure.value)
    if not interval or figure.low is None or figure.high is None:
        return text
    return f"{text} [{form.format(figure.low)}, {form.format(figure.high)}]"


def render_table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    """A table's lines; the columns `right` are aligned to the right."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if at in right else "---" for at in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(_escape(cell) for cell in row) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
