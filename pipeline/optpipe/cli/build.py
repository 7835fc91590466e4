"""`optpipe build`, `calibrate`, `preprocess`, `evaluate` and `profile`."""

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    COUNT,
    DROP,
    SAMPLE_SEED,
    CalibrationOptions,
    ModelArgument,
    ModelOptions,
    TargetOptions,
    build_plan_from_options,
    model_from_options,
)
from optpipe.core import plan as params
from optpipe.core.errors import BadInputError, ExitStatus, require_existing
from optpipe.core.plan import Param, choices_from_text, list_words, sizes_from_text
from optpipe.core.precision import Budget
from optpipe.core.quantity import drop_from_text
from optpipe.core.wording import Argument
from optpipe.trace.nsys import ProfilePlan, find_nsys
from optpipe.workspace.files import write_bytes
from optpipe.workspace.places import require_unused_path, require_writable_file

if TYPE_CHECKING:
    from optpipe.models.export.exported import Model
    from optpipe.report.progress import Terminal
    from optpipe.workspace.store import Store


def _write_card(model: "Model", target: Path, images: Path | None, terminal: "Terminal") -> Outcome:
    """Writes a model card; nothing is built."""
    from optpipe.models.export.onnx_export import read_outputs_early
    from optpipe.models.sources.card_template import make_card_text

    if target.suffix != ".toml":
        raise BadInputError(f"--init {target}: a model card is a .toml file")
    require_unused_path(target, "init")
    with terminal.step("load"):
        loaded = model.load()
        card = read_outputs_early(loaded) or loaded.card
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(make_card_text(card, target, images), encoding="utf-8")
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
            "Steps that win accuracy back in INT8 without labels: auto, none, or some of equalize, smoothquant, rounding, and "
            "bias. Each is kept if it helps on held-out samples, and --budget ends the search.",
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


def preprocess(
    model: ModelArgument,
    store: "Store",
    terminal: "Terminal",
    images: Annotated[
        Path | None,
        Param("Folder of images; subfolders named after labels enable accuracy.", metavar="DIR"),
    ] = None,
    limit: Annotated[int, Param("Maximum number of images.")] = 1000,
    decode: Annotated[
        Literal["auto", "cpu", "mixed"], Param("Decoder; mixed is nvJPEG on the GPU.", setting=True)
    ] = ("auto"),
    threads: Annotated[
        int | None,
        Param("DALI CPU threads; default: tuned, or up to 8 with --no-throughput.", setting=True),
    ] = None,
    batch_size: Annotated[
        int | None, Param("Images per batch; default: 256 on a GPU, 32 on a CPU.")
    ] = None,
    throughput: Annotated[
        bool, Param("Also compare the throughput of DALI and PyTorch's DataLoader.")
    ] = True,
    seconds: Annotated[
        float,
        Param("Measurement time for the best configurations; the search uses half.", setting=True),
    ] = 2.0,
    against: Annotated[
        str | None,
        Param(
            "Instead, compare with your training transform.",
            metavar="FILE.py:NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None, Param("Folder for the picture of --against.", metavar="DIR")
    ] = None,
    weights: Annotated[str, params.WEIGHTS] = "default",
) -> Outcome:
    """Derive a model's DALI pipeline, and prove its parity."""
    from optpipe.preprocess.document import document_from_against, document_from_preprocess
    from optpipe.preprocess.preprocess import (
        PreprocessRequest,
        choose_dali_plan,
        derive_preprocessing,
    )

    require_existing(images, "--images")
    fixed = {"decode": decode != "auto", "threads": threads is not None}
    request = PreprocessRequest(
        images=images,
        limit=limit,
        plan=choose_dali_plan(decode, threads, batch_size),
        fixed=frozenset(name for name, given in fixed.items() if given),
        throughput=throughput,
        seconds=seconds,
    )
    wanted = model_from_options(model, ModelOptions(weights), store, terminal)
    if against is not None:
        from optpipe.preprocess.preprocess import prove_training_transform

        compared = prove_training_transform(wanted, against, request, output, store, terminal)
        return Outcome(compared, document_from_against, compared.verdict.exit_status)
    if output is not None:
        raise BadInputError("--output requires --against")
    record = derive_preprocessing(wanted, request, store, terminal)
    return Outcome(record, document_from_preprocess, record.verdict.exit_status)


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
    from optpipe.evaluate.evaluate import list_states, run_evaluation
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
    own = find_user_task(task) if task else None
    found = run_evaluation(
        wanted,
        data,
        count,
        seed,
        budget,
        store,
        terminal,
        own,
        truncate=truncate,
        only=find_builds_by_id(model, store) or None,
    )
    return Outcome(
        found, lambda record: document_from_evaluation(record, list_states(store)), found.status
    )


def profile(
    store: "Store",
    terminal: "Terminal",
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL | -- COMMAND ...]",
            help="As for `optpipe build`, or your own program after `--`; omit with --trace.",
            show_default=False,
        ),
    ] = None,
    program: tuple[str, ...] | None = None,
    trace: Annotated[
        Path | None,
        Param(
            "Analyze an existing recording: .nsys-rep, its .sqlite export, or a profile folder.",
            metavar="FILE",
        ),
    ] = None,
    range: Annotated[
        str | None,
        Param(
            "Analyze only work launched in this NVTX range; all: everything.",
            metavar="NAME",
            parse=params.text_from_text,
        ),
    ] = None,
    against: Annotated[
        str | None,
        Param(
            "Compare with this profile run or recording, by stage and kernel.",
            metavar="RUN",
            parse=params.text_from_text,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Param("Also write the timeline for Perfetto (ui.perfetto.dev).", metavar="FILE.json"),
    ] = None,
    duration: Annotated[
        float | None,
        Param(
            "Seconds after which your own program, such as a server, is stopped.",
            metavar="SECONDS",
            minimum=1,
        ),
    ] = None,
    targets: TargetOptions = TargetOptions(),
    shapes: ModelOptions = ModelOptions(),
    ranges: CalibrationOptions = CalibrationOptions(),
    capture: ProfilePlan = ProfilePlan(),
) -> Outcome:
    """Profile each stage of a model, or your own program, with nsys, and find the bottleneck."""
    from optpipe.trace.document import document_from_profile
    from optpipe.trace.profile_model import find_profile_run, profile_recording

    if sum(given is not None for given in (model, trace, program)) != 1:
        raise BadInputError(
            "specify exactly one of MODEL (record), -- COMMAND (record a program), and --trace FILE (analyze)"
        )
    given = [word for each in (targets, shapes, ranges, capture) for word in list_words(each)]
    if trace is not None and given:
        raise BadInputError(
            f"{' '.join(given)}: valid only with MODEL; existing recordings accept --range, --against, --output, and --json"
        )
    if duration is not None and program is None:
        raise BadInputError("--duration: valid only with -- COMMAND")
    if output is not None:
        require_writable_file(output, "output")
    other = None if against is None else find_profile_run(against, store)
    if trace is not None:
        profile = profile_recording(trace, range, terminal, other, output)
        return Outcome(profile, document_from_profile)
    if program is not None:
        own = [word for each in (targets, shapes, ranges) for word in list_words(each)]
        return _profile_program(
            program, own, range, capture, duration, other, output, store, terminal
        )
    assert model is not None
    if range is not None:
        raise BadInputError("--range: valid only with --trace and -- COMMAND")
    return _profile_model(model, targets, shapes, ranges, capture, store, terminal, other, output)


def _profile_program(
    program: tuple[str, ...],
    given: list[str],
    range_name: str | None,
    capture: ProfilePlan,
    duration_s: float | None,
    against: Path | None,
    output: Path | None,
    store: "Store",
    terminal: "Terminal",
) -> Outcome:
    from optpipe.trace.document import document_from_stages
    from optpipe.trace.profile_model import profile_program
    from optpipe.trace.program import has_ended_well

    if not program:
        raise BadInputError("no program after --: optpipe profile -- python train.py")
    usual = ProfilePlan(record=capture.record, kernels=capture.kernels, keep_raw=capture.keep_raw)
    if given or capture != usual:
        words = " ".join([*given, *list_words(replace(capture, record=None, kernels=0))])
        raise BadInputError(f"{words}: valid only with MODEL")
    found = profile_program(
        program, capture, range_name, duration_s, store, terminal, against, output
    )
    ended_well = found.program is not None and has_ended_well(found.program, duration_s)
    return Outcome(
        found, document_from_stages, ExitStatus.DONE if ended_well else ExitStatus.STAGE_FAILED
    )


def _profile_model(
    text: str,
    targets: TargetOptions,
    shapes: ModelOptions,
    ranges: CalibrationOptions,
    capture: ProfilePlan,
    store: "Store",
    terminal: "Terminal",
    against: Path | None,
    output: Path | None,
) -> Outcome:
    from optpipe.models.artifacts.profile_sizes import require_card_lengths
    from optpipe.models.export.exported import prepare_model, read_card
    from optpipe.models.inputs.image_set import find_images
    from optpipe.models.stored_card import read_stored_card
    from optpipe.trace.document import document_from_stages
    from optpipe.trace.nsys import Stage
    from optpipe.trace.profile_model import (
        build_or_find,
        can_calibrate,
        choose_preprocess_images,
        find_build_by_id,
        plan_from_builds,
        profile_model,
    )
    from optpipe.trace.record import BuildJob

    builds = build_plan_from_options(targets, ranges, images=capture.images)
    model = model_from_options(text, shapes, store)
    find_nsys()
    if capture.length is not None:  # reject it before the build too
        model, stored = prepare_model(model, store, terminal)
        card = read_card(model, stored)
        wider = Argument("shape", card.widen_shapes(capture.length))
        require_card_lengths(card, capture.length, card.name, "widen it with " + wider)
    if builds.images is not None:
        find_images(builds.images)  # a build may take minutes: reject a folder without images first
    if model.exported is None:
        built = build_or_find(text, model, builds, store, terminal)
        if not capture.stage and not can_calibrate(builds, built.model):
            terminal.warn(
                Argument("calibration")
                + " is not given: the stored INT8 build is profiled, but not how it is built"
            )
            capture = replace(capture, stage=(Stage.INFERENCE, Stage.PREPROCESS))
    else:
        precision, backend, device = targets.precision, targets.backend, builds.device
        built = find_build_by_id(
            text, store, terminal, precision=precision, backend=backend, device=device
        )
        builds = plan_from_builds(builds, built.artifacts)
        if not capture.stage:  # the build is done
            capture = replace(capture, stage=(Stage.INFERENCE, Stage.PREPROCESS))
    runs_on = [each.entry.info.device for each in built.artifacts if each.why_not is None]
    again = BuildJob(
        model=text,
        workspace=store.workspace.resolve(),
        weights=replace(model.weights, kind="random") if built.fallback_reason else model.weights,
        batch=model.batch,
        shapes=model.shapes,
        precisions=builds.precisions,
        backends=tuple(each.name for each in builds.backends),
        automatic=builds.automatic,
        device=builds.device,
        on_gpu=(builds.device or next(iter(runs_on), "cpu")) == "cuda",
        calibration=builds.calibration,
        options=builds.options,
        truncate=builds.truncate,
    )
    images = choose_preprocess_images(
        read_stored_card(built.model), builds.images, max(capture.batch_size)
    )
    found = profile_model(
        capture,
        built.artifacts,
        built.model,
        store,
        terminal,
        builds.options,
        again,
        images,
        against=against,
        output=output,
    )
    return Outcome(
        found, document_from_stages, ExitStatus.STAGE_FAILED if found.failed else ExitStatus.DONE
    )
