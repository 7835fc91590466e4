"""`optpipe profile`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.groups import Outcome
from optpipe.cli.options import (
    CalibrationOptions,
    ModelOptions,
    TargetOptions,
    build_plan_from_options,
    model_from_options,
)
from optpipe.core.plan import Param, list_words
from optpipe.trace.nsys import ProfilePlan

if TYPE_CHECKING:
    from optpipe.build.build import BuildPlan
    from optpipe.cli.terminal import Terminal
    from optpipe.core.entries import Device
    from optpipe.workspace.store import Store


def profile(
    store: "Store",
    terminal: "Terminal",
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="As for `optpipe build`; omit with --trace and --diff.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        Param(
            "Analyze an existing recording: .nsys-rep, its .sqlite export, or a profile folder.",
            metavar="FILE",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None, Param("Compare two recordings by kernel and by layer.", metavar="BEFORE AFTER")
    ] = None,
    range: Annotated[str | None, Param("Analyze only work launched in this NVTX range.", metavar="NAME")] = None,
    targets: TargetOptions = TargetOptions(),
    shapes: ModelOptions = ModelOptions(),
    ranges: CalibrationOptions = CalibrationOptions(),
    capture: ProfilePlan = ProfilePlan(),
) -> Outcome:
    """Profile each stage with nsys; find the bottleneck."""
    from optpipe.core.errors import BadInputError
    from optpipe.trace.document import document_from_diff, document_from_profile
    from optpipe.trace.profile_model import diff_recordings, profile_recording

    if sum(given is not None for given in (model, trace, diff)) != 1:
        raise BadInputError("specify exactly one of MODEL (record), --trace FILE (analyze), or --diff BEFORE AFTER")
    given = [word for each in (targets, shapes, ranges, capture) for word in list_words(each)]
    if model is None and given:
        raise BadInputError(f"{' '.join(given)}: valid only with MODEL; existing recordings accept --range and --json")
    if diff is not None:
        return Outcome(diff_recordings(*diff, range, terminal), document_from_diff)
    if trace is not None:
        return Outcome(profile_recording(trace, range, terminal), document_from_profile)
    assert model is not None
    builds = build_plan_from_options(targets, ranges, batch=shapes.batch, images=capture.images)
    return _profile_model(model, shapes, builds, capture, store, terminal)


def _profile_model(
    text: str, shapes: ModelOptions, builds: "BuildPlan", capture: ProfilePlan, store: "Store", terminal: "Terminal"
) -> Outcome:
    from optpipe.core.card import card_from_file
    from optpipe.core.errors import ExitStatus
    from optpipe.models.artifacts.lookup import require_card_lengths
    from optpipe.models.export.exported import prepare_model, read_card
    from optpipe.models.inputs.image_set import find_images
    from optpipe.trace.document import document_from_stages
    from optpipe.trace.nsys import find_nsys
    from optpipe.trace.profile_model import build_or_find, choose_preprocess_images, profile_model
    from optpipe.trace.record import BuildJob
    from optpipe.workspace.file_names import CARD

    model = model_from_options(text, shapes, store)
    find_nsys()
    if capture.length is not None:  # reject it before the build too
        model, stored = prepare_model(model, store, terminal)
        card = read_card(model, stored)
        wider = card.format_wider_shapes(capture.length)
        require_card_lengths(card, capture.length, card.name, f"widen it with {wider}")
    if builds.images is not None:
        find_images(builds.images)  # a build may take minutes: reject a folder without images first
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
    images = choose_preprocess_images(card_from_file(built.model.file(CARD)), builds.images, max(capture.batch_size))
    found = profile_model(capture, built.artifacts, built.model, store, terminal, builds.options, again, images)
    return Outcome(found, document_from_stages, ExitStatus.STAGE_FAILED if found.failed else ExitStatus.DONE)
