"""`optpipe build` and `calibrate`."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    COUNT,
    SAMPLE_SEED,
    CalibrationOptions,
    ModelArgument,
    ModelOptions,
    TargetOptions,
    build_plan_from_options,
    model_from_options,
)
from optpipe.core import params
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.params import Param, choices_from_text, sizes_from_text
from optpipe.workspace.places import require_unused_path

if TYPE_CHECKING:
    from optpipe.models.export.exported import Model
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def _write_card(model: "Model", target: Path, images: Path | None, terminal: "Terminal") -> Outcome:
    """Writes a model card; nothing is built."""
    from optpipe.evaluate.tasks.detection_heads import guess_detector
    from optpipe.models.export.onnx_export import read_outputs_early
    from optpipe.models.sources.card_template import make_card_text

    if target.suffix != ".toml":
        raise BadInputError(f"--init {target}: a model card is a .toml file")
    require_unused_path(target, "init")
    with terminal.step("load"):
        loaded = model.load()
        card = read_outputs_early(loaded) or loaded.card
    target.parent.mkdir(parents=True, exist_ok=True)
    text = make_card_text(card, target, images, detector=guess_detector(card))
    target.write_text(text, encoding="utf-8")
    return Outcome(
        {"card": str(target)},
        lambda _: f"wrote {target}: complete it, then `optpipe build {quote(str(target))}`",
    )


def build(
    model: ModelArgument,
    store: "Store",
    terminal: "Terminal",
    targets: TargetOptions = TargetOptions(),
    shapes: ModelOptions = ModelOptions(),
    ranges: CalibrationOptions = CalibrationOptions(),
    images: Annotated[
        Path | None,
        Param(
            "Images, texts, or tensors to verify outputs on; with auto, labeled data to judge accuracy on.",
            alias="data",
            metavar="PATH",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Param(
            "Accuracy you may lose (0.5points) or lowest SNR (30dB).",
            metavar="COST",
        ),
    ] = None,
    recover: Annotated[
        str | None,
        Param(
            "Steps that win accuracy back in INT8 without labels: auto, none, or some of equalize, smoothquant, rounding, "
            "bias, and distill. Each is kept if it helps on held-out samples, and --budget ends the search.",
            metavar="NAME[,…]",
        ),
    ] = None,
    min_snr: Annotated[
        str | None,
        Param(
            "Minimum SNR of each output; default: 60dB for fp32, 40dB for tf32, 34dB for fp16, 20dB for bf16, 10dB for int8 "
            "and fp8.",
            metavar="DB",
        ),
    ] = None,
    require_share: Annotated[
        str | None,
        Param(
            "Minimum share of the multiply-adds in a build's precision, such as 80%; default: any share, which the build states.",
            metavar="SHARE",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        Param(
            "For denoisers: also compare after N Euler steps; time runs from START (1, or 1000 for integers) to START/N.",
            metavar="N[:STATE[:TIME[:START]]]",
        ),
    ] = None,
    compare_at: Annotated[
        str | None,
        Param(
            "Batch sizes at which auto compares builds, such as 1,8; default: OPT.", metavar="SIZES"
        ),
    ] = None,
    init: Annotated[
        Path | None,
        Param(
            "Write a model card for MODEL to complete, with the labels of the folders in --images, then exit.",
            metavar="CARD.toml",
        ),
    ] = None,
) -> Outcome:
    """Build engines with verified precision and outputs.

    Exports, calibrates, converts, builds, and verifies; all results go to the store. With --precision auto, builds every
    candidate and measures which is fastest here.
    """
    from optpipe.build.build import build_model
    from optpipe.build.records import document_from_build, document_from_choice, result_from_build

    require_existing(images, "--images/--data")
    wanted = model_from_options(model, shapes, store, terminal)
    if init is not None:
        return _write_card(wanted, init, images, terminal)
    if targets.precision != "auto" and "auto" in (targets.precision or "").split(","):
        raise BadInputError(
            f"--precision {targets.precision}: auto tries every precision, so give it alone"
        )
    plan = build_plan_from_options(
        targets,
        ranges,
        images=images,
        budget=budget,
        min_snr=min_snr,
        require_share=require_share,
        steps=steps,
        recover=recover,
    )
    if targets.precision == "auto":
        from optpipe.build.choose import choose_build

        sizes = None if compare_at is None else sizes_from_text(compare_at, "--compare-at")
        chosen = choose_build(wanted, plan, shapes.weights, store, terminal, sizes)
        return Outcome(chosen, document_from_choice, chosen.exit_status)
    if compare_at is not None:
        raise BadInputError("--compare-at requires --precision auto")
    result = build_model(wanted, plan, store, terminal)
    return Outcome(
        result_from_build(result, shapes.weights, terminal.warnings),
        document_from_build,
        result.status,
    )


def calibrate(
    model: ModelArgument,
    store: "Store",
    terminal: "Terminal",
    data: Annotated[
        Path | None,
        Param(
            "Calibration data: a folder of images, a JSON Lines file of texts, tensors (.npz, .npy, Polygraphy's JSON, "
            "a .py with CALIBRATION), or a set manifest; default: the "
            "model card's set.",
            alias="images",
            metavar="PATH",
        ),
    ] = None,
    count: Annotated[int | None, COUNT] = None,
    truncate: Annotated[bool, params.TRUNCATE] = False,
    seed: Annotated[int, SAMPLE_SEED] = 0,
    method: Annotated[
        str, Param("max, percentile[-99.9|-99.999], mse, or all.", metavar="NAME[,…]")
    ] = "all",
    target: Annotated[
        Literal["tensorrt", "cpu"],
        Param("Runtime whose Q/DQ placement is used to evaluate methods and layers.", setting=True),
    ] = "tensorrt",
    sensitivity: Annotated[
        bool, Param("Rank layers by the error from quantizing each one alone.")
    ] = False,
    output: Annotated[
        Path | None, Param("Also write the set manifest and tables to this folder.", metavar="DIR")
    ] = (None),
    shapes: ModelOptions = ModelOptions(),
) -> Outcome:
    """Choose INT8 ranges from data, and rank layers by their cost."""
    from optpipe.quantize.calibrated_graph import (
        CalibrationPlan,
        document_from_calibration,
        run_calibration,
    )
    from optpipe.quantize.ranges import METHODS

    require_existing(data, "--images/--data")
    methods = choices_from_text(method, (*METHODS, "all"), "--method")
    plan = CalibrationPlan(
        source=data,
        count=count,
        seed=seed,
        methods=tuple(METHODS) if "all" in methods else methods,
        target=target,
        sensitivity=sensitivity,
        output=output,
        truncate=truncate,
    )
    result = run_calibration(
        model_from_options(model, shapes, store, terminal), plan, store, terminal
    )
    return Outcome(result, document_from_calibration)
