from shlex import quote

from optpipe.core.precision import PrecisionCost
from optpipe.core.quantity import format_count
from optpipe.quantize.calibrated_graph import CalibrationResult
from optpipe.quantize.sensitivity import SelectionInfo, SensitivityInfo
from optpipe.report.document import (
    Column,
    Document,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    figure_columns,
    format_cost_snr,
    format_drop,
    make_document,
    make_table,
    warn_of_random_weights,
)

MAX_LAYERS_LISTED = 12


def document_from_calibration(result: CalibrationResult) -> Document:
    found = result.set
    chosen = result.table or next(each.path for each in result.tables if each.method == result.best)
    build = f"optpipe build {quote(result.model)} --precision int8 --calibration {quote(str(chosen))}"
    return make_document(
        [
            Sentence(
                f"{result.model}: {found.count} {result.kind} of {found.name} ({found.sha256[:12]}, seed {found.seed})"
            ),
            _tabulate_methods(result),
            _tabulate_layers(result.sensitivity, result.kind) if result.sensitivity else None,
            _tabulate_trials(result.selection) if result.selection else None,
            _list_skipped(result),
            *(
                Sentence(f"{each.layer}: {each.message}; {each.advice}", Tone.DOUBTFUL, each.rule)
                for each in result.lint[:MAX_LAYERS_LISTED]
            ),
            warn_of_random_weights(result.weights),
            Sentence(f"to build with it: {build}"),
        ]
    )


def _tabulate_methods(result: CalibrationResult) -> Table:
    rows = [
        (
            row.method,
            format_cost_snr(row.cost),
            _format_drop(row.cost),
            "best" if row.method == result.best and len(result.tables) > 1 else "",
        )
        for row in result.tables
    ]
    title = f"INT8 by method, on {result.compared_on_images} of the {result.kind}, Q/DQ for {result.target}"
    columns: list[Column | str] = ["method", figure_column("SNR vs. FP32"), figure_column("drop, points"), ""]
    return make_table(columns, rows, title=title)


def _tabulate_layers(found: SensitivityInfo, kind: str) -> Table:
    rows = [
        (row.layer, format_cost_snr(row.cost), _format_drop(row.cost), format_count(row.macs))
        for row in found.layers[:MAX_LAYERS_LISTED]
    ]
    title = f"layers by the cost of quantizing each alone, on {found.images} {kind}"
    return make_table(["layer", *figure_columns("SNR", "drop, points", "MACs")], rows, title=title)


def _tabulate_trials(chosen: SelectionInfo) -> Table:
    rows = [
        (
            f"{row.kept}{' ←' if row.kept == len(chosen.keep) else ''}",
            f"{row.macs_share:.1%}",
            _format_drop(row.cost),
            format_cost_snr(row.cost),
        )
        for row in chosen.tried
    ]
    kept = f"{len(chosen.keep)} of {chosen.layers} layers stay in floating point"
    title = f"budget {chosen.budget} of {chosen.metric} on {chosen.images} samples: {kept}"
    return make_table(["layers kept", *figure_columns("INT8 MACs", "drop, points", "SNR")], rows, title=title)


def _list_skipped(result: CalibrationResult) -> Section | None:
    if not result.skipped:
        return None
    lines = [Sentence(f"  {each.layer}: {each.reason}", Tone.FAINT) for each in result.skipped[:MAX_LAYERS_LISTED]]
    if (more := len(result.skipped) - MAX_LAYERS_LISTED) > 0:
        lines.append(Sentence(f"  and {more} more (--json lists them)", Tone.FAINT))
    return Section("kept in floating point", tuple(lines))


def _format_drop(cost: PrecisionCost) -> str:
    if cost.drop is None or cost.drop_ci is None:
        return "predictions are constant"
    return format_drop(cost.drop, cost.drop_ci)
