"""An evaluation on the terminal."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.card import Task
from optpipe.core.units import format_snr
from optpipe.report.records import VERDICT_STYLES, format_drop, format_random_weights
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.evaluate.result import EvaluatedModel, Evaluation

MENTIONED_DROP, MENTIONED_CLASSES = 0.001, 5


def render_evaluation(found: "Evaluation") -> RenderableType:
    """The source model first, then what became of its predictions in every artifact."""
    dataset = found.dataset
    head = f"{found.model} on {dataset.identify()}"
    lines: list[RenderableType] = [Text(head), *([Text(found.scoring, style="dim")] if found.scoring else [])]
    classifies = found.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION)
    lines += [_make_table(found) if classifies else _make_score_table(found)]
    lines += _list_class_drops(found)
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


def _make_table(found: "Evaluation") -> Table:
    """Of a classifier."""
    texts = found.dataset.kind == "texts"
    second = "macro F1, drop (95 %)" if texts else "top-5"
    figures = ("top-1", second, "drop (95 %)", "lost / won", "agreement", "SNR", "verdict")
    table = make_table("artifact", "backend", "precision", right=figures)
    for row in found.results:
        if not row.why_not:
            table.add_row(*_format_row(row, texts=texts))
    return table


def _make_score_table(found: "Evaluation") -> Table:
    """Of a task with scores of its own."""
    scored = next((row.scores for row in found.results if row.scores is not None), None)
    names = [each.name for each in scored.scores] if scored else []
    figures = (*names, f"{names[0]} drop (95 %)" if names else "drop", "agreement", "SNR", "verdict")
    table = make_table("artifact", "backend", "precision", right=figures)
    for row in found.results:
        if row.why_not:
            continue
        values = [f"{each.value:.2%}" for each in row.scores.scores] if row.scores else [""] * len(names)
        if row.artifact is None:
            table.add_row("", "source model", "", *values, "", "", "", "")
            continue
        first = row.scores.scores[0] if row.scores else None
        table.add_row(
            row.artifact,
            f"{row.backend} ({row.device})",
            row.precision,
            *values,
            format_drop(first.drop, first.drop_ci) if first else "",
            *_format_end(row),
        )
    return table


def _list_class_drops(found: "Evaluation") -> list[RenderableType]:
    """The classes that explain an artifact's drop, where it is more than a tenth of a point."""
    lines: list[RenderableType] = []
    for row in found.results:
        if row.artifact is None or row.scores is None or row.scores.scores[0].drop < MENTIONED_DROP:
            continue
        if not row.scores.classes:
            continue
        worst = sorted(row.scores.classes, key=lambda each: -each.drop)[:MENTIONED_CLASSES]
        said = ", ".join(f"{each.label} {100 * each.drop:+.2f}" for each in worst)
        lines.append(
            Text(f"{row.artifact}: drop by class, in points of {row.scores.scores[0].name}: {said}", style="dim")
        )
    return lines


def _format_end(row: "EvaluatedModel") -> list[str | Text]:
    """Agreement, SNR and verdict."""
    agreement = f"{row.agreement.share:.2%}" if row.agreement else ""
    snr = format_snr(row.snr_db) if row.snr_db is not None else "equal" if row.same_sizes else "–"
    return [agreement, snr, Text(row.verdict or "", style=VERDICT_STYLES.get(row.verdict or "", ""))]


def _format_row(row: "EvaluatedModel", *, texts: bool) -> list[str | Text]:
    accuracy = row.accuracy
    top1 = second = drop = pairs = ""
    if accuracy:
        top1 = f"{accuracy.top1:.2%}"
        second = f"{accuracy.macro_f1:.2%}" if texts else "" if accuracy.top5 is None else f"{accuracy.top5:.2%}"
    if row.artifact is None:
        return ["", "source model", "", top1, second, "", "", "", "", ""]
    if accuracy:
        second += f"  {format_drop(accuracy.macro_f1_drop, accuracy.macro_f1_drop_ci)}" if texts else ""
        drop, pairs = format_drop(accuracy.drop, accuracy.drop_ci), f"{accuracy.lost} / {accuracy.won}"
    return [row.artifact, f"{row.backend} ({row.device})", row.precision, top1, second, drop, pairs, *_format_end(row)]
