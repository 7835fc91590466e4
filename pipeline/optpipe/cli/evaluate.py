"""`optpipe evaluate`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    COUNT,
    DROP,
    SAMPLE_SEED,
    ModelArgument,
    ModelOptions,
    model_from_options,
)
from optpipe.core import params
from optpipe.core.errors import BadInputError
from optpipe.core.params import Param
from optpipe.core.precision import Budget
from optpipe.core.quantity import drop_from_text
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import require_writable_file

if TYPE_CHECKING:
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def evaluate(
    model: ModelArgument,
    store: "Store",
    terminal: "Terminal",
    data: Annotated[
        Path | None,
        Param(
            "Labeled images (class folders, or with masks or boxes), a COCO file, JSON Lines of texts, or a set manifest;"
            " default: the model card's set.",
            metavar="PATH",
        ),
    ] = None,
    count: Annotated[int | None, COUNT] = None,
    truncate: Annotated[bool, params.TRUNCATE] = False,
    accuracy_budget: Annotated[str | None, DROP] = None,
    task: Annotated[
        str | None,
        Param(
            "Your own task: a Python file that defines TASK (models/README.md), or the name of a plug-in.",
            metavar="FILE.py|NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    seed: Annotated[int, SAMPLE_SEED] = 0,
    layers: Annotated[
        str | None,
        Param(
            "Show instead where builds diverge from the source: the error of all intermediate tensors, or of some.",
            metavar="all|NAME[,…]",
            parse=params.text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Param(
            "With --layers: an HTML page that plots the error along the network.", metavar="FILE"
        ),
    ] = None,
    shapes: ModelOptions = ModelOptions(),
) -> Outcome:
    """Measure the task accuracy of every build on paired data."""
    from optpipe.evaluate.document import (
        document_from_evaluation,
        document_from_layers,
        page_from_layers,
    )
    from optpipe.evaluate.evaluate import EvaluationRequest, list_states, run_evaluation
    from optpipe.evaluate.tasks.user_file import find_user_task
    from optpipe.models.artifacts.named import find_builds_by_id

    wanted = model_from_options(model, shapes, store)
    if output is not None:
        if layers is None:
            raise BadInputError("--output requires --layers")
        require_writable_file(output, "output")
    if layers is not None:
        from optpipe.build.remedy import try_remedies
        from optpipe.evaluate.layers import compare_layers

        tensors = [] if layers == "all" else layers.split(",")
        points = (
            Budget(drop_from_text(accuracy_budget, "--accuracy-budget"), "points")
            if accuracy_budget is not None
            else None
        )
        compared = compare_layers(wanted, data, count, tensors, store, terminal, truncate=truncate)
        compared = try_remedies(
            wanted, compared, data, points, store, terminal, truncate=truncate, count=count
        )
        if output is not None:
            from optpipe.report.html import render_html

            write_bytes(
                output, render_html(page_from_layers(compared, list_states(store))).encode()
            )
        compared = replace(compared, warnings=tuple(terminal.warnings))
        return Outcome(compared, lambda record: document_from_layers(record, list_states(store)))
    budget = (
        None
        if accuracy_budget is None
        else drop_from_text(accuracy_budget, "--accuracy-budget") / 100
    )
    request = EvaluationRequest(
        data=data,
        count=count,
        seed=seed,
        budget=budget,
        task=find_user_task(task) if task else None,
        only=find_builds_by_id(model, store) or None,
        truncate=truncate,
    )
    result = run_evaluation(wanted, request, store, terminal)
    return Outcome(
        result, lambda record: document_from_evaluation(record, list_states(store)), result.status
    )
