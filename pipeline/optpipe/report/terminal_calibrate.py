"""A calibration on the terminal."""

from shlex import quote
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_count
from optpipe.report.records import format_cost_snr, format_drop, format_random_weights
from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from optpipe.core.mixed_precision import PrecisionCost
    from optpipe.quantize.calibration_run import CalibrationResult
    from optpipe.quantize.sensitivity import SelectionInfo, SensitivityInfo

MAX_LAYERS_LISTED = 12


def render_calibration(result: "CalibrationResult") -> RenderableType:
    """The methods against FP32, then the costliest layers, then what stays in floating point for the budget."""
    found, skipped = result.set, result.skipped
    head = f"{result.model}: {found.count} {found.kind} of {found.name} ({found.sha256[:12]}, seed {found.seed})"
    lines: list[RenderableType] = [Text(head), _render_methods(result)]
    if result.sensitivity:
        lines.append(_render_layers(result.sensitivity, found.kind))
    if result.selection:
        lines.append(_render_selection(result.selection))
    if skipped:
        lines.append(Text("kept in floating point", style="bold"))
        lines += [Text(f"  {each.layer}: {each.reason}", style="dim") for each in skipped[:MAX_LAYERS_LISTED]]
        if len(skipped) > MAX_LAYERS_LISTED:
            lines.append(Text(f"  and {len(skipped) - MAX_LAYERS_LISTED} more (--json lists them)", style="dim"))
    for each in result.lint[:MAX_LAYERS_LISTED]:
        lines.append(Text(f"{each.rule}  {each.layer}: {each.message}; {each.advice}", style="yellow"))
    if not result.weights.trained:
        lines.append(Text(format_random_weights(result.weights.drawn), style="yellow"))
    chosen = result.table or next(each.path for each in result.tables if each.method == result.best)
    build = f"optpipe build {quote(result.model)} --precision int8 --calibration {quote(str(chosen))}"
    lines.append(Text(f"to build with it: {build}"))
    return Group(*lines)


def _make_table(title: str, first: str, *figures: str) -> Table:
    table = make_table(first, right=figures)
    table.title, table.title_justify = title, "left"
    return table


def _render_methods(result: "CalibrationResult") -> Table:
    title = f"INT8 by method, on {result.compared_on_images} of the {result.set.kind}, Q/DQ for {result.target}"
    table = _make_table(title, "method", "SNR vs. FP32", "drop (95 %)")
    table.add_column("")
    for row in result.tables:
        best = "best" if row.method == result.best and len(result.tables) > 1 else ""
        table.add_row(row.method, format_cost_snr(row.cost), _format_drop(row.cost), best)
    return table


def _render_layers(found: "SensitivityInfo", kind: str) -> Table:
    title = f"layers by the cost of quantizing each alone, on {found.images} {kind}"
    table = _make_table(title, "layer", "SNR", "drop (95 %)", "MACs")
    for row in found.layers[:MAX_LAYERS_LISTED]:
        table.add_row(row.layer, format_cost_snr(row.cost), _format_drop(row.cost), format_count(row.macs))
    return table


def _render_selection(chosen: "SelectionInfo") -> Table:
    title = (
        f"budget {chosen.budget} of {chosen.metric} on {chosen.images} samples:"
        f" {len(chosen.keep)} of {chosen.layers} layers stay in floating point"
    )
    table = _make_table(title, "layers kept", "INT8 MACs", "drop (95 %)", "SNR")
    for row in chosen.tried:
        mark = " ←" if row.kept == len(chosen.keep) else ""
        table.add_row(f"{row.kept}{mark}", f"{row.macs_share:.1%}", _format_drop(row.cost), format_cost_snr(row.cost))
    return table


def _format_drop(cost: "PrecisionCost") -> str:
    if cost.drop is None or cost.drop_ci is None:
        return "predictions are constant"
    return format_drop(cost.drop, cost.drop_ci)
