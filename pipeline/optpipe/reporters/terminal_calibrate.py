"""A calibration on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_count
from optpipe.reporters.records import format_drop, format_random_weights

MAX_LAYERS_LISTED = 12


def render_calibration(record: Mapping[str, Any]) -> RenderableType:
    """The methods against FP32, then the costliest layers, then what was spared for the budget."""
    found = record["set"]
    head = f"{record['model']}: {found['count']} {found['kind']} of {found['name']} ({found['sha256'][:12]}, seed {found['seed']})"
    lines: list[RenderableType] = [Text(head), _render_methods(record)]
    if record["sensitivity"]:
        lines.append(_render_layers(record))
    if record["selection"]:
        lines.append(_render_selection(record["selection"]))
    if record["skipped"]:
        lines.append(Text("kept in floating point", style="bold"))
        lines += [
            Text(f"  {each['layer']}: {each['reason']}", style="dim") for each in record["skipped"][:MAX_LAYERS_LISTED]
        ]
        if len(record["skipped"]) > MAX_LAYERS_LISTED:
            lines.append(
                Text(f"  and {len(record['skipped']) - MAX_LAYERS_LISTED} more (--json lists them)", style="dim")
            )
    for each in record["lint"][:MAX_LAYERS_LISTED]:
        lines.append(Text(f"{each['rule']}  {each['layer']}: {each['message']}; {each['advice']}", style="yellow"))
    if not record["weights"]["trained"]:
        lines.append(Text(format_random_weights(record["weights"]), style="yellow"))
    chosen = record["selection"]["table"] if record["selection"] else _find_table_path(record, record["best"])
    build = f"optpipe build {record['model']} --precision int8 --calibration {chosen}"
    lines.append(Text(f"to build with it: {build}"))
    return Group(*lines)


def _find_table_path(record: Mapping[str, Any], method: str) -> str:
    return str(next(each["path"] for each in record["tables"] if each["method"] == method))


def _render_methods(record: Mapping[str, Any]) -> Table:
    title = (
        f"INT8 by method, on {record['compared_on_images']} of the {record['set']['kind']}, Q/DQ for {record['target']}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("method")
    for name in ("SNR vs. FP32", "drop (95 %)"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in record["tables"]:
        best = "best" if row["method"] == record["best"] else ""
        table.add_row(row["method"], f"{row['snr_db']:.1f} dB", _format_drop(row), best)
    return table


def _render_layers(record: Mapping[str, Any]) -> Table:
    title = f"layers by the cost of quantizing each alone, on {record['ranked_on_images']} {record['set']['kind']}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("layer", overflow="fold")
    for name in ("SNR", "drop (95 %)", "MACs"):
        table.add_column(name, justify="right")
    for row in record["sensitivity"][:MAX_LAYERS_LISTED]:
        table.add_row(row["layer"], f"{row['snr_db']:.1f} dB", _format_drop(row), format_count(row["macs"]))
    return table


def _render_selection(chosen: Mapping[str, Any]) -> Table:
    title = (
        f"budget {100 * chosen['budget']:g} points of {chosen['metric']} on {chosen['images']} samples:"
        f" {len(chosen['keep'])} of {chosen['layers']} layers stay in floating point"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("layers kept", "INT8 MACs", "drop (95 %)", "SNR"):
        table.add_column(name, justify="right")
    for row in chosen["tried"]:
        mark = " ←" if row["kept"] == len(chosen["keep"]) else ""
        table.add_row(
            f"{row['kept']}{mark}", f"{row['int8_macs_share']:.1%}", _format_drop(row), f"{row['snr_db']:.1f} dB"
        )
    return table


def _format_drop(row: Mapping[str, Any]) -> str:
    return "predictions are constant" if row["drop_ci"] is None else format_drop(row["drop"], row["drop_ci"])
