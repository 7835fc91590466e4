"""`optpipe evaluate`."""

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


def evaluate(
    model: ModelArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Labelled samples: class folders of images, JSON lines with texts, or a set's manifest; default: the card's own.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="A stratified sample of this many.")] = None,
    accuracy_budget: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Judge the drop against this many points, such as 1.0%.")
    ] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file, as in build.")] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights and of the sample.")] = 0,
    batch: Annotated[str | None, typer.Option(metavar="MIN:OPT:MAX", help="As given to build.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=MIN:OPT:MAX", help="As given to build.")] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Measure every build's task accuracy, on paired predictions."""
    from optpipe.commands.parsing import model_from_options, percent_from_text
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import ExitStatus
    from optpipe.evaluate.evaluation_run import evaluation_run
    from optpipe.reporters.terminal_evaluate import evaluate_table
    from optpipe.workspace.store import Store

    wanted = model_from_options(model, weights, seed, batch, shape or [])
    budget = percent_from_text(accuracy_budget, "--accuracy-budget") if accuracy_budget else None
    with Terminal() as terminal:
        record = evaluation_run(wanted, data, count, seed, budget, Store(workspace), terminal)
    verdicts = {row["verdict"] for row in record["results"]}
    status = ExitStatus.DONE
    if "INCONCLUSIVE" in verdicts:
        status = ExitStatus.INCONCLUSIVE
    if "FAIL" in verdicts:
        status = ExitStatus.FAIL
    if any(row["failed"] for row in record["results"]):
        status = ExitStatus.STAGE_FAILED
    record = {**record, "warnings": terminal.warnings}
    return Outcome(record, lambda: evaluate_table(record), status)
