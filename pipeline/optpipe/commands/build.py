"""`optpipe build`."""

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


def build(
    model: ModelArgument,
    precision: Annotated[
        str, typer.Option(help="One or more of fp32, tf32, fp16, bf16, int8, separated by commas.")
    ] = "fp16",
    backend: Annotated[
        str, typer.Option(help="auto, all, or names separated by commas; `optpipe doctor` lists them.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default each backend's best here.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="MIN:OPT:MAX", help="Batch sizes of the profile, or one fixed size.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MIN:OPT:MAX", help="Shapes of one input, such as images=1x3x224x224:8x3x224x224:64x3x224x224."
        ),
    ] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file.")] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights.")] = 0,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Real images to verify on.")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="What to calibrate INT8 on: images, texts, a set's manifest, or a calibration table."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BACKEND.KEY=VALUE", help="An option of one backend, such as tensorrt.optimization_level=5."
        ),
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Build engines whose precision is proven and outputs verified.

    Export, parity, calibration, precision in the graph, engine, proof, verification; everything goes to the store.
    """
    from optpipe.build.build import build as run_build
    from optpipe.build.build import build_record
    from optpipe.commands.parsing import build_plan_from_options, model_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.reporters.terminal_build import build_table
    from optpipe.workspace.store import Store

    plan = build_plan_from_options(precision, backend, device, option or [], images=images, calibration=calibration)
    wanted = model_from_options(model, weights, seed, batch, shape or [])
    with Terminal() as terminal:
        result = run_build(wanted, plan, Store(workspace), terminal)
    record = build_record(result, weights, terminal.warnings)
    return Outcome(record, lambda: build_table(record), result.status)
