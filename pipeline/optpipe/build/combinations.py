"""Which backends and precisions a plan combines, and what prevents a combination, before anything is built."""

from optpipe.backends.base import Backend, Device
from optpipe.backends.registry import name_failing_backend, warn_of_unused_options
from optpipe.build.given_data import add_example
from optpipe.build.plan import BuildPlan
from optpipe.core.errors import MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.precision import BUDGETED, CALIBRATED, Precision
from optpipe.core.wording import Argument, join_texts
from optpipe.models.artifacts.decisions import Omission
from optpipe.models.export.exported import Model


def find_given_precision(model: Model, plan: BuildPlan) -> Precision | None:
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
    return add_example(model, plan).find_quantization()


def _list_buildable(plan: BuildPlan, backend: Backend, device: Device) -> frozenset[Precision]:
    """The precisions of a backend, with those that it builds only for a model that comes in them."""
    as_given = backend.precisions_as_given(device)
    return backend.precisions(device) | {kind for kind in as_given if kind is plan.given}


def list_combinations(
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


def list_replaced(plan: BuildPlan) -> list[Omission]:
    """The precisions in whose place FP32 is built, as a baseline."""
    omissions = []
    for precision in plan.precisions:
        for backend in plan.backends:
            device, built = _choose_built(plan, backend, precision)
            if built not in (precision, None):
                reason = f"has no {precision} kernels on {device}; {built} was built instead, as a baseline"
                omissions.append(Omission(backend.name, str(precision), reason))
    return omissions


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
            raise MissingError(f"backend {backend.name} cannot build on this machine: " + reason)
    if plan.gpu_lock is None:
        built = {backend.name for backend in plan.backends}
        warn_of_unused_options(plan.options, built, "built", listener)
    for backend in plan.backends:
        if given := plan.options.get(backend.name):
            with name_failing_backend(backend):
                backend.recipe(backend.choose_device(plan.device), given)


def require_buildable(model: Model, plan: BuildPlan, listener: Listener) -> None:
    """Raises MissingError before any work if none of the combinations can be built."""
    if plan.automatic and plan.precisions != (Precision.FP8,):
        return
    reasons: list[str] = []
    failure: StageError | None = None
    for backend, precision, device in list_combinations(plan, listener):
        try:
            with name_failing_backend(backend):
                reason = find_obstacle(model, plan, backend, precision, device)
        except StageError as error:  # it may fail for one precision alone
            reason, failure = error.message, error
        if reason is None:
            return
        reasons.append(backend.name + " " + reason)
    if failure is not None:
        raise failure
    raise MissingError("nothing can be built: " + join_texts("; ", dict.fromkeys(reasons)))


def find_obstacle(
    model: Model, plan: BuildPlan, backend: Backend, precision: Precision, device: Device
) -> str | None:
    given = precision is plan.given and precision in backend.precisions_as_given(device)
    kind = None if given else precision
    if (reason := backend.find_obstacle(plan.device or device, kind)) is not None:
        return reason
    if backend.needs_module and not model.source.has_module:
        return "requires a PyTorch module, but this model is an ONNX file"
    if plan.budget is not None and precision in BUDGETED and not reads_graph(backend, precision):
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


def reads_graph(backend: Backend, precision: Precision) -> bool:
    """Whether the layers' types come from the ONNX graph; a module is cast as a whole, unless it is calibrated."""
    return not backend.needs_module or precision in CALIBRATED
