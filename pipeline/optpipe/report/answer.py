"""The answer in one or two sentences, the same in every form of the report."""

from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.report.report import Report


def format_summary(report: Report) -> str:
    """What to ship and whether it may ship, or what the comparison shows."""
    return format_comparison_summary(report) if report.verdict is None else format_verdict_summary(report.verdict)


def format_verdict_summary(record: VerdictRecord) -> str:
    """Sentences for who decides on a release: whether to ship, how many criteria stand against it, and the first of them."""
    build = f"{record.model} ({record.artifact.backend} {record.artifact.precision})"
    counted, waived = record.counted, len(record.waived)
    worst = [one for one in counted if one.verdict is record.verdict]
    tail = f" {waived} criteri{'on was' if waived == 1 else 'a were'} waived." if waived else ""
    share = f"{len(worst)} of {len(counted)} criteria"
    if not counted:
        return f"Do not ship {build} yet: no criteria remain to be judged.{tail}"
    if record.verdict is Verdict.PASS:
        return f"Ship {build}: all {len(counted)} criteria are met with evidence.{tail}"
    first = f"{_name_criterion(worst[0].name)}: {worst[0].reason}."
    if record.verdict is Verdict.FAIL:
        return f"Do not ship {build}: {share} {'is' if len(worst) == 1 else 'are'} not met. {first}{tail}"
    return f"Do not ship {build} yet: the evidence does not decide {share}. {first}{tail}"


_NAMES = {
    "trust.weights": "Weights",
    "trust.precision": "Precision",
    "trust.outputs": "Outputs",
    "trust.environment": "Measurement environment",
    "throughput.minimum": "Throughput",
    "regression.throughput": "Throughput regression",
    "memory.maximum": "Memory",
    "energy.maximum": "Energy",
    "stability.maximum_cv": "Stability",
    "accuracy.maximum_drop": "Accuracy drop",
    "accuracy.minimum_score": "Score",
    "accuracy.minimum_top1": "Top-1 accuracy",
    "accuracy.minimum_agreement": "Agreement with the source model",
    "preprocessing.minimum_agreement": "Preprocessing agreement",
    "preprocessing.minimum_snr": "Preprocessing SNR",
    "size.maximum": "Engine size",
    "tensor_cores.minimum_share": "Tensor Core use",
}


def _name_criterion(name: str) -> str:
    """`latency.p99.b8` as a sentence names it: `p99 latency`."""
    section, metric, *_ = name.split(".")
    known = {"latency": f"{metric} latency", "regression": f"{metric} regression", "precision": f"Share of {metric}"}
    return _NAMES.get(f"{section}.{metric}") or known.get(section) or f"{section} {metric}".capitalize()


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
