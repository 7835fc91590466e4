"""A build on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from optpipe.core.entries import LintSummary, SkippedLayer, VerificationInfo
from optpipe.core.errors import escape
from optpipe.core.precision import Placement, PrecisionProof
from optpipe.core.units import format_bytes, format_duration, format_snr
from optpipe.report.records import format_mixed, format_random_weights
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.build.records import BuildResult


def render_build(result: "BuildResult") -> RenderableType:
    """What was built, what is proven of it, whether it computes what the model does; then what was not built, and why."""
    table = make_table("artifact", "backend", "precision", "MACs", "verified", "runs here", right=("size", "build"))
    for each in result.artifacts:
        table.add_row(
            each.id,
            f"{each.backend} ({each.device})",
            each.precision,
            _format_proof(each.precision_proof),
            _format_parity(each.parity),
            Text("no", style="dim") if each.why_not else "yes",
            format_bytes(each.size_bytes),
            format_duration(each.build_seconds * 1e9),
        )
    weights = result.weights
    lines: list[RenderableType] = [
        Text(f"{result.model} from {result.source}, weights {weights.source} {weights.sha256[:12]}")
    ]
    if result.artifacts:
        lines.append(table)
    why_not = {f"{each.backend}: {each.why_not}" for each in result.artifacts if each.why_not}
    lines += [Text(f"built, cannot run here  {text}", style="dim") for text in sorted(why_not)]
    lines += [
        Text(f"not proven  {each.id}: {_format_others(each.precision_proof, each.kept)}", style="red")
        for each in result.artifacts
        if not each.precision_proof.proven
    ]
    lines += [
        Text(f"elsewhere  {each.id}: {format_placement(each.precision_proof.placement)}", style="yellow")
        for each in result.artifacts
        if each.precision_proof.placement and each.precision_proof.placement.count
    ]
    lines += [
        Text(f"lint  {each.id}: {_format_lint(each.lint)}; optpipe store show {each.id} lists them", style="yellow")
        for each in result.artifacts
        if each.lint.findings
    ]
    lines += [
        Text(f"mixed  {each.id}: {format_mixed(each.mixed)}; optpipe store show {each.id} lists the layers")
        for each in result.artifacts
        if each.mixed is not None
    ]
    lines += [
        Text(f"failed  {each.backend} {each.precision} (exit status {each.status:d}): {each.reason}", style="red")
        for each in result.failed
    ]
    reasons: dict[str, list[str]] = {}
    for omission in result.skipped:
        reasons.setdefault(f"{omission.backend}: {omission.reason}", []).append(omission.precision)
    lines += [Text(f"skipped {', '.join(precisions)} for {text}", style="dim") for text, precisions in reasons.items()]
    if not weights.trained:
        lines.append(Text(format_random_weights(weights.drawn), style="yellow"))
    return Group(*lines)


def _format_proof(proof: PrecisionProof) -> Text:
    shares = sorted(proof.share.counted.items(), key=lambda item: -item[1])
    return Text(", ".join(f"{share:.1%} {kind}" for kind, share in shares), style="" if proof.proven else "red")


def _format_others(proof: PrecisionProof, kept: tuple[SkippedLayer, ...]) -> str:
    reasons = {each.layer: f", {each.reason}" for each in kept}
    names = "; ".join(f"{each.name} ({each.type}{reasons.get(each.name, '')})" for each in proof.others)
    more = proof.others_count - len(proof.others)
    return f"{proof.reason}; others: {names}" + (f" and {more} more" if more > 0 else "")


def format_placement(placement: Placement) -> str:
    """`1 of 61 nodes, 0.0% of MACs, does not run on CUDAExecutionProvider: top (TopK, CPUExecutionProvider, 0.0%)`."""
    named = [f"{escape(each.name)} ({each.op}, {each.provider}, {each.share:.1%})" for each in placement.elsewhere]
    more = placement.count - len(named)
    return (
        f"{placement.count} of {placement.nodes} nodes, {placement.share:.1%} of {placement.unit}, "
        f"{'does' if placement.count == 1 else 'do'} not run on {placement.provider}: "
        + ", ".join(named)
        + (f" and {more} more" if more > 0 else "")
    )


def _format_lint(lint: LintSummary) -> str:
    counted = ", ".join(f"{count} × {rule}" for rule, count in lint.counts.items())
    return f"{counted}, such as {lint.findings[0].layer}: {lint.findings[0].message}"


def _format_parity(parity: "VerificationInfo | None") -> Text:
    if parity is None:
        return Text("not run", style="dim")
    if parity.passed is None:
        return Text("nothing to compare", style="yellow")
    text = "exact" if parity.snr_db is None else f"SNR {format_snr(parity.snr_db)}"
    if parity.top1_accuracy is not None:
        text += (
            f", top-1 {parity.top1_accuracy:.2%} (source {parity.source_top1_accuracy:.2%}, {parity.samples} images)"
        )
    elif parity.top1_agreement is not None:
        text += f", top-1 agreement {parity.top1_agreement:.1%}"
    return Text(text if parity.passed else f"FAIL: {text}", style="green" if parity.passed else "red")
