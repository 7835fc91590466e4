"""Profiles a model that a user names: finds or makes the builds, and repeats their build under nsys."""

from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.build.plan import BuildPlan
from optpipe.build.records import ModelBuild
from optpipe.core.events import Listener
from optpipe.core.wording import Argument
from optpipe.models.artifacts.profile_sizes import require_card_lengths
from optpipe.models.export.exported import Model, prepare_model, read_card
from optpipe.models.inputs.image_set import find_images
from optpipe.models.stored_card import read_stored_card
from optpipe.trace.model_builds import (
    build_or_find,
    can_calibrate,
    choose_preprocess_images,
    find_build_by_id,
    plan_from_builds,
)
from optpipe.trace.nsys import ProfilePlan, Stage, find_nsys
from optpipe.trace.profile_model import profile_model
from optpipe.trace.record import BuildJob
from optpipe.trace.report import ModelProfileDocument
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A model, the builds that are asked for, and what is recorded of them."""

    text: str
    """The MODEL as the user gave it."""
    model: Model
    builds: BuildPlan
    precision: str | None
    """The precisions and backends as the user gave them, which choose among stored builds if `text` is an ID."""
    backend: str | None
    capture: ProfilePlan


def profile_named_model(
    request: ProfileRequest,
    store: Store,
    listener: Listener,
    *,
    against: Path | None = None,
    output: Path | None = None,
) -> ModelProfileDocument:
    """Profiles every stage that is asked for. Raises what building and `profile_model` raise, before the build where it can."""
    find_nsys()
    request = _check_request(request, store, listener)
    request, built = _find_builds(request, store, listener)
    capture, builds = request.capture, request.builds
    images = choose_preprocess_images(
        read_stored_card(built.model), builds.images, max(capture.batch_size)
    )
    return profile_model(
        capture,
        built.artifacts,
        built.model,
        store,
        listener,
        builds.options,
        _repeat_build(request, built, store),
        images,
        against=against,
        output=output,
    )


def _check_request(request: ProfileRequest, store: Store, listener: Listener) -> ProfileRequest:
    """Refuses lengths and a folder that do not fit before a build, which may take minutes."""
    model, lengths = request.model, request.capture.length
    if lengths is not None:
        model, stored = prepare_model(model, store, listener)
        card = read_card(model, stored)
        wider = Argument("shape", card.widen_shapes(lengths))
        require_card_lengths(card, lengths, card.name, "widen it with " + wider)

    if request.builds.images is not None:
        find_images(request.builds.images)
    return replace(request, model=model)


def _find_builds(
    request: ProfileRequest, store: Store, listener: Listener
) -> tuple[ProfileRequest, ModelBuild]:
    """The builds, made if the model is not an ID, and the request without stages that cannot be recorded of them."""
    capture, builds = request.capture, request.builds
    if request.model.exported is None:
        built = build_or_find(request.text, request.model, builds, store, listener)
        is_repeatable = can_calibrate(builds, built.model)
        if not capture.stage and not is_repeatable:
            listener.warn(
                Argument("calibration")
                + " is not given: the stored INT8 build is profiled, but not how it is built"
            )
    else:
        built = find_build_by_id(
            request.text,
            store,
            listener,
            precision=request.precision,
            backend=request.backend,
            device=builds.device,
        )
        builds = plan_from_builds(builds, built.artifacts)
        is_repeatable = False  # the build is done

    if not capture.stage and not is_repeatable:
        capture = replace(capture, stage=(Stage.INFERENCE, Stage.PREPROCESS))
    return replace(request, builds=builds, capture=capture), built


def _repeat_build(request: ProfileRequest, built: ModelBuild, store: Store) -> BuildJob:
    """The same build, for another process."""
    model, builds = request.model, request.builds
    runs_on = [
        artifact.entry.info.device for artifact in built.artifacts if artifact.why_not is None
    ]
    device = builds.device or next(iter(runs_on), "cpu")
    weights = replace(model.weights, kind="random") if built.fallback_reason else model.weights
    return BuildJob(
        model=request.text,
        workspace=store.workspace.resolve(),
        weights=weights,
        batch=model.batch,
        shapes=model.shapes,
        precisions=builds.precisions,
        backends=tuple(backend.name for backend in builds.backends),
        automatic=builds.automatic,
        device=builds.device,
        on_gpu=device == "cuda",
        calibration=builds.calibration,
        options=builds.options,
        truncate=builds.truncate,
    )
