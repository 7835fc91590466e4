"""The builds that `auto` makes: every backend and precision available here, and in which order they are made or left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from optpipe.backends.inductor import STATIC_BATCHES
from optpipe.backends.registry import list_precisions
from optpipe.build.given_data import add_calibration
from optpipe.build.plan import BuildPlan
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus, MissingError
from optpipe.core.events import Listener
from optpipe.core.precision import CALIBRATED, Precision
from optpipe.core.wording import Argument, join_texts
from optpipe.models.artifacts.decisions import (
    Omission,
)
from optpipe.models.export.exported import Model
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store

WIDE = (Precision.FP32, Precision.TF32, Precision.BF16)
"""On Tensor Cores none computes faster than FP16. On one H100 ResNet-50 in FP32 and TF32 took 170 s of `auto` at batch 64."""


NARROW = (Precision.FP16, Precision.BF16)
"""A CPU without arithmetic for them converts each value to FP32 and back."""


def plan_candidates(
    model: Model, plan: BuildPlan, stored: Entry[ModelInfo] | None, store: Store, listener: Listener
) -> tuple[BuildPlan, tuple[Omission, ...]]:
    """The plan with every backend and precision that can run here, and the omissions.

    Raises MissingError if a named backend cannot run here, or none can.
    """
    backends, omitted = [], []
    for backend in plan.backends:
        device = plan.device or backend.choose_device(None)
        if (reason := backend.find_obstacle(device, runs=True)) is None:
            backends.append(backend)
            continue
        if plan.named:
            raise MissingError(
                f"backend {backend.name} cannot be a candidate on this machine: " + reason
            )
        omitted.append(Omission(backend.name, "", reason, ExitStatus.MISSING))
    if not backends:
        reasons = join_texts(
            "; ", (f"{omission.backend}: " + omission.reason for omission in omitted)
        )
        raise MissingError(
            Argument("precision", "auto")
            + " has no backend that builds and runs on this machine: "
            + reasons
        )
    known = {kind for backend in backends for kind in list_precisions(backend, plan.device)}
    if Precision.FP8 in known and all(
        backend.choose_device(plan.device) == "cpu" for backend in backends
    ):
        known.discard(Precision.FP8)
        omitted.append(
            Omission(
                "", Precision.FP8, "made for GPUs; on a CPU it is never faster", ExitStatus.MISSING
            )
        )
    wanted = replace(
        plan,
        backends=tuple(backends),
        precisions=tuple(kind for kind in plan.precisions or Precision if kind in known),
        named=False,
        automatic=False,
        budget=None,
    )
    try:
        return add_calibration(model, wanted, stored, store, listener), tuple(omitted)
    except BadInputError:
        if plan.calibration is not None:
            raise
    reason = "needs calibration data: " + Argument("calibration", "PATH")
    omitted += [
        Omission("", kind, reason, ExitStatus.BAD_INPUT)
        for kind in CALIBRATED
        if kind in wanted.precisions
    ]
    without = tuple(kind for kind in wanted.precisions if kind not in CALIBRATED)
    return replace(wanted, precisions=without), tuple(omitted)


@dataclass(frozen=True, slots=True)
class SparedBuilds:
    """Builds that are made only if no FP16 build is within the budget, and what is recorded if they are not."""

    plan: BuildPlan
    omissions: tuple[Omission, ...]


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """The builds of `auto`, in the order in which they are made."""

    first: tuple[BuildPlan, ...]
    bounded: tuple[BuildPlan, ...] = ()
    """One plan per backend whose TF32 build may show that none of its builds can win."""
    spared: Mapping[str, SparedBuilds] = field(default_factory=dict)
    """By the backend whose FP16 build spares them; the empty name stands for any backend."""
    doubtful: tuple[tuple[BuildPlan, ...], ...] = ()
    """On a CPU, groups of plans, of one backend each, which the builds before them, or a trial of the model, may rule out."""


def order_cpu_builds(plan: BuildPlan, *, named: bool, has_module: bool) -> BuildOrder:
    """Leaves compiled builds of torch for later, and its builds in 16 bits, which most CPUs compute slower than FP32. If the user
    `named` the backends, all are built first.
    """
    if named or not has_module or Precision.FP32 not in plan.precisions:
        return BuildOrder(first=(plan,))

    of_torch = tuple(backend for backend in plan.backends if backend.needs_module)
    others = tuple(backend for backend in plan.backends if backend not in of_torch)
    compilers = {backend.speed_bounds("cuda").compiled_by for backend in of_torch}
    eager = tuple(backend for backend in of_torch if backend.name not in compilers)
    compiled = tuple(backend for backend in of_torch if backend.name in compilers)
    narrow = tuple(kind for kind in plan.precisions if kind in NARROW)
    wide = tuple(kind for kind in plan.precisions if kind not in narrow)
    first = (replace(plan, backends=others), replace(plan, backends=eager, precisions=wide))

    return BuildOrder(
        first=tuple(order for order in first if order.backends),
        doubtful=(
            tuple(replace(plan, backends=(backend,), precisions=wide) for backend in compiled),
            tuple(
                replace(plan, backends=(backend,), precisions=(kind,))
                for kind in narrow
                for backend in of_torch
            ),
        ),
    )


def order_gpu_builds(plan: BuildPlan, *, named: bool, has_module: bool) -> BuildOrder:
    """Leaves builds for later that others may spare. If the user `named` the backends, all are built first."""
    wide = tuple(
        kind for kind in plan.precisions if kind in WIDE and Precision.FP16 in plan.precisions
    )
    kinds = tuple(kind for kind in plan.precisions if kind not in wide)
    bounds = {backend.name: backend.speed_bounds("cuda") for backend in plan.backends}
    eager = [
        backend
        for backend in plan.backends
        if bounds[backend.name].compiled_by in bounds and not named
    ]
    able = [
        backend
        for backend in plan.backends
        if backend not in eager and (has_module or not backend.needs_module)
    ]
    bounded = [
        backend
        for backend in able
        if bounds[backend.name].gain_over_tf32 < inf and Precision.TF32 in wide and not named
    ]
    if len(bounded) == len(able):
        bounded = []  # nothing would be left to compare with

    spared: dict[str, SparedBuilds] = {}
    if wide:
        reason = "not faster than fp16 on Tensor Cores, and fp16 is within the budget"
        omissions = tuple(Omission("", kind, reason) for kind in wide)
        spared[""] = SparedBuilds(replace(plan, precisions=wide), omissions)
    for backend in eager:
        compiler = bounds[backend.name].compiled_by
        reason = f"not faster than its code compiled by {compiler}, whose fp16 is within the budget"
        spared[compiler] = SparedBuilds(
            replace(plan, precisions=kinds, backends=(backend,)),
            (Omission(backend.name, "", reason),),
        )

    at_once = tuple(backend for backend in plan.backends if backend not in (*eager, *bounded))
    return BuildOrder(
        first=(replace(plan, precisions=kinds, backends=at_once),),
        bounded=tuple(replace(plan, precisions=kinds, backends=(backend,)) for backend in bounded),
        spared=spared,
    )


def add_static_batches(plan: BuildPlan, card: ModelCard, sizes: Sequence[int]) -> BuildPlan:
    """`plan` with code for each of `sizes` alone, on a GPU, if a backend can compile it; given options take precedence."""
    options = dict(plan.options)
    for backend in plan.backends if card.batched else ():
        device = backend.choose_device(plan.device)
        if device == "cuda" and any(
            option.name == STATIC_BATCHES for option in backend.describe_options(device)
        ):
            options[backend.name] = {
                STATIC_BATCHES: ",".join(map(str, sizes)),
                **options.get(backend.name, {}),
            }
    return replace(plan, options=options)
