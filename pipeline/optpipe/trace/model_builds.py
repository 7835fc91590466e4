"""The builds whose stages are profiled: built, or found in the store, and how their build can be repeated."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.build.build import build_model, require_artifacts
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.core.card import ModelCard
from optpipe.core.entries import Device, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.measure.targets import find_targets
from optpipe.models.artifacts.lookup import StoredArtifact, find_artifacts
from optpipe.models.export.exported import Model
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.samples import SAMPLE_COUNT, choose_samples
from optpipe.models.stored_card import read_stored_card
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store


def choose_preprocess_images(
    card: ModelCard, folder: Path | None, batch_size: int
) -> tuple[Path, ...]:
    """Images of `folder`, or the model's samples, at least a batch of them; none for a model without images."""
    if card.transform is None:
        return ()
    drawn = choose_samples(card, folder).drawn
    files = drawn.paths[: max(batch_size, SAMPLE_COUNT)] if isinstance(drawn, ImageSet) else ()
    return files * -(-batch_size // len(files)) if files else ()


def build_or_find(
    text: str, model: Model, plan: BuildPlan, store: Store, listener: Listener
) -> ModelBuild:
    """INT8 artifacts without calibration data come from the store if it has any. Raises the errors of building."""
    stored: tuple[StoredArtifact, ...] = ()
    if plan.calibration is None and Precision.INT8 in plan.precisions:
        with suppress(BadInputError):  # the store has none
            stored = find_artifacts(
                text,
                store,
                (Precision.INT8,),
                [backend.name for backend in plan.backends],
                plan.device,
            )
    entries = [artifact.entry for artifact in stored]
    artifacts = [
        BuiltArtifact(entry, None, BACKENDS[entry.info.backend].find_run_blocker(entry.info))
        for entry in entries
    ]
    precisions = tuple(
        precision for precision in plan.precisions if precision is not Precision.INT8 or not stored
    )
    if not precisions:
        return ModelBuild(stored[0].model, None, artifacts)
    built = build_model(model, replace(plan, precisions=precisions), store, listener)
    built.artifacts += artifacts
    require_artifacts(built)
    return built


def can_calibrate(plan: BuildPlan, model: Entry[ModelInfo]) -> bool:
    """Whether all of `plan` can be built again: INT8 of the store may have been calibrated on data that are not given now."""
    if Precision.INT8 not in plan.precisions or model.info.own_precision is not None:
        return True
    return plan.calibration is not None or "calibration" in read_stored_card(model).data


def find_build_by_id(
    text: str,
    store: Store,
    listener: Listener,
    *,
    precision: str | None = None,
    backend: str | None = None,
    device: Device | None = None,
) -> ModelBuild:
    """The stored builds that the ID `text` means, as `bench` finds them; nothing is built.

    Raises BadInputError if there is none of that precision, backend, and device.
    """
    ((first, *others),) = find_targets(
        [text], store, listener, precision=precision, backend=backend, device=device
    )
    artifacts = [BuiltArtifact(stored.entry, None, None) for stored in (first, *others)]
    return ModelBuild(first.model, None, artifacts)


def plan_from_builds(plan: BuildPlan, artifacts: Sequence[BuiltArtifact]) -> BuildPlan:
    """`plan` for the precisions, backends, and device of stored builds."""
    precisions = dict.fromkeys(Precision(artifact.entry.info.precision) for artifact in artifacts)
    backends = dict.fromkeys(artifact.entry.info.backend for artifact in artifacts)
    return replace(
        plan,
        precisions=tuple(precisions),
        backends=tuple(BACKENDS[name] for name in backends),
        automatic=False,
        device=artifacts[0].entry.info.device,
    )
