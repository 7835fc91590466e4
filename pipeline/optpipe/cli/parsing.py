"""From option texts to values, once, at the edge."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.backends.base import Device
from optpipe.backends.registry import BACKENDS, backends_from_text
from optpipe.build.build import BuildPlan
from optpipe.core.card import batch_ranges_from_text, join_batch_ranges, shapes_from_text
from optpipe.core.entries import weights_from_text
from optpipe.core.errors import BadInputError, require_existing
from optpipe.core.plan import sizes_from_text
from optpipe.core.precision import budget_from_text, precisions_from_text
from optpipe.models.artifacts.lookup import find_stored_source
from optpipe.models.export.model import Model
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.build.choose import ChoicePlan


def require_device(device: Device | None) -> Device | None:
    """`device`; raises MissingError for `cuda` if no NVIDIA GPU is found."""
    from optpipe.core.errors import MissingError
    from optpipe.workspace.environment import list_gpus

    if device == "cuda" and not list_gpus():
        raise MissingError("--device cuda: no NVIDIA GPU or driver found; omit --device to use what is available")
    return device


def model_from_options(model: str, weights: str, batch: str | None, shape: Sequence[str], store: Store) -> Model:
    """The model with the weights and shapes asked for; nothing is loaded yet. It may be named as a stored one is."""
    shapes = dict(shapes_from_text(each) for each in shape)
    return Model(
        source_from_text(find_stored_source(model, store) or model, shapes),
        weights_from_text(weights),
        join_batch_ranges(batch_ranges_from_text(batch)) if batch is not None else None,
        shapes,
    )


def build_plan_from_options(
    precision: str,
    backend: str,
    device: Device | None,
    option: Sequence[str],
    *,
    images: Path | None,
    calibration: Path | None,
    batch: str | None = None,
    budget: str | None = None,
) -> BuildPlan:
    """Reads `--precision`, `--backend`, `--device` and `--option` of every command that builds.

    Several ranges in `batch` become the optimization profiles of the backends that have them.
    """
    require_existing(images, "--images")
    require_existing(calibration, "--calibration")
    target = require_device(device)
    precisions = precisions_from_text(precision)
    backends, options = backends_from_text(backend, target, precisions), options_from_text(option)
    if batch is not None and len(batch_ranges_from_text(batch)) > 1:
        for each in backends:
            if any(known.name == "profiles" for known in each.describe_options(each.devices()[0])):
                options.setdefault(each.name, {}).setdefault("profiles", batch)
    return BuildPlan(
        precisions=precisions,
        backends=backends,
        named=backend not in ("auto", "all"),
        automatic=backend == "auto",
        device=target,
        images=images,
        calibration=calibration,
        options=options,
        budget=None if budget is None else budget_from_text(budget, "--budget"),
    )


def choice_plan_from_options(
    backend: str,
    device: Device | None,
    option: Sequence[str],
    *,
    images: Path | None,
    calibration: Path | None,
    budget: str | None,
    compare_at: str | None,
) -> "ChoicePlan":
    """Reads the options of `build --precision auto`: without `--backend`, all of them are candidates."""
    from optpipe.build.choose import ChoicePlan

    require_existing(calibration, "--calibration")
    target = require_device(device)
    named = backend not in ("auto", "all")
    build = BuildPlan(
        precisions=(),
        backends=backends_from_text(backend if named else "all", target),
        named=named,
        device=target,
        images=images,
        calibration=calibration,
        options=options_from_text(option),
    )
    return ChoicePlan(
        build,
        None if budget is None else budget_from_text(budget, "--budget"),
        None if compare_at is None else sizes_from_text(compare_at, "--compare-at"),
    )


def options_from_text(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Reads `--option BACKEND.KEY=VALUE`, repeated."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        backend, _, key = name.partition(".")
        if not key or not value or backend not in BACKENDS:
            raise BadInputError(
                f"--option {text}: expected BACKEND.KEY=VALUE, where BACKEND is one of {', '.join(BACKENDS)}"
            )
        options.setdefault(backend, {})[key] = value
    return options
