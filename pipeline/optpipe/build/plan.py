"""The plan of a build from what a user asks for: which backends suit, and what is refused before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optpipe.backends.base import Backend
from optpipe.backends.registry import backends_from_text, require_known_options
from optpipe.core.entries import Device
from optpipe.core.errors import BadInputError, MissingError, require_existing
from optpipe.core.precision import Budget, Precision, budget_from_text, precisions_from_text
from optpipe.core.quantity import Dimension, read_quantity, share_from_text
from optpipe.core.wording import Argument
from optpipe.quantize.recovery.recover import steps_from_text
from optpipe.workspace.environment import list_gpus

AUTO = "auto"


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


def require_device(device: Device | None) -> Device | None:
    """Raises MissingError for `cuda` if no NVIDIA GPU is found."""
    if device == "cuda" and not list_gpus():
        raise MissingError(
            "no NVIDIA GPU or driver found; omit "
            + Argument("device")
            + " to use what is available",
            argument=Argument("device", "cuda"),
        )
    return device


def plan_builds(
    *,
    precision: str | None = None,
    backend: str | None = None,
    device: Device | None = None,
    calibration: Path | None = None,
    images: Path | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    budget: str | None = None,
    minimum_snr: str | None = None,
    require_share: str | None = None,
    steps: str | None = None,
    recover: str | None = None,
    truncate: bool = False,
) -> BuildPlan:
    """The plan of everything that builds: FP16 without `precision`; without `backend` one that suits; `auto`: all candidates.

    Texts are as on the command line. Raises BadInputError for a word, option, or quantity that is not known and a file that does
    not exist, MissingError without the GPU that is asked for.
    """
    require_existing(images, "images")
    require_existing(calibration, "calibration")
    require_known_options(options or {})
    target, wanted = require_device(device), backend or AUTO
    choosing, named = precision == AUTO, wanted not in (AUTO, "all")
    precisions = () if choosing else precisions_from_text(precision or "fp16")
    if (steps_of := steps_from_text(recover)) and precisions and Precision.INT8 not in precisions:
        raise BadInputError(
            "applies to int8 alone; add it to " + Argument("precision"),
            argument=Argument("recover", recover),
        )
    candidates = "all" if choosing and not named else wanted
    minimum = None
    if minimum_snr is not None:
        minimum, _ = read_quantity(minimum_snr, "min_snr", Dimension.DECIBEL)
    share = None
    if require_share is not None:
        share = share_from_text(require_share, "require_share")
        if share > 1:
            raise BadInputError(
                "expected more than 0% and up to 100%",
                argument=Argument("require_share", require_share),
            )
    return BuildPlan(
        precisions=precisions,
        backends=backends_from_text(candidates, target, precisions),
        named=named,
        automatic=wanted == AUTO and not choosing,
        device=target,
        images=images,
        calibration=calibration,
        options=options or {},
        budget=None if budget is None else budget_from_text(budget, "budget"),
        minimum_snr_db=minimum,
        required_share=share,
        steps=steps,
        recover=steps_of,
        truncate=truncate,
    )
