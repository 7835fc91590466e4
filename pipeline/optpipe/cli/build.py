"""`optpipe build`, `optpipe calibrate` and `optpipe preprocess`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    DEFAULT_WORKSPACE,
    BatchOption,
    DeviceOption,
    ModelArgument,
    SampleSeedOption,
    ShapeOption,
    TruncateOption,
    WeightsOption,
    define_backend_option,
    define_precision_option,
)
from optpipe.core.plan import complete_choice

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
    wanted = model_from_options(model, weights, batch, shape or [], Store(workspace))
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
    from optpipe.core.precision import Budget
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
    wanted = model_from_options(model, weights, batch, shape or [], Store(workspace))
    with Terminal() as terminal:
        result = run_calibration(wanted, plan, Store(workspace), terminal)
    return Outcome(replace(result, warnings=tuple(terminal.warnings)), lambda: document_from_calibration(result))


def preprocess(
    model: ModelArgument,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of images; subfolders named after labels enable accuracy."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of images.")] = 1000,
    max_unreadable: Annotated[
        int | None, typer.Option(help="Maximum number of unreadable images; default: skip them with a warning.")
    ] = None,
    decode: Annotated[
        Literal["auto", "cpu", "mixed"], typer.Option(help="Decoder; mixed is nvJPEG on the GPU.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="DALI CPU threads; default: tuned, or up to 8 with --no-throughput.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per batch; default: 256 on a GPU, 32 on a CPU.")
    ] = None,
    resize: Annotated[
        Literal["exact", "two-pass", "fused"],
        typer.Option(help="exact matches the model's resize; fused is DALI's own, fastest on a CPU."),
    ] = "exact",
    throughput: Annotated[
        bool, typer.Option(help="Also compare the throughput of DALI and PyTorch's DataLoader.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(help="Measurement time for the best configurations; the search uses half.")
    ] = 2.0,
    weights: WeightsOption = "default",
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Derive the model's DALI pipeline, prove parity, measure."""
    from dataclasses import replace

    from optpipe.cli.parsing import model_from_options
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import require_existing
    from optpipe.preprocess.document import document_from_preprocess
    from optpipe.preprocess.preprocess import PreprocessRequest, choose_dali_plan, derive_preprocessing
    from optpipe.workspace.store import Store

    require_existing(images, "--images")
    fixed = {"decode": decode != "auto", "threads": threads is not None}
    request = PreprocessRequest(
        images=images,
        limit=limit,
        max_unreadable=max_unreadable,
        plan=choose_dali_plan(decode, threads, batch_size, resize),
        fixed=frozenset(name for name, given in fixed.items() if given),
        throughput=throughput,
        seconds=seconds,
    )
    wanted = model_from_options(model, weights, None, [], Store(workspace))
    with Terminal() as terminal:
        derived = derive_preprocessing(wanted, request, Store(workspace), terminal)
    record = replace(derived, warnings=tuple(terminal.warnings))
    return Outcome(record, lambda: document_from_preprocess(record), record.verdict.exit_status)
