"""Which combinations of backend and precision are built, and which are left out, with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optpipe.backends.inductor import STATIC_BATCHES
from optpipe.backends.registry import BACKENDS
from optpipe.build.build import BuildPlan, add_calibration
from optpipe.build.records import BuiltArtifact, Omission
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus, MissingError
from optpipe.core.events import Listener
from optpipe.core.mixed_precision import Budget
from optpipe.core.precision import CALIBRATED, Precision
from optpipe.measure.race import FINAL_ROUNDS
from optpipe.models.export.model import Model
from optpipe.workspace.store import Entry, Store


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What `--precision auto` was asked for."""

    build: BuildPlan
    """Without precisions all are tried."""
    budget: Budget | None = None
    """None: by default a drop of accuracy where there are labels, else an SNR."""
    batch_sizes: tuple[int, ...] | None = None
    """Where candidates are compared; None: the profile's `opt`."""
    final_rounds: int = FINAL_ROUNDS
    """Processes of each of the fastest few, once the race has found them."""


def plan_candidates(
    model: Model, plan: BuildPlan, stored: Entry[ModelInfo] | None, store: Store, listener: Listener
) -> tuple[BuildPlan, tuple[Omission, ...]]:
    """Every backend that can build and run here, every precision that one of them has kernels for; and what is left out.

    Raises MissingError where a backend that was named cannot run here, or none can.
    """
    backends, omitted = [], []
    for backend in plan.backends:
        device = plan.device or backend.choose_device(None)
        if (reason := backend.find_obstacle(device, runs=True)) is None:
            backends.append(backend)
            continue
        if plan.named:
            raise MissingError(f"backend {backend.name} cannot be a candidate on this machine: {reason}")
        omitted.append(Omission(backend.name, "", reason, ExitStatus.MISSING))
    if not backends:
        reasons = "; ".join(f"{each.backend}: {each.reason}" for each in omitted)
        raise MissingError(f"--precision auto has no backend that builds and runs on this machine: {reasons}")
    known = {kind for each in backends for kind in each.precisions(each.choose_device(plan.device))}
    if Precision.FP8 in known and all(each.choose_device(plan.device) == "cpu" for each in backends):
        known.discard(Precision.FP8)
        omitted.append(Omission("", Precision.FP8, "made for GPUs; on a CPU it is never faster", ExitStatus.MISSING))
    wanted = replace(
        plan,
        backends=tuple(backends),
        precisions=tuple(kind for kind in plan.precisions or Precision if kind in known),
        named=False,
        automatic=False,
    )
    try:
        return add_calibration(model, wanted, stored, store, listener), tuple(omitted)
    except BadInputError:
        if plan.calibration is not None:
            raise
    reason = "needs calibration data: --calibration PATH"
    omitted += [Omission("", kind, reason, ExitStatus.BAD_INPUT) for kind in CALIBRATED if kind in wanted.precisions]
    without = tuple(kind for kind in wanted.precisions if kind not in CALIBRATED)
    return replace(wanted, precisions=without), tuple(omitted)


def add_static_batches(plan: BuildPlan, card: ModelCard, sizes: Sequence[int]) -> BuildPlan:
    """`plan` with code for each of `sizes` alone, on a GPU, from the backend that can compile it; given options come first."""
    options = dict(plan.options)
    for backend in plan.backends if card.batched else ():
        device = backend.choose_device(plan.device)
        if device == "cuda" and any(each.name == STATIC_BATCHES for each in backend.describe_options(device)):
            options[backend.name] = {STATIC_BATCHES: ",".join(map(str, sizes)), **options.get(backend.name, {})}
    return replace(plan, options=options)


def count_builds(plan: BuildPlan) -> int:
    """How many combinations `plan` has kernels for."""
    return sum(
        kind in each.precisions(each.choose_device(plan.device)) for each in plan.backends for kind in plan.precisions
    )


def rank_by_precision(built: BuiltArtifact) -> tuple[int, int]:
    """The more precise first, then the backend that `--backend auto` prefers: what decides between equally fast builds."""
    info = built.entry.info
    return list(Precision).index(info.precision), list(BACKENDS).index(info.backend)
