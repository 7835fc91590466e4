"""From a model to verified artifacts: export, reference, precision, build, proof, verification."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from optpipe.backends.base import Backend, BuildRequest, Device
from optpipe.backends.registry import (
    list_precisions,
    load_artifact,
    name_failing_backend,
    warn_of_unused_options,
)
from optpipe.build.records import BuiltArtifact, ModelBuild
from optpipe.build.verify import Trajectory, parse_steps, read_trajectory, verify_session
from optpipe.core import pl
from optpipe.core.card import ModelCard
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
from optpipe.core.precision import BUDGETED, CALIBRATED, Budget, Precision, prove_precision
from optpipe.core.process import redirect_output
from optpipe.core.wording import Argument, join_texts
from optpipe.evaluate.tasks import TASKS, require_fitting_task
from optpipe.models.artifacts.decisions import Omission
from optpipe.models.artifacts.lookup import hash_engine
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    prepare_model,
    read_card,
    read_tokenizer,
    reference_from_file,
)
from optpipe.models.inputs.rows import split_batches
from optpipe.models.inputs.samples import choose_samples
from optpipe.models.inputs.tensor_files import holds_tensors
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.sources.onnx_file import OnnxFileSource
from optpipe.models.stored_card import read_stored_card
from optpipe.quantize.calibrated_graph import require_calibration, resolve_data
from optpipe.quantize.precision_graph import convert_to_precision
from optpipe.quantize.ranges import is_table
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, pool_errors
from optpipe.workspace.entry import Entry
from optpipe.workspace.environment import get_gpu_name
from optpipe.workspace.file_names import ONNX, OUTPUT_ERRORS, REFERENCE, make_file_name
from optpipe.workspace.files import hold_lock, write_bytes, write_parquet
from optpipe.workspace.store import NOTES, Store


@dataclass(frozen=True, slots=True)
class BuildPlan:
    precisions: tuple[Precision, ...]
    backends: tuple[Backend, ...]
    named: bool
    """Whether the backends were named one by one: a missing one is then an error, not a skip."""
    automatic: bool = False
    """Whether optpipe chose the backends: one without kernels for a precision is then built in FP32, with a warning."""
    device: Device | None = None
    images: Path | None = None
    calibration: Path | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    budget: Budget | None = None
    """The highest cost of FP16, INT8 and FP8; layers that cost more stay out of them."""
    truncate: bool = False
    """Whether calibration texts longer than the model's input are cut."""
    minimum_snr_db: float | None = None
    """The minimum SNR of each output; None for the default of its precision."""
    required_share: float | None = None
    """The minimum share of a build's MACs in its precision; None if the build only states it."""
    recover: tuple[str, ...] = ()
    """The steps of `--recover`, which win accuracy back in INT8."""
    steps: str | None = None
    """`--steps`; None without a trajectory."""
    given: Precision | None = None
    """The precision that a model comes in, if a backend builds that only as it is given."""
    gpu_lock: Path | None = None
    """Given if the builds are measured against each other afterward: compilers in other processes hold its lock while they time
    kernels, and builds go on side by side."""


def build_model(model: Model, plan: BuildPlan, store: Store, listener: Listener) -> ModelBuild:
    """Builds and verifies every combination in `plan`; a failed one does not stop the others. Raises what export raises."""
    require_sound_plan(plan, listener)
    plan = replace(plan, given=_find_given_precision(model, plan))
    if plan.steps is not None:
        parse_steps(plan.steps)
    _require_buildable(model, plan, listener)
    if plan.budget is not None and not set(BUDGETED) & set(plan.precisions):
        raise BadInputError(
            Argument("budget")
            + f" applies to {', '.join(BUDGETED)}; add one of them to "
            + Argument("precision")
        )
    store.require_writable()
    model = _add_example(model, plan)
    model, stored = prepare_model(model, store, listener)
    _require_evaluable(model, stored, store)
    if plan.images is not None:  # reject unreadable data before the export
        card, tokenizer = read_card(model, stored), read_tokenizer(model, stored)
        plan = replace(
            plan,
            images=resolve_data(
                plan.images, card, tokenizer, store, calibrates=False, truncate=plan.truncate
            ),
        )
        if card.tokenization is None:
            choose_samples(card, plan.images)
    omitted: list[Omission] = []
    try:
        plan = add_calibration(model, plan, stored, store, listener)
    except BadInputError as error:
        others = tuple(each for each in plan.precisions if each not in CALIBRATED)
        if plan.calibration is not None or plan.budget is not None or not others:
            raise
        names = ", ".join(each.name for each in plan.backends)
        kinds = [each for each in plan.precisions if each in CALIBRATED]
        omitted = [Omission(names, kind, error.message, ExitStatus.BAD_INPUT) for kind in kinds]
        plan = replace(plan, precisions=others)
    exported = run_step("export", listener, export_model, model, store, listener, stored)
    _require_evaluable(model, exported, store)
    data = None if plan.calibration is None or is_table(plan.calibration) else plan.calibration
    known = model, exported, plan.images, store, listener, data
    expected = run_step("reference", listener, compute_reference, *known, truncate=plan.truncate)
    trajectory = None
    if plan.steps is not None:
        tensors = reference_from_file(expected.file(REFERENCE))
        source = model.load().onnx or exported.file(ONNX)
        trajectory = read_trajectory(plan.steps, read_stored_card(exported), tensors, source)
    result = ModelBuild(
        exported, model.fallback_reason, failed=omitted, replaced=_list_replaced(plan)
    )
    builds = [
        _build_one(result, model, plan, *each, expected, trajectory, store, listener)
        for each in _list_combinations(plan, listener)
    ]
    if plan.gpu_lock is not None:
        with hold_lock(
            plan.gpu_lock
        ):  # compilers of the first builds do not time kernels meanwhile
            builds = [each for each in builds if not advance_steps(each)]
        builds = [each for each in builds if not advance_steps(each)]
    for each in builds:
        finish_steps(each)
    return result


def _find_given_precision(model: Model, plan: BuildPlan) -> Precision | None:
    """The precision that a quantized model comes in, if a backend builds that only for such models; None otherwise."""
    able = {
        kind
        for backend in plan.backends
        for device in backend.devices()
        for kind in backend.precisions_as_given(device)
    }
    if able.isdisjoint(plan.precisions) or model.source.has_module:
        return None
    if model.exported is not None:
        return model.exported.info.own_precision
    return _add_example(model, plan).find_quantization()


def _add_example(model: Model, plan: BuildPlan) -> Model:
    """`model`, an ONNX file's with the given data, whose shapes suggest those of its open dimensions."""
    if not isinstance(model.source, OnnxFileSource):
        return model
    return replace(model, source=replace(model.source, example=plan.images or plan.calibration))


def _list_buildable(plan: BuildPlan, backend: Backend, device: Device) -> frozenset[Precision]:
    """The precisions of a backend, with those that it builds only for a model that comes in them."""
    as_given = backend.precisions_as_given(device)
    return backend.precisions(device) | {kind for kind in as_given if kind is plan.given}


def _require_evaluable(model: Model, stored: Entry[ModelInfo] | None, store: Store) -> None:
    """Raises BadInputError if the model does not fit its task. A model with a reference has passed this check."""
    if stored is None or not any(
        stored.id in each.manifest.parents for each in store.list_entries(ReferenceInfo)
    ):
        require_fitting_task(model, stored)


def add_calibration(
    model: Model, plan: BuildPlan, stored: Entry | None, store: Store, listener: Listener
) -> BuildPlan:
    """`plan` with its calibration data checked against the model's inputs.

    Raises BadInputError before the export if INT8 or FP8 has no calibration data, or a budget is in points and the model's task is
    not evaluated.
    """
    if plan.budget is not None:
        _require_measurable(plan.budget, plan.calibration, read_card(model, stored))
    known = {kind for backend in plan.backends for kind in list_precisions(backend, plan.device)}
    wanted = [kind for kind in CALIBRATED if kind in plan.precisions and kind in known]
    if plan.calibration is None and not wanted:
        return plan
    card = read_card(model, stored)
    if plan.calibration is not None:
        if not wanted and plan.budget is None and plan.gpu_lock is None:
            effect = (
                "has no effect"
                if is_table(plan.calibration)
                else "gives only the inputs that outputs are verified on"
            )
            listener.warn(
                Argument("calibration")
                + f" {effect}: {' and '.join(CALIBRATED)} need it, and neither is built"
            )
        tokenizer = read_tokenizer(model, stored)
        source = resolve_data(
            plan.calibration, card, tokenizer, store, calibrates=True, truncate=plan.truncate
        )
        return replace(plan, calibration=source)
    if (
        "calibration" in card.data
        or (stored and stored.info.own_precision)
        or model.find_quantization()
    ):
        return plan
    require_calibration(card, wanted[0])
    return plan


def _require_measurable(budget: Budget, data: Path | None, card: ModelCard) -> None:
    given = (
        read_tensor_set(data, card.inputs).files if data is not None and holds_tensors(data) else ()
    )
    labeled = any(each.label is not None for each in given)
    if budget.unit == "points" and card.task not in TASKS and not labeled:
        raise BadInputError(
            f"{card.name} cannot be evaluated (task: {card.task}), so no drop can be measured",
            remedy="give a minimum SNR of the outputs instead, such as "
            + Argument("budget", "30dB"),
        )


def require_artifacts(built: ModelBuild) -> None:
    """Raises MissingError, BadInputError or StageError with all reasons if nothing could be built."""
    if built.artifacts:
        return
    omitted = (*built.failed, *built.skipped)
    reasons = join_texts("; ", dict.fromkeys(each.reason for each in omitted))
    kinds = {ExitStatus.MISSING: MissingError, ExitStatus.BAD_INPUT: BadInputError}
    raise kinds.get(built.status, StageError)("no artifact could be built: " + reasons)


def _list_combinations(
    plan: BuildPlan, listener: Listener
) -> list[tuple[Backend, Precision, Device]]:
    """Each combination once, ordered by precision."""
    wanted: dict[tuple[Backend, Precision, Device], None] = {}  # an ordered set
    for precision in plan.precisions:
        for backend in plan.backends:
            device, built = _choose_built(plan, backend, precision)
            if built is None:
                continue
            if built is not precision:
                listener.warn(
                    f"{backend.name} has no {precision} kernels on {device}; building its artifact in fp32 instead, as a baseline"
                )
            wanted[backend, built, device] = None
    return list(wanted)


def _choose_built(
    plan: BuildPlan, backend: Backend, precision: Precision
) -> tuple[Device, Precision | None]:
    """The device, and what is built there: FP32 in place of a precision that a backend chosen by optpipe lacks, nothing in place
    of FP8, which another backend of the plan has."""
    with name_failing_backend(backend):
        device = backend.choose_device(plan.device)
        if not plan.automatic or precision in _list_buildable(plan, backend, device):
            return device, precision
    return device, None if precision is Precision.FP8 else Precision.FP32


def _list_replaced(plan: BuildPlan) -> list[Omission]:
    """The precisions in whose place FP32 is built, as a baseline."""
    found = []
    for precision in plan.precisions:
        for backend in plan.backends:
            device, built = _choose_built(plan, backend, precision)
            if built not in (precision, None):
                reason = f"has no {precision} kernels on {device}; {built} was built instead, as a baseline"
                found.append(Omission(backend.name, str(precision), reason))
    return found


def require_sound_plan(plan: BuildPlan, listener: Listener) -> None:
    """Raises MissingError for a named backend that is not here, and BadInputError for an unknown option or value.

    Warns about options without effect, unless the plan is a part of another.
    """
    for backend in plan.backends if plan.named else ():
        with name_failing_backend(backend):
            if plan.device is not None and plan.device not in backend.devices():
                continue
            reason = backend.find_obstacle(backend.choose_device(plan.device))
        if reason is not None:
            raise MissingError(f"backend {backend.name} cannot build on this machine: {reason}")
    if plan.gpu_lock is None:
        built = {each.name for each in plan.backends}
        warn_of_unused_options(plan.options, built, "built", listener)
    for backend in plan.backends:
        if given := plan.options.get(backend.name):
            with name_failing_backend(backend):
                backend.recipe(backend.choose_device(plan.device), given)


def _require_buildable(model: Model, plan: BuildPlan, listener: Listener) -> None:
    """Raises MissingError before any work if none of the combinations can be built."""
    if plan.automatic and plan.precisions != (Precision.FP8,):
        return
    reasons: list[str] = []
    failure: StageError | None = None
    for backend, precision, device in _list_combinations(plan, listener):
        try:
            with name_failing_backend(backend):
                reason = _find_obstacle(model, plan, backend, precision, device)
        except StageError as error:  # it may fail for one precision alone
            reason, failure = error.message, error
        if reason is None:
            return
        reasons.append(backend.name + " " + reason)
    if failure is not None:
        raise failure
    raise MissingError("nothing can be built: " + join_texts("; ", dict.fromkeys(reasons)))


def _build_one(
    result: ModelBuild,
    model: Model,
    plan: BuildPlan,
    backend: Backend,
    precision: Precision,
    device: Device,
    expected: Entry[ReferenceInfo],
    trajectory: Trajectory | None,
    store: Store,
    listener: Listener,
) -> Steps[bool]:
    """Adds the build, or why there is none, to `result`. Pauses as the backend does; at the end returns True."""
    name = f"{backend.name} {precision}"
    try:
        if (reason := _find_obstacle(model, plan, backend, precision, device)) is not None:
            omission = Omission(backend.name, str(precision), reason, ExitStatus.MISSING)
            (result.failed if plan.named else result.skipped).append(omission)
            return True
        graph: Entry[ModelInfo] | Entry[GraphInfo] = result.model
        if _reads_graph(backend, precision) or result.model.info.own_precision is not None:
            given = (
                precision,
                device,
                result.model,
                expected,
                plan.calibration,
                store,
                listener,
                plan.budget,
            )
            half = not backend.needs_module  # torch takes only the layers from the graph
            form = backend.qdq_form(precision, device) if precision in CALIBRATED else None
            graph = run_step(
                f"graph {precision} for {device}",
                listener,
                convert_to_precision,
                *given,
                half,
                form,
                plan.recover,
            )
        made_of, options = (
            (graph, result.model, model.fresh_module),
            plan.options.get(backend.name, {}),
        )
        wanted = backend, precision, device, *made_of, options, store, listener, plan.gpu_lock
        building = build_artifact(*wanted, expected)
        parts = iter(("build", "compile", "finish"))
        while True:
            with listener.step(f"{next(parts)} {name}") as step:
                if (made := advance_steps(building)) and made[1]:
                    step.cached()
            if made:
                break
            yield
        entry, _ = made
        for remark in entry.info.remarks:
            listener.warn(f"{entry.info.label}: {remark}")
        why_not = backend.find_run_blocker(entry.info)
        checked = None
        if why_not is None:
            checking = (
                entry,
                expected,
                result.model,
                backend,
                store,
                listener,
                plan.minimum_snr_db,
                trajectory,
            )
            checked = run_step(f"verify {name}", listener, verify_artifact, *checking)
    except OptpipeError as error:
        result.failed.append(
            Omission(backend.name, str(precision), error.message, error.exit_status)
        )
        return True
    except Exception as error:  # noqa: BLE001 - a library's or a bug's; others are still built
        failure = _record_failure(error, result.model.info.name, backend, precision, store)
        result.failed.append(
            Omission(backend.name, str(precision), failure, ExitStatus.STAGE_FAILED)
        )
        return True
    kept = graph.info.kept if isinstance(graph.info, GraphInfo) else ()
    result.artifacts.append(
        BuiltArtifact(entry, checked, why_not, kept, required_share=plan.required_share)
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


def _find_obstacle(
    model: Model, plan: BuildPlan, backend: Backend, precision: Precision, device: Device
) -> str | None:
    given = precision is plan.given and precision in backend.precisions_as_given(device)
    kind = None if given else precision
    if (reason := backend.find_obstacle(plan.device or device, kind)) is not None:
        return reason
    if backend.needs_module and not model.source.has_module:
        return "requires a PyTorch module, but this model is an ONNX file"
    if plan.budget is not None and precision in BUDGETED and not _reads_graph(backend, precision):
        return (
            f"casts the whole PyTorch module to {precision}, where "
            + Argument("budget")
            + " cannot keep layers out; choose another backend or leave "
            + Argument("budget")
            + " out"
        )
    if plan.recover and precision is Precision.INT8 and backend.needs_module:
        return (
            "takes the biases and the layers in floating point from the PyTorch module, which "
            + Argument("recover")
            + " cannot change; choose another backend or leave "
            + Argument("recover")
            + " out"
        )
    return None


def _reads_graph(backend: Backend, precision: Precision) -> bool:
    """Whether the layers' types come from the ONNX graph; a module is cast as a whole, unless it is calibrated."""
    return not backend.needs_module or precision in CALIBRATED


PROBE_ROWS = 2


def choose_probe(reference: Entry[ReferenceInfo], card: ModelCard) -> dict[str, NDArray[Any]]:
    """The first samples of the reference as one batch: a few, since each rewrite runs on them twice."""
    least, _, most = card.batch_range
    rows = reference_from_file(reference.file(REFERENCE)).inputs
    batches = split_batches(card, rows, max(least, min(PROBE_ROWS, most)))
    return next(batch for batch, _ in batches)


REVISION = 5
BUILD_LOG = "build.log"


def build_artifact(
    backend: Backend,
    precision: Precision,
    device: Device,
    graph: Entry[ModelInfo] | Entry[GraphInfo],
    model: Entry[ModelInfo],
    module: Callable[[], Any] | None,
    options: Mapping[str, Any],
    store: Store,
    listener: Listener,
    gpu_lock: Path | None = None,
    reference: Entry[ReferenceInfo] | None = None,
) -> Steps[tuple[Entry[ArtifactInfo], bool]]:
    """The store entry `artifact`: the engine, package or optimized graph, with the proof of its precision.

    What a backend makes of the graph is compared with it on the first inputs of `reference`.
    """
    card = read_stored_card(model)
    recipe = {
        "revision": REVISION,
        "backend": backend.name,
        "precision": str(precision),
        "device": device,
        "graph": graph.id,
        "inputs": [each.to_dict() for each in card.inputs],
        "built_with": dict(backend.recipe(device, options)),
    }

    def make(directory: Path) -> Steps[ArtifactInfo]:
        probe = [] if reference is None else [choose_probe(reference, card)]
        request = BuildRequest(
            card, precision, graph.file(ONNX), module, device, options, directory, gpu_lock, probe
        )
        building = backend.build_in_steps(request)
        while True:
            with redirect_output(directory / BUILD_LOG):
                built = advance_steps(building)
            if built:
                break
            yield
        given = graph.info if isinstance(graph.info, GraphInfo) else None
        return ArtifactInfo(
            model=card.name,
            source=card.source,
            backend=backend.name,
            precision=precision,
            device=device,
            file=built.file,
            more_files=built.more_files,
            weights=model.info.weights,
            precision_proof=prove_precision(precision, built.layers, built.placement),
            options=built.options,
            details=built.details,
            remarks=(*given.remarks, *built.remarks) if given else built.remarks,
            ranges=given.ranges if given else "",
            recovery=given.recovery if given else (),
            packages=backend.packages,
            mixed=given.mixed if given else None,
        )

    return store.produce_in_steps(
        ArtifactInfo,
        recipe,
        make,
        parents=(model.id, graph.id),
        listener=listener,
        runs_code=backend.loading_runs_code,
    )


VERIFICATION_REVISION = 4


def verify_artifact(
    artifact: Entry[ArtifactInfo],
    reference: Entry[ReferenceInfo],
    model: Entry[ModelInfo],
    backend: Backend,
    store: Store,
    listener: Listener,
    minimum_snr_db: float | None = None,
    trajectory: Trajectory | None = None,
) -> tuple[Entry[VerificationInfo], bool]:
    """The store entry `verification`: errors per output and sample, of the state after `trajectory` too, and whether each output
    has its minimum SNR.

    Code for single batch sizes also runs at those sizes, and the worst result counts. Repeated if the artifact's bytes, the
    reference or the GPU change.
    """
    card = read_stored_card(model)
    recipe = {
        "revision": VERIFICATION_REVISION,
        "artifact": {"id": artifact.id, "sha256": hash_engine(artifact)},
        "reference": reference.id,
        "gpu": get_gpu_name() if artifact.info.device == "cuda" else None,
        "minimum_snr_db": minimum_snr_db,
        **({} if trajectory is None else {"trajectory": trajectory.recipe}),
    }

    def make(directory: Path) -> VerificationInfo:
        sizes = backend.list_static_batches(artifact.info)
        rounded = artifact.info.precision, artifact.info.weights.own_precision
        tolerated = max(TOLERATED_RELATIVE_ERROR[each] for each in rounded)
        if minimum_snr_db is not None:
            tolerated = 10 ** (-minimum_snr_db / 20)
        with load_artifact(artifact, store) as session:
            tensors = reference_from_file(reference.file(REFERENCE))
            info, rows = verify_session(
                session, card, tolerated, tensors, reference.info, sizes, model.file(ONNX)
            )
            if trajectory is not None:
                states = trajectory.compare(session)
                pooled = tuple(pool_errors(name, each) for name, each in states.items())
                info, rows = replace(info, steps=trajectory.steps, trajectory=pooled), rows | states
        frames = [
            pl.DataFrame({"output": [name] * len(each["values"]), **each})
            for name, each in rows.items()
        ]
        if frames:
            write_parquet(directory / OUTPUT_ERRORS, pl.concat(frames, how="vertical_relaxed"))
        return info

    return store.produce(
        VerificationInfo, recipe, make, parents=(artifact.id, reference.id), listener=listener
    )
