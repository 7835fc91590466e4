"""An evaluation on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def evaluate_table(record: Mapping[str, Any]) -> RenderableType:
    """The source model first, then what became of its answers in every artifact."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("artifact", "backend", "precision"):
        table.add_column(name, overflow="fold")
    for name in ("top-1", "top-5", "drop (95 %)", "lost / won", "agreement", "SNR", "verdict"):
        table.add_column(name, justify="right")
    for row in record["results"]:
        if row["why_not"]:
            continue
        table.add_row(
            row["artifact"] or "",
            f"{row['backend']} ({row['device']})" if row["artifact"] else "source model",
            row["precision"] if row["artifact"] else "",
            _percent(row["top1"]),
            _percent(row["top5"]),
            _drop(row) if row["artifact"] else "",
            f"{row['lost']} / {row['won']}" if row["artifact"] and row["lost"] is not None else "",
            _percent(row["agreement"]) if row["artifact"] else "",
            "equal"
            if row["artifact"] and row["snr_db"] is None
            else f"{row['snr_db']:.0f} dB"
            if row["artifact"]
            else "",
            Text(row["verdict"] or "", style=_COLOURS.get(row["verdict"], "")),
        )
    dataset = record["dataset"]
    head = f"{record['model']} on {dataset['count']} images of {dataset['name']} ({dataset['sha256'][:12]})"
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
        lines.append(Text("weights are random: nothing here says anything about accuracy", style="yellow"))
    lines.append(Text(f"predictions and manifest in {record['run_dir']}", style="dim"))
    return Group(*lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _drop(row: Mapping[str, Any]) -> str:
    if row["drop_ci"] is None:
        return ""
    low, high = row["drop_ci"]
    return f"{100 * row['drop_vs_source']:+.2f} ({100 * low:+.2f} … {100 * high:+.2f})"
