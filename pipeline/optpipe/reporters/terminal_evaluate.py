"""An evaluation on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.reporters.records import VERDICT_STYLES, format_drop, format_random_weights


def render_evaluation(record: Mapping[str, Any]) -> RenderableType:
    """The source model first, then what became of its answers in every artifact."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("artifact", "backend", "precision"):
        table.add_column(name, overflow="fold")
    texts = record["dataset"]["kind"] == "texts"
    second = "macro F1, drop (95 %)" if texts else "top-5"
    for name in ("top-1", second, "drop (95 %)", "lost / won", "agreement", "SNR", "verdict"):
        table.add_column(name, justify="right")
    for row in record["results"]:
        if row["why_not"]:
            continue
        table.add_row(
            row["artifact"] or "",
            f"{row['backend']} ({row['device']})" if row["artifact"] else "source model",
            row["precision"] if row["artifact"] else "",
            _format_percent(row["top1"]),
            _format_macro_f1(row) if texts else _format_percent(row["top5"]),
            _format_drop(row, "drop_vs_source", "drop_ci"),
            f"{row['lost']} / {row['won']}" if row["artifact"] and row["lost"] is not None else "",
            _format_percent(row["agreement"]) if row["artifact"] else "",
            "equal"
            if row["artifact"] and row["snr_db"] is None
            else f"{row['snr_db']:.0f} dB"
            if row["artifact"]
            else "",
            Text(row["verdict"] or "", style=VERDICT_STYLES.get(row["verdict"], "")),
        )
    dataset = record["dataset"]
    head = f"{record['model']} on {dataset['count']} {dataset['kind']} of {dataset['name']} ({dataset['sha256'][:12]})"
    lines: list[RenderableType] = [Text(head), table]
    lines += [
        Text(
            f"{'failed' if row['failed'] else 'not evaluated'}  {row['backend']} {row['precision']}: {row['why_not']}",
            style="red" if row["failed"] else "dim",
        )
        for row in record["results"]
        if row["why_not"]
    ]
    if not dataset["labelled"]:
        lines.append(Text("no labels: agreement with the source model only, no accuracy", style="yellow"))
    if not record["weights"]["trained"]:
        lines.append(Text(format_random_weights(record["weights"]), style="yellow"))
    lines.append(Text(f"predictions and manifest in {record['run_dir']}", style="dim"))
    return Group(*lines)


def _format_percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _format_drop(row: Mapping[str, Any], name: str, interval: str) -> str:
    if row[interval] is None or row["artifact"] is None:
        return ""
    return format_drop(row[name], row[interval])


def _format_macro_f1(row: Mapping[str, Any]) -> str:
    return f"{_format_percent(row['macro_f1'])}  {_format_drop(row, 'macro_f1_drop', 'macro_f1_drop_ci')}".rstrip()
