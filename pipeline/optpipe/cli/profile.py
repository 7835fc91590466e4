"""`optpipe profile`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import DEFAULT_WORKSPACE, PRECISION_METAVAR, complete_backend, complete_precision
from optpipe.core import plan as params
from optpipe.core.entries import Device
from optpipe.core.plan import Param
from optpipe.trace.nsys import Extra
from optpipe.trace.ranges import Stage

if TYPE_CHECKING:
    from optpipe.cli.terminal import Terminal
    from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """A recording that exists."""

    trace: Annotated[
        Path | None,
        Param(
            "Analyze an existing recording: .nsys-rep, its .sqlite export, a torch.profiler .json, or a profile folder.",
            metavar="FILE",
        ),
    ] = None
    diff: Annotated[
        tuple[Path, Path] | None, Param("Compare two recordings by kernel and by layer.", metavar="BEFORE AFTER")
    ] = None
    range: Annotated[str | None, Param("Analyze only work launched in this NVTX range.", metavar="NAME")] = None
    redacted: Annotated[
        Path | None,
        Param("With --trace: write a shareable .sqlite export without the process environment.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Which builds of MODEL."""

    precision: Annotated[
        str, Param("As for `optpipe build`.", metavar=PRECISION_METAVAR, complete=complete_precision)
    ] = "fp16"
    backend: Annotated[str, Param("As for `optpipe build`.", metavar="NAME[,…]", complete=complete_backend)] = "auto"
    device: Annotated[Device | None, Param("Default: the best available for each backend.")] = None
    batch: Annotated[
        str | None, Param("Batch range of the optimization profile, or one fixed size.", metavar="MIN:OPT:MAX")
    ] = None
    shape: Annotated[tuple[str, ...], Param("As for `optpipe build`.", metavar="NAME=MIN:OPT:MAX")] = ()
    weights: Annotated[str, params.WEIGHTS] = "default"
    images: Annotated[Path | None, Param("Images to preprocess, also used as in `build --images`.", metavar="DIR")] = (
        None
    )
    calibration: Annotated[
        Path | None, Param("As for `optpipe build`; without it, stored INT8 builds are used.", metavar="PATH")
    ] = None
    truncate: Annotated[bool, replace(params.TRUNCATE, setting=True)] = False
    option: Annotated[
        tuple[str, ...],
        Param("Backend option, such as onnxruntime.cuda_graph=true.", metavar="BACKEND.KEY=VALUE"),
    ] = ()


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to record of MODEL, and how."""

    stage: Annotated[tuple[Stage, ...], Param("Stage to profile; repeatable. Default: all.")] = ()
    batch_size: Annotated[
        tuple[int, ...], Param("Batch sizes to run, comma-separated.", metavar="SIZES", parse=params.sizes_from_text)
    ] = (1,)
    length: Annotated[
        tuple[int, ...] | None,
        Param(
            "Sequence lengths: 128, or a list 32,128,512. Default: that of the texts the build was verified on.",
            metavar="TOKENS",
            parse=params.sizes_from_text,
        ),
    ] = None
    iterations: Annotated[int, Param("Recorded iterations of repeated stages.", minimum=2)] = 20
    warm_up: Annotated[int, Param("Warm-up iterations before recording.", minimum=0, setting=True)] = 5
    tracer: Annotated[Literal["nsys", "torch"], Param("Profiler; torch (torch.profiler) records less.")] = "nsys"
    record: Annotated[
        tuple[Extra, ...],
        Param("Also record GPU metrics, or OS calls (large; separates I/O from CPU); repeatable."),
    ] = ()
    keep_raw: Annotated[
        bool,
        Param("Keep the raw recording, which contains the process environment in plain text.", setting=True),
    ] = False


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As for `optpipe build`; omit with --trace and --diff.", show_default=False
        ),
    ] = None,
    recording: RecordingOptions = RecordingOptions(),
    builds: BuildOptions = BuildOptions(),
    capture: CaptureOptions = CaptureOptions(),
    workspace: Path = DEFAULT_WORKSPACE,
) -> Outcome:
    """Profile each stage with nsys; find the bottleneck."""
    from optpipe.cli.terminal import Terminal
    from optpipe.core.errors import BadInputError
    from optpipe.trace.document import document_from_diff, document_from_profile
    from optpipe.trace.files import redact
    from optpipe.trace.profile_model import diff_recordings, profile_recording
    from optpipe.workspace.places import require_writable_file
    from optpipe.workspace.store import Store

    trace, diff = recording.trace, recording.diff
    if sum(given is not None for given in (model, trace, diff)) != 1:
        raise BadInputError("specify exactly one of MODEL (record), --trace FILE (analyze), or --diff BEFORE AFTER")
    if recording.redacted is not None and trace is None:
        raise BadInputError(f"--redacted {recording.redacted} requires --trace FILE")
    if recording.redacted is not None:
        require_writable_file(recording.redacted, "--redacted")
    if model is None and (given := [*params.list_words(builds), *params.list_words(capture)]):
        raise BadInputError(
            f"{' '.join(given)}: valid only with MODEL; existing recordings accept --range, --redacted and --json"
        )
    with Terminal() as terminal:
        if diff is not None:
            compared = diff_recordings(*diff, recording.range, terminal)
            return Outcome(compared, lambda: document_from_diff(compared))
        if trace is not None:
            if recording.redacted is not None:
                with terminal.step(f"redact {trace.name}"):
                    redact(trace, recording.redacted)
            judged = profile_recording(trace, recording.range, terminal)
            return Outcome(judged, lambda: document_from_profile(judged))
        assert model is not None
        return _profile_model(model, builds, capture, Store(workspace), terminal)


def _profile_model(
    text: str, options: BuildOptions, capture: CaptureOptions, store: "Store", terminal: "Terminal"
) -> Outcome:
    """Builds what is to be profiled, or takes it from the store, then profiles it."""
    from optpipe.cli.parsing import build_plan_from_options, model_from_options
    from optpipe.core.card import card_from_file
    from optpipe.core.errors import ExitStatus
    from optpipe.models.artifacts.lookup import require_card_lengths
    from optpipe.models.export.exported import prepare_model, read_card
    from optpipe.models.inputs.images import find_images
    from optpipe.trace.document import document_from_stages
    from optpipe.trace.profile_model import (
        build_or_find,
        choose_preprocess_images,
        profile_model,
        require_profilable,
    )
    from optpipe.trace.record import BuildJob, ProfilePlan
    from optpipe.workspace.file_names import CARD

    model = model_from_options(text, options.weights, options.batch, options.shape, store)
    builds = build_plan_from_options(
        options.precision,
        options.backend,
        options.device,
        options.option,
        images=options.images,
        calibration=options.calibration,
        batch=options.batch,
    )
    builds = replace(builds, truncate=options.truncate)
    stages, batch_sizes, lengths = capture.stage or tuple(Stage), capture.batch_size, capture.length
    require_profilable(capture.tracer)
    if lengths is not None:  # refused before the build too
        model, stored = prepare_model(model, store, terminal)
        card = read_card(model, stored)
        require_card_lengths(card, lengths, card.name, f"widen it with {card.format_wider_shapes(lengths)}")
    if builds.images is not None:
        find_images(builds.images)  # a folder without images is refused before the build, which may take minutes
    built = build_or_find(text, model, builds, store, terminal)
    runnable: list[Device] = [each.entry.info.device for each in built.artifacts if each.why_not is None]
    device = builds.device or (runnable[0] if runnable else "cpu")
    again = BuildJob(
        model=text,
        weights=replace(model.weights, kind="random") if built.fallback_reason else model.weights,
        batch=model.batch,
        shapes=model.shapes,
        precisions=builds.precisions,
        backends=tuple(each.name for each in builds.backends),
        device=device,
        calibration=builds.calibration,
        options=builds.options,
        truncate=builds.truncate,
    )
    plan = ProfilePlan(
        device=device,
        options=builds.options,
        stages=stages,
        build=again,
        batch_sizes=batch_sizes,
        lengths=lengths,
        iterations=capture.iterations,
        warm_up=capture.warm_up,
        tracer=capture.tracer,
        extras=frozenset(capture.record),
        keep_raw=capture.keep_raw,
        images=choose_preprocess_images(card_from_file(built.model.file(CARD)), builds.images, max(batch_sizes)),
    )
    found = profile_model(plan, built.artifacts, built.model, store, terminal)
    document = replace(found, warnings=tuple(terminal.warnings))
    status = ExitStatus.STAGE_FAILED if document.failed else ExitStatus.DONE
    return Outcome(document, lambda: document_from_stages(document), status)
