"""From a model to verified artifacts: export, reference, precision, build, proof, verification, in this order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from optpipe.backends.base import Backend, Device
from optpipe.backends.registry import choose_device
from optpipe.build.artifact import build_artifact
from optpipe.build.verify import verify_artifact
from optpipe.core.card import card_from_file
from optpipe.core.events import Listener
from optpipe.core.precision import Precision
from optpipe.errors import BadInputError, ExitStatus, MissingError, OptpipeError, StageError
from optpipe.export.exported import compute_reference, export_model, prepare_model
from optpipe.export.model import Model
from optpipe.inputs.tensor_set import holds_tensors, read_tensor_set, save_batches
from optpipe.quantize.calibrate import require_calibration
from optpipe.quantize.int8 import find_int8_tables
from optpipe.quantize.precision_graph import convert_to_precision
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Entry, Store


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What to build."""

    precisions: tuple[Precision, ...]
    backends: tuple[Backend, ...]
    named: bool
    """Whether the backends were named one by one: then one that is missing is an error, not a skip."""
    automatic: bool = False
    """Whether optpipe chose the backends: then one without kernels for a precision is built in FP32 beside, and says so."""
    device: Device | None = None
    images: Path | None = None
    calibration: Path | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by backend name."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """One step of a build."""

    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True, slots=True)
class BuiltArtifact:
    """One artifact with the outcome of its verification, or the reason why it could not be run here."""

    entry: Entry
    verification: Entry | None
    why_not: str | None

    @property
    def passed(self) -> bool:
        """Precision proven and, where it could run and there was something to compare, outputs verified."""
        proven = bool(self.entry.info["precision_proof"]["proven"])
        return proven and (self.verification is None or self.verification.info["passed"] is not False)


@dataclass(frozen=True, slots=True)
class Omission:
    """A combination that was asked for and is not there."""

    backend: str
    precision: str
    reason: str
    status: ExitStatus


@dataclass
class ModelBuild:
    """What a build has come to so far."""

    model: Entry
    fallback_reason: str | None
    artifacts: list[BuiltArtifact] = field(default_factory=list)
    skipped: list[Omission] = field(default_factory=list)
    """Cannot be had here or at all, and nobody insisted."""
    failed: list[Omission] = field(default_factory=list)
    stages: list[StageTime] = field(default_factory=list)

    @property
    def status(self) -> ExitStatus:
        """The worst of what happened; a build without any artifact is never DONE."""
        statuses = [each.status for each in self.failed]
        if any(not each.passed for each in self.artifacts):
            statuses.append(ExitStatus.FAIL)
        if not self.artifacts and not statuses:
            statuses = [each.status for each in self.skipped]
        order = (ExitStatus.STAGE_FAILED, ExitStatus.MISSING, ExitStatus.BAD_INPUT, ExitStatus.FAIL)
        return next((status for status in order if status in statuses), ExitStatus.DONE)


def build_model(model: Model, plan: BuildPlan, store: Store, listener: Listener) -> ModelBuild:
    """Builds and verifies every combination in `plan`; one that fails does not stop the others.

    Raises what export raises: without an exported model there is nothing to build.
    """
    times: list[StageTime] = []
    _require_available(plan)
    _require_known_options(plan)
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    plan = _add_calibration(model, plan, stored, store, listener)
    exported = _run_step("export", times, listener, lambda: export_model(model, store, listener, stored))
    expected = _run_step(
        "reference", times, listener, lambda: compute_reference(model, exported, plan.images, store, listener)
    )
    result = ModelBuild(exported, model.fallback_reason, stages=times)
    for backend, precision, device in _list_combinations(plan, listener):
        _build_one(result, model, plan, backend, precision, device, expected, store, listener)
    return result


def _add_calibration(
    model: Model, plan: BuildPlan, stored: Entry | None, store: Store, listener: Listener
) -> BuildPlan:
    """`plan` with the calibration data of the model's own file, and those that were given held against its inputs.

    Raises BadInputError before anything is exported where INT8 is wanted and there is nothing to calibrate on.
    """
    if Precision.INT8 not in plan.precisions or not any(
        Precision.INT8 in backend.precisions(choose_device(backend, plan.device)) for backend in plan.backends
    ):
        return plan
    card = card_from_file(stored.file(CARD)) if stored else model.load().card
    if plan.calibration is not None:
        if holds_tensors(plan.calibration):
            read_tensor_set(plan.calibration, card.inputs)
        return plan
    if "calibration" in card.data or (stored and stored.info["own_precision"]) or model.is_quantized():
        return plan
    if (given := model.load().calibration) is not None:
        with listener.step("calibration data of the model's file"):
            return replace(plan, calibration=save_batches(given(), store.workspace / "calibration"))
    if stored and (tables := find_int8_tables(stored, store)):
        listener.warn(f"{card.name} is built in int8 as it was calibrated before; --calibration gives other data")
        return replace(plan, calibration=tables[-1])
    require_calibration(card)
    return plan


def require_artifacts(built: ModelBuild) -> None:
    """Raises MissingError, BadInputError or StageError with the reasons of all where nothing could be built."""
    if built.artifacts:
        return
    reasons = "; ".join(dict.fromkeys(each.reason for each in (*built.failed, *built.skipped)))
    kinds = {ExitStatus.MISSING: MissingError, ExitStatus.BAD_INPUT: BadInputError}
    raise kinds.get(built.status, StageError)(f"no artifact could be built: {reasons}")


def _list_combinations(plan: BuildPlan, listener: Listener) -> list[tuple[Backend, Precision, Device]]:
    """What to build, precision by precision, each combination once."""
    wanted: dict[tuple[Backend, Precision, Device], None] = {}  # an ordered set
    for precision in plan.precisions:
        for backend in plan.backends:
            device = choose_device(backend, plan.device)
            wanted[backend, _choose_precision(plan, backend, precision, device, listener), device] = None
    return list(wanted)


def _choose_precision(
    plan: BuildPlan, backend: Backend, precision: Precision, device: Device, listener: Listener
) -> Precision:
    """What a backend that optpipe chose itself is built in: FP32 where it has no kernels for `precision`, said aloud."""
    if not plan.automatic or precision in backend.precisions(device):
        return precision
    listener.warn(
        f"{backend.name} has no {precision} kernels on {device}; building its artifact in fp32 instead, as a baseline"
    )
    return Precision.FP32


def _require_available(plan: BuildPlan) -> None:
    """Fails at once, before any work, where a backend or device that was named is not here."""
    if not plan.named and plan.device is None:
        return
    for backend in plan.backends:
        if plan.device is not None and plan.device not in backend.devices():
            continue
        capability = backend.probe_capability(choose_device(backend, plan.device))
        if plan.named and not capability.builds:
            install = f"; {capability.install}" if capability.install else ""
            raise MissingError(f"backend {backend.name} cannot build on this machine: {capability.why_not}{install}")


def _require_known_options(plan: BuildPlan) -> None:
    """Fails at once, before any work, for an option that its backend does not have, or not with that value."""
    for backend in plan.backends:
        if given := plan.options.get(backend.name):
            backend.recipe(choose_device(backend, plan.device), given)


def _build_one(
    result: ModelBuild,
    model: Model,
    plan: BuildPlan,
    backend: Backend,
    precision: Precision,
    device: Device,
    expected: Entry,
    store: Store,
    listener: Listener,
) -> None:
    if (reason := _find_obstacle(model, plan, backend, precision, device)) is not None:
        omission = Omission(backend.name, str(precision), reason, ExitStatus.MISSING)
        (result.failed if plan.named else result.skipped).append(omission)
        return
    name = f"{backend.name} {precision}"
    options = plan.options.get(backend.name, {})
    try:
        graph = _run_step(
            f"graph {precision} for {device}",
            result.stages,
            listener,
            lambda: convert_to_precision(precision, device, result.model, expected, plan.calibration, store, listener),
        )
        entry = _run_step(
            f"build {name}",
            result.stages,
            listener,
            lambda: build_artifact(
                backend, precision, device, graph, result.model, model.fresh_module, options, store, listener
            ),
        )
        why_not = backend.find_run_blocker(entry.info, device)
        checked = None
        if why_not is None:
            checked = _run_step(
                f"verify {name}",
                result.stages,
                listener,
                lambda: verify_artifact(entry, expected, result.model, backend, device, store, listener),
            )
    except OptpipeError as error:
        result.failed.append(Omission(backend.name, str(precision), str(error), error.exit_status))
        return
    result.artifacts.append(BuiltArtifact(entry, checked, why_not))


def _find_obstacle(model: Model, plan: BuildPlan, backend: Backend, precision: Precision, device: Device) -> str | None:
    if plan.device is not None and plan.device not in backend.devices():
        return f"does not support {plan.device}"
    capability = backend.probe_capability(device)
    if not capability.builds:
        return f"{capability.why_not}" + (f"; {capability.install}" if capability.install else "")
    if precision not in backend.precisions(device):
        return f"has no {precision} kernels on {device}"
    if backend.needs_module and not model.source.has_module:
        return "requires a PyTorch module, but this model is an ONNX file"
    return None


def _run_step(name: str, times: list[StageTime], listener: Listener, work: Callable[[], tuple[Entry, bool]]) -> Entry:
    started = monotonic()
    with listener.step(name) as step:
        entry, cached = work()
        if cached:
            step.cached()
    times.append(StageTime(name, round(monotonic() - started, 3), cached))
    return entry


def record_from_artifact(built: BuiltArtifact) -> dict[str, Any]:
    """The JSON form of one artifact."""
    info = built.entry.info
    file = info["file"]
    return {
        "id": built.entry.id,
        "backend": info["backend"],
        "precision": info["precision"],
        "device": info["device"],
        "path": str(built.entry.file(file)),
        "sha256": built.entry.sha256(file),
        "size_bytes": built.entry.manifest.files[file].size_bytes,
        "build_seconds": built.entry.manifest.seconds,
        "runnable_here": built.why_not is None,
        "why_not": built.why_not,
        "precision_share": info["precision_proof"]["share"],
        "precision_proof": {
            key: info["precision_proof"][key] for key in ("proven", "reason", "others", "others_count")
        },
        "lint": dict(info.get("lint", {})),
        "parity": dict(built.verification.info) if built.verification else None,
    }


def document_from_build(result: ModelBuild, requested_weights: str, warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `optpipe build`."""
    weights = dict(result.model.info["weights"])
    return {
        "model": result.model.info["name"],
        "source": result.model.info["source"],
        "model_id": result.model.id,
        "weights": {**weights, "requested": requested_weights, "fallback_reason": result.fallback_reason},
        "artifacts": [record_from_artifact(each) for each in result.artifacts],
        "skipped": [_record_from_omission(each) for each in result.skipped],
        "failed": [_record_from_omission(each) for each in result.failed],
        "stages": [{"name": each.name, "seconds": each.seconds, "cached": each.cached} for each in result.stages],
        "warnings": list(warnings),
        "exit_status": int(result.status),
    }


def _record_from_omission(each: Omission) -> dict[str, Any]:
    return {"backend": each.backend, "precision": each.precision, "reason": each.reason}
