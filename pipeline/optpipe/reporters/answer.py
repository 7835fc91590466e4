"""The answer in one or two sentences, the same in every form of the report."""

from collections.abc import Mapping
from typing import Any

from optpipe.reporters.report import Report


def format_summary(report: Report) -> str:
    """What to ship and whether it may ship, or what the comparison shows."""
    return format_comparison_summary(report) if report.verdict is None else format_verdict_summary(report.verdict)


def format_verdict_summary(verdict: Mapping[str, Any]) -> str:
    """One or two sentences about a verdict's document."""
    artifact = verdict["artifact"]
    build = f"{verdict['model']}, {artifact['backend']} {artifact['precision']}"
    counted = [one for one in verdict["criteria"] if not one["waived"]]
    worst = [one for one in counted if one["verdict"] == verdict["verdict"]]
    waived = len(verdict["waived"])
    tail = f" {waived} criteri{'on was' if waived == 1 else 'a were'} waived." if waived else ""
    if verdict["verdict"] == "PASS":
        return f"Ship {build}: all {len(counted)} criteria are met with evidence.{tail}"
    if verdict["verdict"] == "FAIL":
        return f"Do not ship {build}: {_format_first(worst)}.{tail}"
    if not worst:
        return f"{build} cannot be judged: no criteria remain.{tail}"
    return f"{build} is inconclusive: {_format_first(worst)}.{tail}"


def _format_first(worst: list[Mapping[str, Any]]) -> str:
    first = worst[0]
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    return f"{first['name']}: {first['reason']}{more}"


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
