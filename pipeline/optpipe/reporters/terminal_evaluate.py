"""An evaluation on the terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.reporters.records import VERDICT_STYLES, format_drop, format_random_weights

if TYPE_CHECKING:
    from optpipe.evaluate.result import EvaluatedModel, Evaluation


def render_evaluation(found: "Evaluation") -> RenderableType:
    """The source model first, then what became of its predictions in every artifact."""
    dataset, texts = found.dataset, found.dataset.kind == "texts"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("artifact", "backend", "precision"):
        table.add_column(name, overflow="fold")
    second = "macro F1, drop (95 %)" if texts else "top-5"
    for name in ("top-1", second, "drop (95 %)", "lost / won", "agreement", "SNR", "verdict"):
        table.add_column(name, justify="right")
    for row in found.results:
        if not row.why_not:
            table.add_row(*_format_row(row, texts=texts))
    head = f"{found.model} on {dataset.count} {dataset.kind} of {dataset.name} ({dataset.sha256[:12]})"
    lines: list[RenderableType] = [Text(head), table]
    lines += [
        Text(
            f"{'failed' if row.failed else 'not evaluated'}  {row.backend} {row.precision}: {row.why_not}",
            style="red" if row.failed else "dim",
        )
        for row in found.results
        if row.why_not
    ]
    if not dataset.labeled:
        lines.append(Text("no labels: agreement with the source model only, no accuracy", style="yellow"))
    if not found.weights.trained:
        lines.append(Text(format_random_weights(found.weights.drawn), style="yellow"))
    lines.append(Text(f"predictions and manifest in {found.run_dir}", style="dim"))
    return Group(*lines)


def _format_row(row: "EvaluatedModel", *, texts: bool) -> list[str | Text]:
    accuracy, agreement = row.accuracy, row.agreement
    top1 = second = drop = pairs = ""
    if accuracy:
        top1 = f"{accuracy.top1:.2%}"
        second = f"{accuracy.macro_f1:.2%}" if texts else "" if accuracy.top5 is None else f"{accuracy.top5:.2%}"
    if row.artifact is None:
        return ["", "source model", "", top1, second, "", "", "", "", ""]
    if accuracy:
        second += f"  {format_drop(accuracy.macro_f1_drop, accuracy.macro_f1_drop_ci)}" if texts else ""
        drop, pairs = format_drop(accuracy.drop, accuracy.drop_ci), f"{accuracy.lost} / {accuracy.won}"
    return [
        row.artifact,
        f"{row.backend} ({row.device})",
        row.precision,
        top1,
        second,
        drop,
        pairs,
        f"{agreement.share:.2%}" if agreement else "",
        "equal" if row.snr_db is None else f"{row.snr_db:.0f} dB",
        Text(row.verdict or "", style=VERDICT_STYLES.get(row.verdict or "", "")),
    ]
