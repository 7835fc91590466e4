"""A report as Markdown, for a pull request or a CI step summary: the answer first, then tables."""

from collections.abc import Iterator, Sequence

from optpipe.core.comparison import Comparison, ComparisonRow
from optpipe.core.estimate import Estimate
from optpipe.core.measurement import name_sample
from optpipe.core.units import format_bytes
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.report.answer import format_summary
from optpipe.report.records import explain_beside_figures, format_observed, scale_to_ms
from optpipe.report.report import Report

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
            format_observed(one) + (f" ({one.about})" if one.about else ""),
            one.limit,
            " → ".join(part for part in (explain_beside_figures(one), one.remedy) if part),
        )
        for one in record.criteria
    ]
    notes = [f"\n> Note: {_escape(one.message)} → {_escape(one.remedy)}" for one in record.notes]
    return [*lines, *render_table_lines(("criterion", "verdict", "observed", "limit", "why"), rows), *notes, ""]


def render_comparison_lines(comparison: Comparison) -> list[str]:
    """The table of builds, best goals above it, warnings below."""
    rate = f"{name_sample(row.load.sample for row in comparison.rows)}s/s"
    header = ("build", "batch", "load", "p50 ms", "p99 ms", rate, "speed-up", "memory", "standing")
    lines = list(render_table_lines(header, [_format_cells(row) for row in comparison.rows], right=range(3, 8)))
    if comparison.baseline:
        lines += ["", f"Baseline: {_escape(comparison.baseline.name)}."]
    lines += [f"\n> {_escape(warning)}" for warning in comparison.warnings]
    lines += [f"- {_escape(line)}" for line in list_unmatched(comparison)]
    return lines


def list_unmatched(comparison: Comparison) -> list[str]:
    """One line for each reason why rows have no counterpart, with how many it is about."""
    found: dict[str, list[str]] = {}
    for one in comparison.unmatched:
        found.setdefault(one.reason, []).append(one.label)
    return [
        f"no counterpart: {labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''}: {reason}"
        for reason, labels in found.items()
    ]


def _format_cells(row: ComparisonRow) -> tuple[str, ...]:
    standing = "**frontier**" if row.on_frontier else "dominated" if row.valid else "INVALID"
    return (
        row.configuration,
        str(row.load.batch_size),
        ", ".join([*row.load.list_lengths(), row.scenario, row.load.mode]),
        format_ms(row.latency_ns.get("p50")),
        format_ms(row.latency_ns.get("p99")),
        format_figure(row.throughput_images_per_s, "{:,.0f}"),
        format_figure(row.speedup, "{:.2f}×", interval=True),
        format_bytes(row.memory_bytes) if row.memory_bytes else "–",
        standing,
    )


def format_figure(figure: Estimate | None, form: str, *, interval: bool = False) -> str:
    """A figure by its format, with its interval if asked for; a dash for none."""
    if figure is None:
        return "–"
    text = form.format(figure.value)
    if not interval or figure.low is None or figure.high is None:
        return text
    return f"{text} [{form.format(figure.low)}, {form.format(figure.high)}]"


def format_ms(figure: Estimate | None) -> str:
    """A duration in ms with three digits; a dash for none."""
    return format_figure(scale_to_ms(figure), "{:.3g}")


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
