"""The answer in one or two sentences, the same in every form of the report."""

from optpipe.core.verdict import CriterionResult, Verdict, VerdictRecord
from optpipe.reporters.report import Report


def format_summary(report: Report) -> str:
    """What to ship and whether it may ship, or what the comparison shows."""
    return format_comparison_summary(report) if report.verdict is None else format_verdict_summary(report.verdict)


def format_verdict_summary(record: VerdictRecord) -> str:
    """One or two sentences about a verdict."""
    build = f"{record.model}, {record.artifact.backend} {record.artifact.precision}"
    worst = [one for one in record.counted if one.verdict is record.verdict]
    waived = len(record.waived)
    tail = f" {waived} criteri{'on was' if waived == 1 else 'a were'} waived." if waived else ""
    if record.verdict is Verdict.PASS:
        return f"Ship {build}: all {len(record.counted)} criteria are met with evidence.{tail}"
    if record.verdict is Verdict.FAIL:
        return f"Do not ship {build}: {_format_first(worst)}.{tail}"
    if not worst:
        return f"{build} cannot be judged: no criteria remain.{tail}"
    return f"{build} is inconclusive: {_format_first(worst)}.{tail}"


def _format_first(worst: list[CriterionResult]) -> str:
    first = worst[0]
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    return f"{first.name}: {first.reason}{more}"


def format_comparison_summary(report: Report) -> str:
    """One or two sentences about a comparison."""
    comparison = report.comparison
    found = [
        f"{comparison.row(row).label} for {goal} ({comparison.best_reason[goal]})"
        for goal, row in comparison.best.items()
        if row is not None
    ]
    if not found:
        reasons = ", ".join(dict.fromkeys(comparison.best_reason.values()))
        return f"No build can be recommended: {reasons}."
    limit = f" under {comparison.slo}" if comparison.slo else ""
    return f"Best{limit}: {'; '.join(found)}."
