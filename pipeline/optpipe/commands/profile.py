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
    from optpipe.profile.profile_model import ProfilePlan
    from optpipe.trace.recording.capture import CaptureOptions
    from optpipe.workspace.store import Store


_OF_RECORDINGS = frozenset({"trace", "diff", "range", "redacted", "json"})
"""What a recording that exists takes; everything else is of one to be made."""


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As for `optpipe build`; left out with --trace and --diff.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Judge a recording that exists: .nsys-rep, its .sqlite export, torch.profiler's .json, or a profile's folder.",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Compare two recordings, kernel by kernel and layer by layer."),
    ] = None,
    range: Annotated[
        str | None, typer.Option("--range", metavar="NAME", help="Judge only what this NVTX range launched.")
    ] = None,
    redacted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --trace: also write the recording as an .sqlite export without the process environment, to pass on.",
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option(help="One or more of export, quantize, build, preprocess, inference, separated by commas.")
    ] = "export,quantize,build,preprocess,inference",
    precision: Annotated[str, typer.Option(help="As for `optpipe build`.")] = "fp16",
    backend: Annotated[str, typer.Option(help="As for `optpipe build`.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default each backend's best here.")] = None,
    batch_size: Annotated[str, typer.Option(help="Batch sizes to run, separated by commas.")] = "1",
    batch: Annotated[
        str | None, typer.Option(metavar="MIN:OPT:MAX", help="Batch sizes of the build's profile, or one fixed size.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=MIN:OPT:MAX", help="As for `optpipe build`.")] = None,
    weights: Annotated[str, typer.Option(help="default, random, or a .safetensors/.pt file.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Pictures to preprocess, and to build on as `build --images` does."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(metavar="DIR", help="Real images to calibrate INT8 on.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BACKEND.KEY=VALUE", help="An option of one backend, such as onnxruntime.cuda_graph=true."
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(min=2, help="Recorded iterations of each stage that repeats.")] = 20,
    warm_up: Annotated[int, typer.Option(min=0, help="Iterations ahead of the recording.")] = 5,
    tracer: Annotated[str, typer.Option(help="nsys, or torch for torch.profiler, which records less.")] = "nsys",
    osrt: Annotated[
        bool, typer.Option("--osrt", help="Record calls to the operating system too, which tells I/O from CPU; large.")
    ] = False,
    record: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="More to record: memory (use), gpu-metrics, python (stacks, at 1 kHz); separated by commas.",
        ),
    ] = "",
    ncu: Annotated[bool, typer.Option("--ncu", help="Count DRAM bytes and cycles of the top kernels.")] = False,
    keep_raw: Annotated[
        bool,
        typer.Option("--keep-raw", help="Keep the raw recording, which holds the process environment in clear text."),
    ] = False,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]  # Typer gives it; a caller in Python has none
) -> Outcome:
    """Say what limits each stage under nsys, and what to try next."""
    from optpipe.commands.parsing import build_plan_from_options, model_from_options
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import BadInputError
    from optpipe.profile.profile_model import ProfilePlan
    from optpipe.profile.recordings import diff_recordings, profile_recording, redact_recording
    from optpipe.reporters.terminal_profile import diff_text, profile_text
    from optpipe.trace.findings.report import document_from_profile
    from optpipe.trace.timeline.kernels import short_name
    from optpipe.workspace.store import Store

    if sum(given is not None for given in (model, trace, diff)) != 1:
        raise BadInputError("give one of: MODEL to record a profile, --trace FILE to judge one, --diff BEFORE AFTER")
    if redacted is not None and trace is None:
        raise BadInputError(f"--redacted {redacted}: it needs --trace FILE, the recording to redact")
    if model is None and context is not None and (given := _only_for_models(context)):
        raise BadInputError(
            f"{given}: only for a MODEL to record; a recording that exists takes --range, --redacted and --json"
        )
    with Terminal() as terminal:
        if diff is not None:
            compared = diff_recordings(*diff, range, terminal).document()
            return Outcome(compared, lambda: diff_text(compared, short_name))
        if trace is not None:
            if redacted is not None:
                redact_recording(trace, redacted, terminal)
            document = document_from_profile(profile_recording(trace, range, terminal))
            return Outcome(document, lambda: profile_text(document, short_name))
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
            stages=_stages(stage),
            batch_sizes=_batch_sizes(batch_size),
            iterations=iterations,
            warm_up=warm_up,
            tracer=_tracer(tracer),
            capture=_capture_options(record, osrt=osrt),
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

    from optpipe.build.build import build
    from optpipe.core.card import card_from_file
    from optpipe.inputs.images import find_images
    from optpipe.profile.profile_model import preprocess_images, profile_model, require_profilable
    from optpipe.reporters.terminal_profile import profiles_text
    from optpipe.trace.timeline.kernels import short_name
    from optpipe.workspace.file_names import CARD
    from optpipe.workspace.manifest import command_line

    require_profilable(plan)
    if builds.images is not None:
        find_images(builds.images)  # a folder without images is refused before the build, which may take minutes
    built = build(wanted, builds, store, terminal)
    device = builds.device or next(
        (each.entry.info["device"] for each in built.artifacts if each.why_not is None), "cpu"
    )
    weights = {"weights": "random"} if built.fallback_reason else {}
    plan = replace(
        plan,
        model={**plan.model, "device": device, **weights},
        images=preprocess_images(card_from_file(built.model.file(CARD)), builds.images, max(plan.batch_sizes)),
    )
    result = profile_model(plan, built.artifacts, built.model, store, terminal, shlex.split(command_line()))
    document = {
        **(result.main or {}),
        "stage": (result.main or {}).get("name"),
        "stages": list(result.stages),
        "not_run": [{"artifact": e.entry.id, "why_not": e.why_not} for e in built.artifacts if e.why_not],
        "run_dir": str(result.run_dir),
        "warnings": terminal.warnings,
    }
    return Outcome(document, lambda: profiles_text(document, short_name), result.status)


def _only_for_models(context: typer.Context) -> str:
    """The options on the command line that say how to record, as they are typed."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]  # type: ignore[union-attr]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in _OF_RECORDINGS)


def _capture_options(record: str, *, osrt: bool) -> "CaptureOptions":
    from optpipe.trace.recording.capture import CaptureOptions

    words = _words(record, ("memory", "gpu-metrics", "python"), "--record") if record else ()
    return CaptureOptions(
        os_runtime=osrt,
        memory_use="memory" in words,
        gpu_metrics="gpu-metrics" in words,
        python_sampling="python" in words,
    )


def _stages(text: str) -> tuple[str, ...]:
    from optpipe.profile.profile_model import STAGES

    return _words(text, STAGES, "--stage")


def _tracer(text: str) -> str:
    return _words(text, ("nsys", "torch"), "--tracer")[0]


def _words(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    from optpipe.errors import BadInputError

    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words or not set(words) <= set(known):
        raise BadInputError(f"{option} {text}: give {'one or more' if len(known) > 2 else 'one'} of {', '.join(known)}")
    return words


def _batch_sizes(text: str) -> tuple[int, ...]:
    from optpipe.errors import BadInputError

    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadInputError(f"--batch-size {text}: give whole numbers from 1, separated by commas, such as 1,64")
    return sizes
