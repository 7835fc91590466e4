"""A preprocessing proof on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_duration
from optpipe.report.records import VERDICT_STYLES, format_drop, format_rate_interval
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.preprocess.parity.records import EdgeCaseFile, ParityRecord, Proof
    from optpipe.preprocess.records import PreprocessRecord
    from optpipe.preprocess.throughput import ThroughputRecord, ThroughputTuning


def render_preprocess(record: "PreprocessRecord") -> RenderableType:
    """The verdict first, then step by step, the edge cases, and the speed."""
    parity, proof, images = record.parity, record.parity.proof, record.images
    lines: list[RenderableType] = [
        Text(f"{proof.verdict}  {record.model}: {proof.reason}", style=VERDICT_STYLES[proof.verdict])
    ]
    if proof.remedy:
        lines.append(Text(f"→ {proof.remedy}"))
    lines.append(_render_steps(parity))
    lines.append(Text(_format_outputs(proof)))
    lines += [Text(f"refused by DALI  {each.image}: {each.reason}", style="red") for each in parity.refused[:5]]
    worst = (
        f"{each.file} {each.image} (mean {each.mean_levels:.2f}, max {each.max_levels:.0f})" for each in parity.worst
    )
    lines.append(Text(f"worst images, side by side with the difference: {', '.join(worst)}"))
    lines.append(Text(_format_edge_cases(parity.edge_cases)))
    if record.throughput:
        lines.append(_render_throughput(record.throughput, images.count))
    lines.append(Text(f"pipeline  {record.pipeline.path}  sha256 {record.pipeline.sha256[:12]}"))
    lines.append(Text(f"evidence  {record.run_dir}"))
    return Group(*lines)


def _render_steps(parity: "ParityRecord") -> Table:
    table = make_table("step", right=("mean |Δ|", "max |Δ|", "levels differing", "alone: mean", "max"))
    for each in parity.steps:
        marked = each.step == parity.largest_step and each.alone.mean_levels > 0
        table.add_row(
            Text(each.step + (" ← largest" if marked else "")),
            f"{each.cumulative.mean_levels:.4f}",
            f"{each.cumulative.max_levels:.2f}",
            f"{each.cumulative.off_share:.2%}",
            f"{each.alone.mean_levels:.4f}",
            f"{each.alone.max_levels:.2f}",
        )
    table.caption = f"in 8-bit levels (0 to 255), {parity.images} images"
    table.caption_justify = "left"
    return table


def _format_outputs(proof: "Proof") -> str:
    if not proof.output.finite:
        return "outputs contain NaN or Inf"
    snr = proof.output.snr_db
    parts = ["outputs bit-identical" if snr is None else f"outputs: SNR {snr:.1f} dB"]
    if proof.top1_agreement:
        parts.append(f"top-1 agreement {proof.top1_agreement.equal}/{proof.top1_agreement.images}")
    if proof.accuracy:
        parts.append(f"accuracy {proof.accuracy.reference:.2%} with the reference, {proof.accuracy.dali:.2%} with DALI")
    if score := proof.task_score:
        drop = format_drop(score.drop, score.drop_ci)
        both = f"{score.reference:.2%} with the reference, {score.dali:.2%} with DALI"
        parts.append(f"{score.name} {both}, drop {drop}")
    if same := proof.prediction_agreement:
        parts.append(f"agreement of predictions {same.share:.2%} ({same.ci[0]:.2%} to {same.ci[1]:.2%})")
    return ", ".join(parts)


def _format_edge_cases(files: "Sequence[EdgeCaseFile]") -> str:
    """Those that differ, by name; the verdict is about the images."""
    rest = [each for each in files if not each.matches]
    text = f"edge-case files: {len(files) - len(rest)} of {len(files)} decode identically; not part of the verdict"
    for outcome in dict.fromkeys(each.outcome for each in rest):
        names = (
            each.name + ("" if each.max_levels is None else f" (max {each.max_levels:.1f})")
            for each in rest
            if each.outcome == outcome
        )
        text += f"\n  {outcome}: {', '.join(names)}"
    return text


def _render_throughput(tuning: "ThroughputTuning", images: int) -> Table:
    table = make_table("", "device", "threads", right=("images/s", "95 % interval", "reader_cost", "batch_cost"))
    for each in tuning.tried:
        table.add_row(*_format_throughput_row(each), style="dim")
    for each in (tuning.dataloader, tuning.dali, tuning.decode_only):
        table.add_row(*_format_throughput_row(each), style="bold")
    text = f"DALI {tuning.speedup:.2f}× the best DataLoader"
    text += f" ({tuning.speedup_ci[0]:.2f} to {tuning.speedup_ci[1]:.2f})" if tuning.speedup_ci else ""
    text += f", {tuning.share_of_decode_only:.2f} of decoding alone"
    text += f"; {tuning.left_out}" if tuning.left_out else ""
    table.caption = f"{text}; {images} images, page cache warm"
    table.caption_justify = "left"
    return table


def _format_throughput_row(each: "ThroughputRecord") -> list[str]:
    name, device, threads = str(each.implementation), "", ""
    if each.plan is not None:
        device, threads = each.plan.decode, str(each.plan.threads)
        if each.plan.decode == "mixed":
            name += f" hw {each.plan.hw_decoder_load:g}"
            name += f" cpu {each.plan.cpu_share:g}" if each.plan.cpu_share else ""
    elif each.loader is not None:
        device, threads = each.loader.device, f"{each.loader.workers} workers"
    if each.images_per_s is None:
        return [name, device, threads, "failed", str(each.error), "", ""]
    costs = ("" if cost is None else format_duration(cost) for cost in (each.reader_cost_ns, each.batch_cost_ns))
    return [name, device, threads, f"{each.images_per_s:,.0f}", format_rate_interval(each.ci), *costs]
