"""`optpipe build`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    DeviceOption,
    ModelArgument,
    SeedOption,
    TruncateOption,
    WeightsOption,
    define_backend_option,
    define_precision_option,
)

if TYPE_CHECKING:
    from optpipe.build.choose import ChoicePlan
    from optpipe.models.export.model import Model
    from optpipe.workspace.store import Store


def build(
    model: ModelArgument,
    precision: Annotated[
        str, define_precision_option("Precisions to build; auto: the fastest build within --budget.")
    ] = "fp16",
    backend: Annotated[str, define_backend_option("auto, all, or names; `optpipe doctor` lists them.")] = "auto",
    device: DeviceOption = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:OPT:MAX",
            help="Batch range of the optimization profile, or one fixed size; several for TensorRT, as 1:1:1,1:32:64.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MIN:OPT:MAX",
            help="Shape range of one input, such as images=1x3x224x224:8x3x224x224:64x3x224x224.",
        ),
    ] = None,
    weights: WeightsOption = "default",
    seed: SeedOption = 0,
    images: Annotated[
        Path | None,
        typer.Option(
            "--images",
            "--data",
            metavar="PATH",
            help="Images or tensors to verify outputs on; with auto, labeled data to judge accuracy on.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Calibration data: images, texts, tensors (.npz, .npy, Polygraphy's JSON, a .py with CALIBRATION), "
            "a set manifest, or a table.",
        ),
    ] = None,
    truncate: TruncateOption = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="COST",
            help="The most that fp16, int8, fp8 (the fewest layers are kept out) or auto may cost: 0.5points of accuracy, "
            "or an SNR of 30dB.",
        ),
    ] = None,
    compare_at: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Batch sizes at which auto compares builds, such as 1,8; default: OPT."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BACKEND.KEY=VALUE",
            help="Backend option, such as tensorrt.optimization_level=5; `optpipe doctor --options` lists them.",
        ),
    ] = None,
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Build engines with verified precision and outputs.

    Exports, calibrates, converts, builds and verifies; all results go to the store. With --precision auto, builds every
    candidate and measures which is fastest here.
    """
    from optpipe.build.build import build_model as run_build
    from optpipe.build.document import document_from_build
    from optpipe.build.records import result_from_build
    from optpipe.cli.parsing import build_plan_from_options, choice_plan_from_options, model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import BadInputError, require_existing
    from optpipe.workspace.store import Store

    require_existing(images, "--images/--data")
    wanted = model_from_options(model, weights, seed, batch, shape or [], Store(workspace))
    if precision == "auto":
        choice = choice_plan_from_options(
            backend, device, option or [], images=images, calibration=calibration, budget=budget, compare_at=compare_at
        )
        choice = replace(choice, build=replace(choice.build, truncate=truncate))
        return _choose(wanted, choice, weights, Store(workspace))
    if "auto" in precision.split(","):
        raise BadInputError(f"--precision {precision}: auto tries every precision, so give it alone")
    if compare_at is not None:
        raise BadInputError("--compare-at requires --precision auto")
    plan = build_plan_from_options(
        precision, backend, device, option or [], images=images, calibration=calibration, batch=batch, budget=budget
    )
    with Terminal() as terminal:
        result = run_build(wanted, replace(plan, truncate=truncate), Store(workspace), terminal)
    told = result_from_build(result, weights, terminal.warnings)
    return Outcome(told, lambda: document_from_build(told), result.status)


def _choose(model: "Model", plan: "ChoicePlan", weights: str, store: "Store") -> Outcome:
    from optpipe.build.choose import choose_build
    from optpipe.build.document import document_from_choice
    from optpipe.cli.terminal import Terminal

    with Terminal() as terminal:
        found = choose_build(model, plan, weights, store, terminal)
    found = replace(found, warnings=tuple(terminal.warnings))
    return Outcome(found, lambda: document_from_choice(found), found.exit_status)
