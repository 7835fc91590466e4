"""From a model to verified artifacts: export, reference, precision, build, proof, verification."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.backends.base import Backend, Device
from optpipe.build.artifact import build_artifact
from optpipe.build.combinations import (
    find_given_precision,
    find_obstacle,
    list_combinations,
    list_replaced,
    reads_graph,
    require_buildable,
    require_sound_plan,
)
from optpipe.build.given_data import add_data, add_example, find_calibration_samples
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.build.verified_artifact import verify_artifact
from optpipe.build.verify import Trajectory, parse_steps, read_trajectory
from optpipe.core.entries import ArtifactInfo, GraphInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.errors import (
    BadInputError,
    ExitStatus,
    MissingError,
    OptpipeError,
    StageError,
    first_line,
)
from optpipe.core.events import Listener, Steps, advance_steps, finish_steps, run_step
from optpipe.core.precision import BUDGETED, CALIBRATED, Precision
from optpipe.core.wording import Argument, join_texts
from optpipe.evaluate.tasks import require_fitting_task
from optpipe.models.artifacts.decisions import Omission
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    prepare_model,
    reference_from_file,
)
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.precision_graph import convert_to_precision
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import ONNX, REFERENCE, make_file_name
from optpipe.workspace.files import hold_lock, write_bytes
from optpipe.workspace.store import NOTES, Store


def build_model(model: Model, plan: BuildPlan, store: Store, listener: Listener) -> ModelBuild:
    """Builds and verifies every combination in `plan`; a failed one does not stop the others. Raises what export raises."""
    plan = _check_plan(model, plan, listener)
    store.require_writable()
    model, stored = prepare_model(add_example(model, plan), store, listener)
    _require_evaluable(model, stored, store)
    plan, omitted = add_data(model, plan, stored, store, listener)

    exported = run_step("export", listener, export_model, model, store, listener, stored)
    _require_evaluable(model, exported, store)
    reference = run_step(
        "reference",
        listener,
        compute_reference,
        model,
        exported,
        plan.images,
        store,
        listener,
        find_calibration_samples(plan),
        truncate=plan.truncate,
    )
    context = BuildContext(
        model=model,
        plan=plan,
        exported=exported,
        reference=reference,
        trajectory=_read_trajectory(model, plan, exported, reference),
        store=store,
        listener=listener,
    )
    result = ModelBuild(
        exported, model.fallback_reason, failed=omitted, replaced=list_replaced(plan)
    )
    _run_side_by_side(
        [
            _add_build(result, context, *combination)
            for combination in list_combinations(plan, listener)
        ],
        plan.gpu_lock,
    )
    return result


def _check_plan(model: Model, plan: BuildPlan, listener: Listener) -> BuildPlan:
    """`plan`, refused before anything runs if nothing can come of it, with the precision that the model comes in."""
    require_sound_plan(plan, listener)
    plan = replace(plan, given=find_given_precision(model, plan))
    if plan.steps is not None:
        parse_steps(plan.steps)

    require_buildable(model, plan, listener)
    if plan.budget is not None and not set(BUDGETED) & set(plan.precisions):
        raise BadInputError(
            Argument("budget")
            + f" applies to {', '.join(BUDGETED)}; add one of them to "
            + Argument("precision")
        )
    return plan


def _read_trajectory(
    model: Model, plan: BuildPlan, exported: Entry[ModelInfo], reference: Entry[ReferenceInfo]
) -> Trajectory | None:
    """The source model's states of `--steps`; None without it."""
    if plan.steps is None:
        return None
    tensors = reference_from_file(reference.file(REFERENCE))
    source = model.load().onnx or exported.file(ONNX)
    return read_trajectory(plan.steps, read_stored_card(exported), tensors, source)


def _run_side_by_side(builds: Sequence[Steps[bool]], gpu_lock: Path | None) -> None:
    """Finishes the builds in turn; with a lock all are begun before the first is finished, and compile meanwhile."""
    if gpu_lock is not None:
        with hold_lock(gpu_lock):  # compilers of the first builds do not time kernels meanwhile
            builds = [build for build in builds if not advance_steps(build)]
        builds = [build for build in builds if not advance_steps(build)]

    for build in builds:
        finish_steps(build)


def _require_evaluable(model: Model, stored: Entry[ModelInfo] | None, store: Store) -> None:
    """Raises BadInputError if the model does not fit its task. A model with a reference has passed this check."""
    if stored is None or not any(
        stored.id in reference.manifest.parents for reference in store.list_entries(ReferenceInfo)
    ):
        require_fitting_task(model, stored)


def require_artifacts(built: ModelBuild) -> None:
    """Raises MissingError, BadInputError or StageError with all reasons if nothing could be built."""
    if built.artifacts:
        return
    omitted = (*built.failed, *built.skipped)
    reasons = join_texts("; ", dict.fromkeys(omission.reason for omission in omitted))
    kinds = {ExitStatus.MISSING: MissingError, ExitStatus.BAD_INPUT: BadInputError}
    raise kinds.get(built.status, StageError)("no artifact could be built: " + reasons)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What the builds of a model share: the graph, the reference that they are compared with, and the store."""

    model: Model
    plan: BuildPlan
    exported: Entry[ModelInfo]
    reference: Entry[ReferenceInfo]
    trajectory: Trajectory | None
    store: Store
    listener: Listener

    def convert(
        self, backend: Backend, precision: Precision, device: Device
    ) -> Entry[ModelInfo] | Entry[GraphInfo]:
        """The graph that the backend is given: in `precision` if it reads the layers' types there, as exported otherwise."""
        if not (reads_graph(backend, precision) or self.exported.info.own_precision is not None):
            return self.exported
        return run_step(
            f"graph {precision} for {device}",
            self.listener,
            convert_to_precision,
            precision,
            device,
            self.exported,
            self.reference,
            self.plan.calibration,
            self.store,
            self.listener,
            budget=self.plan.budget,
            half=not backend.needs_module,  # torch takes only the layers from the graph
            form=backend.qdq_form(precision, device) if precision in CALIBRATED else None,
            recover=self.plan.recover,
        )

    def build(
        self,
        backend: Backend,
        precision: Precision,
        device: Device,
        graph: Entry[ModelInfo] | Entry[GraphInfo],
    ) -> Steps[Entry[ArtifactInfo]]:
        """Builds in the steps of the backend, each of which is a step of progress."""
        building = build_artifact(
            backend,
            precision,
            device,
            graph,
            self.exported,
            self.model.fresh_module,
            self.plan.options.get(backend.name, {}),
            self.store,
            self.listener,
            gpu_lock=self.plan.gpu_lock,
            reference=self.reference,
        )
        for part in ("build", "compile", "finish"):
            with self.listener.step(f"{part} {backend.name} {precision}") as step:
                if (made := advance_steps(building)) and made[1]:
                    step.cached()
            if made:
                return made[0]
            yield
        raise AssertionError(f"{backend.name} pauses a build more than twice")

    def verify(self, artifact: Entry[ArtifactInfo], backend: Backend) -> Entry[VerificationInfo]:
        """Compares its outputs with the reference."""
        return run_step(
            f"verify {backend.name} {artifact.info.precision}",
            self.listener,
            verify_artifact,
            artifact,
            self.reference,
            self.exported,
            backend,
            self.store,
            self.listener,
            minimum_snr_db=self.plan.minimum_snr_db,
            trajectory=self.trajectory,
        )


def _add_build(
    result: ModelBuild,
    context: BuildContext,
    backend: Backend,
    precision: Precision,
    device: Device,
) -> Steps[bool]:
    """Adds the build, or why there is none, to `result`. Pauses as the backend does; at the end returns True."""

    def omit(reason: str, status: ExitStatus) -> Omission:
        return Omission(backend.name, str(precision), reason, status)

    try:
        obstacle = find_obstacle(context.model, context.plan, backend, precision, device)
        if obstacle is not None:
            omitted = result.failed if context.plan.named else result.skipped
            omitted.append(omit(obstacle, ExitStatus.MISSING))
            return True

        graph = context.convert(backend, precision, device)
        artifact = yield from context.build(backend, precision, device, graph)
        for remark in artifact.info.remarks:
            context.listener.warn(f"{artifact.info.label}: {remark}")
        blocker = backend.find_run_blocker(artifact.info)
        verification = None if blocker is not None else context.verify(artifact, backend)
    except OptpipeError as error:
        result.failed.append(omit(error.message, error.exit_status))
        return True
    except Exception as error:  # noqa: BLE001 - a library's or a bug's; others are still built
        reason = _record_failure(
            error, context.exported.info.name, backend, precision, context.store
        )
        result.failed.append(omit(reason, ExitStatus.STAGE_FAILED))
        return True

    result.artifacts.append(
        BuiltArtifact(
            artifact,
            verification,
            blocker,
            graph.info.kept if isinstance(graph.info, GraphInfo) else (),
            required_share=context.plan.required_share,
        )
    )
    return True


def _record_failure(
    error: Exception, model: str, backend: Backend, precision: Precision, store: Store
) -> str:
    """The two-line reason for an error that nobody foresaw; its traceback is kept in the workspace, to be reported."""
    name = make_file_name(f"failed-{model}-{backend.name}-{precision}.log")
    path = store.own_folder(NOTES) / name
    problem = f"unexpected {type(error).__name__}: {first_line(error)}"
    try:
        write_bytes(path, "".join(traceback.format_exception(error)).encode(errors="replace"))
    except OptpipeError as reason:
        return f"{problem}\nits traceback could not be kept: {first_line(reason)}"
    return f"{problem}\nits traceback is in {path}; report it with the model, or leave this candidate out"
