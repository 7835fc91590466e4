"""`optpipe calibrate`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    BatchOption,
    ModelArgument,
    SampleSeedOption,
    ShapeOption,
    TruncateOption,
    WeightsOption,
)
from optpipe.core.choices import complete_choice


def _complete_method(incomplete: str) -> list[str]:
    from optpipe.quantize.ranges import METHOD_CHOICES

    return complete_choice(incomplete, METHOD_CHOICES)


def calibrate(
    model: ModelArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            "--images",
            "--data",
            metavar="PATH",
            help="Calibration data: a folder of images, a JSON Lines file of texts, tensors (.npz, .npy, Polygraphy's JSON, a .py "
            "with CALIBRATION), or a set manifest; default: the model card's set.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of samples to draw, stratified by label if available; default: all."),
    ] = None,
    truncate: TruncateOption = False,
    seed: SampleSeedOption = 0,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME[,…]", autocompletion=_complete_method, help="max, percentile, entropy, mse, or all."
        ),
    ] = "all",
    target: Annotated[
        Literal["tensorrt", "cpu"],
        typer.Option(help="Runtime whose Q/DQ placement is used to evaluate methods and layers."),
    ] = "tensorrt",
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank layers by the error from quantizing each one alone.")
    ] = False,
    accuracy_budget: Annotated[
        str | None,
        typer.Option(
            metavar="POINTS",
            help="Keep the fewest layers in floating point that keep the accuracy drop within this, such as 1pt.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the set manifest and tables to this folder.")
    ] = None,
    weights: WeightsOption = "default",
    batch: BatchOption = None,
    shape: ShapeOption = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Choose INT8 ranges from data, and layers to keep in float."""
    from optpipe.cli.parsing import model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import require_existing
    from optpipe.core.mixed_precision import Budget
    from optpipe.core.quantity import drop_from_text
    from optpipe.quantize.calibration_run import CalibrationPlan, run_calibration
    from optpipe.quantize.document import document_from_calibration
    from optpipe.quantize.ranges import methods_from_text
    from optpipe.workspace.store import Store

    require_existing(data, "--images/--data")
    plan = CalibrationPlan(
        source=data,
        count=count,
        seed=seed,
        methods=methods_from_text(method),
        target=target,
        sensitivity=sensitivity,
        budget=Budget(drop_from_text(accuracy_budget, "--accuracy-budget"), "points") if accuracy_budget else None,
        output=output,
        truncate=truncate,
    )
    wanted = model_from_options(model, weights, seed, batch, shape or [], Store(workspace))
    with Terminal() as terminal:
        result = run_calibration(wanted, plan, Store(workspace), terminal)
    return Outcome(replace(result, warnings=tuple(terminal.warnings)), lambda: document_from_calibration(result))
