"""`optpipe calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import (
    DEFAULT_WORKSPACE,
    JsonOption,
    ModelArgument,
    WorkspaceOption,
)
from optpipe.commands.outcome import Outcome


def calibrate(
    model: ModelArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            "--images",
            "--data",
            metavar="PATH",
            help="Real inputs: a folder of images, JSON lines with texts, or a set's manifest; default: the card's own set.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Draw this many, stratified where labels exist; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample, and of random weights.")] = 0,
    method: Annotated[str, typer.Option(help="max, percentile, entropy, mse, separated by commas; or all.")] = "all",
    target: Annotated[
        str, typer.Option(help="Whose placement of Q/DQ layers are judged in: tensorrt or cpu.")
    ] = "tensorrt",
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank the layers by what quantizing each alone costs.")
    ] = False,
    accuracy_budget: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Keep the fewest layers in floating point so that the drop stays inside, such as 1.0%.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the set's manifest and the tables here.")
    ] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file, as in build.")] = "default",
    batch: Annotated[str | None, typer.Option(metavar="MIN:OPT:MAX", help="As given to build.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=MIN:OPT:MAX", help="As given to build.")] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Choose INT8 ranges from real data, and the layers to spare."""
    from optpipe.commands.parsing import model_from_options, percent_from_text, target_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.quantize.calibration_run import CalibrationPlan, calibration_run
    from optpipe.quantize.methods import methods_from_text
    from optpipe.reporters.terminal_calibrate import calibrate_table
    from optpipe.workspace.store import Store

    plan = CalibrationPlan(
        source=data,
        count=count,
        seed=seed,
        methods=methods_from_text(method),
        target=target_from_text(target),
        sensitivity=sensitivity,
        budget=percent_from_text(accuracy_budget, "--accuracy-budget") if accuracy_budget else None,
        output=output,
    )
    wanted = model_from_options(model, weights, seed, batch, shape or [])
    with Terminal() as terminal:
        record = calibration_run(wanted, plan, Store(workspace), terminal)
    record = {**record, "warnings": terminal.warnings}
    return Outcome(record, lambda: calibrate_table(record))
