"""`optpipe evaluate`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

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


def evaluate(
    model: ModelArgument,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Labeled images (class folders, or masks or boxes beside them), a COCO file, JSON Lines of texts, or a set manifest;"
            " default: the model card's set.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Number of samples to draw, stratified by label.")] = None,
    truncate: TruncateOption = False,
    accuracy_budget: Annotated[
        str | None, typer.Option(metavar="POINTS", help="Maximum accuracy drop in percentage points, such as 1pt.")
    ] = None,
    task: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Your own task: a Python file that defines TASK (models/README.md)."),
    ] = None,
    weights: WeightsOption = "default",
    seed: SampleSeedOption = 0,
    batch: BatchOption = None,
    shape: ShapeOption = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Measure the task accuracy of every build on paired data."""
    from optpipe.cli.parsing import model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.quantity import drop_from_text
    from optpipe.evaluate.document import document_from_evaluation
    from optpipe.evaluate.evaluate import run_evaluation
    from optpipe.evaluate.tasks.user_file import UserTask
    from optpipe.workspace.store import Store

    wanted = model_from_options(model, weights, batch, shape or [], Store(workspace))
    budget = drop_from_text(accuracy_budget, "--accuracy-budget") / 100 if accuracy_budget else None
    own = UserTask(task) if task else None
    with Terminal() as terminal:
        store = Store(workspace)
        found = run_evaluation(wanted, data, count, seed, budget, store, terminal, own, truncate=truncate)
    return Outcome(
        replace(found, warnings=tuple(terminal.warnings)), lambda: document_from_evaluation(found), found.status
    )
