"""The methods by name: collect once, compute any of them."""

import math
from collections.abc import Callable, Mapping
from types import ModuleType

from optpipe.errors import BadInputError
from optpipe.quantize import (
    entropy,
    maximum,
    mse,
    percentile,
)
from optpipe.quantize.statistics import TensorStatistics

METHODS: Mapping[str, ModuleType] = {"max": maximum, "percentile": percentile, "entropy": entropy, "mse": mse}
MIN_AMAX = 2.0**-17
"""A range's lower bound: its INT8 step is 2**-24, the smallest FP16 number, so that no scale is ever zero."""


def methods_from_text(text: str) -> tuple[str, ...]:
    """Reads `all` or a comma-separated list such as `max,entropy`."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(METHODS)
    if unknown := [name for name in names if name not in METHODS]:
        raise BadInputError(f"--method {unknown[0]}: choose from {', '.join(METHODS)}, or all")
    if not names:
        raise BadInputError(f"--method is empty; choose from {', '.join(METHODS)}, or all")
    return tuple(dict.fromkeys(names))


def needs_histogram(methods: tuple[str, ...]) -> bool:
    """Whether any of `methods` needs more than the extremes."""
    return any(METHODS[name].HISTOGRAM for name in methods)


def compute_ranges(statistics: Mapping[str, TensorStatistics], method: str) -> dict[str, float]:
    """The bound of every tensor's range by `method`: finite, and never below SMALLEST_AMAX."""
    compute: Callable[[TensorStatistics], float] = METHODS[method].amax
    return {name: _clamp_bound(compute(each)) for name, each in statistics.items()}


def _clamp_bound(bound: float) -> float:
    assert math.isfinite(bound), bound
    return max(bound, MIN_AMAX)
