"""The documents of a preprocessing proof and of end-to-end measurements."""

from collections.abc import Iterator, Sequence

from optpipe.core.metrics.measured import P50, P99
from optpipe.core.quantity import format_duration
from optpipe.preprocess.end_to_end import EndToEndFigures, EndToEndRecord, EndToEndResult
from optpipe.preprocess.proof import AgainstRecord, PreprocessRecord, Proof, StepDifference
from optpipe.preprocess.throughput import ThroughputRecord, ThroughputTuning
from optpipe.report.document import (
    TONES,
    Cell,
    Column,
    Document,
    Sentence,
    Table,
    Tone,
    figure_columns,
    format_drop,
    format_rate_interval,
    make_document,
    make_table,
)


def document_from_preprocess(record: PreprocessRecord) -> Document:
    parity, proof = record.parity, record.parity.proof
    worst = [
        f"{worst.file} {worst.image} (mean {worst.mean_levels:.2f}, max {worst.max_levels:.0f})"
        for worst in parity.worst
    ]
    return make_document(
        [
            Sentence(
                f"{record.model}: {proof.reason}",
                TONES[proof.verdict],
                proof.verdict,
                remedy=proof.remedy or "",
            ),
            _tabulate_steps(parity.steps, f"in 8-bit levels (0 to 255), {parity.images} images"),
            Sentence(_describe_outputs(proof)),
            *(
                Sentence(f"{refused.image}: {refused.reason}", Tone.BAD, "refused by DALI")
                for refused in parity.refused[:5]
            ),
            Sentence(f"worst images, side by side with the difference: {', '.join(worst)}"),
            _tabulate_throughput(record.throughput, record.images.count)
            if record.throughput
            else None,
            Sentence(
                f"{record.pipeline.path}  sha256 {record.pipeline.sha256[:12]}",
                Tone.FAINT,
                "pipeline",
            ),
            Sentence(str(record.run_dir), Tone.FAINT, "evidence"),
        ]
    )


def document_from_against(record: AgainstRecord) -> Document:
    about = f"from {record.transform}, given {record.given}, in 8-bit levels (0 to 255), {record.images.count} images"
    shown = f"{record.worst.image}: image, card, yours, and difference × {record.worst.difference_times:.0f}"
    return make_document(
        [
            Sentence(record.reason, TONES[record.verdict], record.verdict),
            _tabulate_steps(record.differences, about, "result of"),
            Sentence(f"{shown} in {record.worst.file}"),
        ]
    )


def _tabulate_steps(steps: Sequence[StepDifference], about: str, head: str = "after") -> Table:
    rows = [
        (
            difference.step,
            f"{difference.mean_levels:.4f}",
            f"{difference.max_levels:.2f}",
            f"{difference.off_share:.2%}",
        )
        for difference in steps
    ]
    names = ("mean |Δ|", "max |Δ|", "levels differing")
    return make_table([head, *figure_columns(*names)], rows, caption=about)


def _describe_outputs(proof: Proof) -> str:
    if not proof.output.finite:
        return "outputs contain NaN or Inf"
    snr = proof.output.snr_db
    parts = ["outputs bit-identical" if snr is None else f"outputs: SNR {snr:.1f} dB"]
    if proof.top1_agreement:
        parts.append(f"top-1 agreement {proof.top1_agreement.equal}/{proof.top1_agreement.images}")
    if proof.accuracy:
        parts.append(
            f"accuracy {proof.accuracy.reference:.2%} with the reference, {proof.accuracy.dali:.2%} with DALI"
        )
    if score := proof.task_score:
        drop = format_drop(score.drop, score.drop_ci)
        both = f"{score.reference:.2%} with the reference, {score.dali:.2%} with DALI"
        parts.append(f"{score.name} {both}, drop {drop}")
    if same := proof.prediction_agreement:
        low, high = (100 * limit for limit in same.ci)
        parts.append(f"agreement of predictions {100 * same.share:.4g}% [{low:.4g}, {high:.4g}]")
    return ", ".join(parts)


def _tabulate_throughput(tuning: ThroughputTuning, images: int) -> Table:
    tried = [_list_throughput_cells(record, Tone.FAINT) for record in tuning.tried]
    final = [
        _list_throughput_cells(record, Tone.STRONG) for record in (tuning.dataloader, tuning.dali)
    ]
    interval = (
        f" [{tuning.speedup_ci[0]:.2f}, {tuning.speedup_ci[1]:.2f}]" if tuning.speedup_ci else ""
    )
    caption = f"DALI {tuning.speedup:.2f}× the best DataLoader{interval}; {images} images, page cache warm"
    columns: list[Column | str] = ["implementation", "device", "threads"]
    columns += [*figure_columns("images/s", "95% over batches"), "error"]
    return make_table(columns, [*tried, *final], caption=caption)


def _list_throughput_cells(record: ThroughputRecord, tone: Tone) -> list[Cell]:
    name, device, threads = record.implementation, "", ""
    if record.plan is not None:
        device, threads = record.plan.decode, str(record.plan.threads)
        name += f" hw {record.plan.hw_decoder_load:g}" if record.plan.decode == "mixed" else ""
    elif record.loader is not None:
        device, threads = record.loader.device, f"{record.loader.workers} workers"
    figures = ["failed", "", str(record.error)]
    if record.images_per_s is not None:
        figures = [f"{record.images_per_s:,.0f}", format_rate_interval(record.ci), ""]
    return [Cell(text, tone) for text in (name, device, threads, *figures)]


ONE_PROCESS = (
    "each artifact ran in one process: the interval is that of its batches, and other processes may be faster or slower;"
    " figures without an interval are single values, and each part alone is the better of two"
)


def document_from_end_to_end(record: EndToEndRecord) -> Document:
    names = (
        "batch",
        "images/s",
        "95% over batches",
        P50.name,
        P99.name,
        "preprocess alone",
        "inference alone",
        "vs. slower part",
    )
    rows: list[list[str]] = []
    lines: list[Sentence] = []
    for result in record.results:
        if result.figures is None:
            lines.append(Sentence(f"{result.label}: {result.error}", Tone.BAD, "failed"))
        else:
            rows.append(_list_end_to_end_cells(result, result.figures))
            lines += _describe_end_to_end(result, result.figures)
    return make_document(
        [
            Sentence(f"{record.images} images from {record.folder}, page cache warm"),
            make_table(["artifact", *figure_columns(*names), Column("bottleneck", rank=0)], rows)
            if rows
            else None,
            Sentence(ONE_PROCESS, Tone.FAINT) if rows else None,
            *lines,
            Sentence(str(record.run_dir), Tone.FAINT, "evidence"),
        ]
    )


def _list_end_to_end_cells(result: EndToEndResult, figures: EndToEndFigures) -> list[str]:
    parts = figures.parts_images_per_s
    return [
        result.label,
        str(result.plan.batch_size),
        f"{figures.images_per_s:,.0f}",
        format_rate_interval(figures.ci),
        *(
            "too few" if ns is None else format_duration(ns)
            for ns in (figures.latency_p50_ns, figures.latency_p99_ns)
        ),
        f"{parts.preprocess:,.0f}",
        f"{parts.inference:,.0f}",
        f"{figures.of_slower_part:.2f}",
        figures.bottleneck,
    ]


def _describe_end_to_end(result: EndToEndResult, figures: EndToEndFigures) -> Iterator[Sentence]:
    yield Sentence(f"{result.label}  {figures.bottleneck}: {figures.reason}")
    yield Sentence(f"  handover {figures.handover}", Tone.FAINT)
    checked = (
        f"  outputs of the timed run: {figures.equal} of {figures.checked} match the reference"
    )
    if figures.classes < 2:
        checked += ", all of one class, so this proves nothing"
    yield Sentence(checked, Tone.FAINT if result.verdict == "PASS" else TONES[result.verdict])
    if figures.environment:
        settings = " ".join(f"{name}={value}" for name, value in figures.environment.items())
        yield Sentence(f"  also set in your own process: {settings}", Tone.FAINT)
