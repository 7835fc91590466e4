"""`optpipe profile`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome

if TYPE_CHECKING:
    from optpipe.build.build import BuildPlan
    from optpipe.commands.terminal import Terminal
    from optpipe.export.model import Model
    from optpipe.profile.record import ProfilePlan
    from optpipe.trace.recording.capture import CaptureOptions
    from optpipe.workspace.store import Store


_OF_RECORDINGS = frozenset({"trace", "diff", "range", "redacted", "json"})
"""What a recording that exists takes; everything else is of one to be made."""


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As for `optpipe build`; omit with --trace and --diff.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Analyze an existing recording: .nsys-rep, its .sqlite export, a torch.profiler .json, or a profile folder.",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Compare two recordings by kernel and by layer."),
    ] = None,
    range: Annotated[
        str | None, typer.Option("--range", metavar="NAME", help="Analyze only work launched in this NVTX range.")
    ] = None,
    redacted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --trace: write a shareable .sqlite export without the process environment.",
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option(help="One or more of export, quantize, build, preprocess, inference, comma-separated.")
    ] = "export,quantize,build,preprocess,inference",
    precision: Annotated[str, typer.Option(help="As for `optpipe build`.")] = "fp16",
    backend: Annotated[str, typer.Option(help="As for `optpipe build`.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: the best available for each backend.")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Batch sizes to run, comma-separated.")] = "1",
    batch: Annotated[
        str | None,
        typer.Option(metavar="MIN:OPT:MAX", help="Batch range of the optimization profile, or one fixed size."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=MIN:OPT:MAX", help="As for `optpipe build`.")] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed for random weights.")] = 0,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Images to preprocess, also used as in `build --images`."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(metavar="DIR", help="Images to calibrate INT8 on.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="BACKEND.KEY=VALUE", help="Backend option, such as onnxruntime.cuda_graph=true."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=2, help="Recorded iterations of repeated stages.")] = 20,
    warm_up: Annotated[int, typer.Option(min=0, help="Warm-up iterations before recording.")] = 5,
    tracer: Annotated[str, typer.Option(help="nsys, or torch for torch.profiler (records less).")] = "nsys",
    osrt: Annotated[
        bool, typer.Option("--osrt", help="Also record OS runtime calls, to separate I/O from CPU time; large.")
    ] = False,
    record: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="Additional data: memory (usage), gpu-metrics, python (stacks at 1 kHz); comma-separated.",
        ),
    ] = "",
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Count DRAM bytes and cycles of the top kernels with ncu.")
    ] = False,
    keep_raw: Annotated[
        bool,
        typer.Option(
            "--keep-raw", help="Keep the raw recording, which contains the process environment in plain text."
        ),
    ] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]  # Typer gives it; a caller in Python has none
) -> Outcome:
    """Profile each stage with nsys; find the bottleneck."""
    from optpipe.commands.parsing import build_plan_from_options, model_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import BadInputError
    from optpipe.profile.record import ProfilePlan
    from optpipe.profile.recordings import diff_recordings, profile_recording, redact_recording
    from optpipe.reporters.terminal_profile import render_diff, render_profile
    from optpipe.trace.findings.report import document_from_profile
    from optpipe.trace.timeline.kernels import shorten_name
    from optpipe.workspace.store import Store

    if sum(given is not None for given in (model, trace, diff)) != 1:
        raise BadInputError("specify exactly one of MODEL (record), --trace FILE (analyze), or --diff BEFORE AFTER")
    if redacted is not None and trace is None:
        raise BadInputError(f"--redacted {redacted} requires --trace FILE")
    if model is None and context is not None and (given := _list_recording_options(context)):
        raise BadInputError(
            f"{given}: valid only with MODEL; existing recordings accept --range, --redacted and --json"
        )
    with Terminal() as terminal:
        if diff is not None:
            compared = diff_recordings(*diff, range, terminal).document()
            return Outcome(compared, lambda: render_diff(compared, shorten_name))
        if trace is not None:
            if redacted is not None:
                redact_recording(trace, redacted, terminal)
            document = document_from_profile(profile_recording(trace, range, terminal))
            return Outcome(document, lambda: render_profile(document, shorten_name))
        assert model is not None
        builds = build_plan_from_options(
            precision, backend, device, option or [], images=images, calibration=calibration
        )
        plan = ProfilePlan(
            model={
                "model": model,
                "precision": precision,
                "backends": [each.name for each in builds.backends],
                "batch": batch,
                "shapes": shape or [],
                "weights": weights,
                "seed": seed,
                "calibration": str(calibration) if calibration else None,
                "options": builds.options,
            },
            stages=_stages_from_text(stage),
            batch_sizes=_batch_sizes_from_text(batch_size),
            iterations=iterations,
            warm_up=warm_up,
            tracer=_tracer_from_text(tracer),
            capture=_capture_options_from_text(record, osrt=osrt),
            ncu=ncu,
            keep_raw=keep_raw,
        )
        wanted = model_from_options(model, weights, seed, batch, shape or [])
        return _profile_model(plan, wanted, builds, Store(workspace), terminal)


def _profile_model(
    plan: "ProfilePlan", wanted: "Model", builds: "BuildPlan", store: "Store", terminal: "Terminal"
) -> Outcome:
    """Builds what is to be profiled, or takes it from the store, then profiles it."""
    import shlex
    from dataclasses import replace

    from optpipe.build.build import build_model
    from optpipe.core.card import card_from_file
    from optpipe.inputs.images import find_images
    from optpipe.profile.profile_model import choose_preprocess_images, profile_model, require_profilable
    from optpipe.reporters.terminal_profile import render_profiles
    from optpipe.trace.timeline.kernels import shorten_name
    from optpipe.workspace.file_names import CARD
    from optpipe.workspace.manifest import get_command_line

    require_profilable(plan)
    if builds.images is not None:
        find_images(builds.images)  # a folder without images is refused before the build, which may take minutes
    built = build_model(wanted, builds, store, terminal)
    device = builds.device or next(
        (each.entry.info["device"] for each in built.artifacts if each.why_not is None), "cpu"
    )
    weights = {"weights": "random"} if built.fallback_reason else {}
    plan = replace(
        plan,
        model={**plan.model, "device": device, **weights},
        images=choose_preprocess_images(card_from_file(built.model.file(CARD)), builds.images, max(plan.batch_sizes)),
    )
    result = profile_model(plan, built.artifacts, built.model, store, terminal, shlex.split(get_command_line()))
    document = {
        **(result.main or {}),
        "stage": (result.main or {}).get("name"),
        "stages": list(result.stages),
        "not_run": [{"artifact": e.entry.id, "why_not": e.why_not} for e in built.artifacts if e.why_not],
        "run_dir": str(result.run_dir),
        "warnings": terminal.warnings,
    }
    return Outcome(document, lambda: render_profiles(document, shorten_name), result.status)


def _list_recording_options(context: typer.Context) -> str:
    """The options on the command line that say how to record, as they are typed."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]  # type: ignore[union-attr]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in _OF_RECORDINGS)


def _capture_options_from_text(record: str, *, osrt: bool) -> "CaptureOptions":
    from optpipe.trace.recording.capture import CaptureOptions

    words = _words_from_text(record, ("memory", "gpu-metrics", "python"), "--record") if record else ()
    return CaptureOptions(
        os_runtime=osrt,
        memory_use="memory" in words,
        gpu_metrics="gpu-metrics" in words,
        python_sampling="python" in words,
    )


def _stages_from_text(text: str) -> tuple[str, ...]:
    from optpipe.profile.record import STAGES

    return _words_from_text(text, STAGES, "--stage")


def _tracer_from_text(text: str) -> str:
    return _words_from_text(text, ("nsys", "torch"), "--tracer")[0]


def _words_from_text(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    from optpipe.errors import BadInputError

    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words or not set(words) <= set(known):
        raise BadInputError(
            f"{option} {text}: choose {'one or more' if len(known) > 2 else 'one'} of {', '.join(known)}"
        )
    return words


def _batch_sizes_from_text(text: str) -> tuple[int, ...]:
    from optpipe.errors import BadInputError

    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadInputError(f"--batch-size {text}: expected positive integers, comma-separated, such as 1,64")
    return sizes
