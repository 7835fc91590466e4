"""The methods by name: collect once, compute any of them."""

import math
from collections.abc import Callable, Mapping
from types import ModuleType

from optpipe.core.choices import choices_from_text
from optpipe.quantize import entropy, maximum, mse, percentile
from optpipe.quantize.statistics import TensorStatistics

METHODS: Mapping[str, ModuleType] = {"max": maximum, "percentile": percentile, "entropy": entropy, "mse": mse}
METHOD_CHOICES = (*METHODS, "all")
MIN_AMAX = 2.0**-17
"""A range's lower bound: its INT8 step is 2**-24, the smallest FP16 number, so that no scale is ever zero."""


def methods_from_text(text: str) -> tuple[str, ...]:
    """Reads `all` or a comma-separated list such as `max,entropy`."""
    names = choices_from_text(text, METHOD_CHOICES, "--method")
    return tuple(METHODS) if "all" in names else names


def needs_histogram(methods: tuple[str, ...]) -> bool:
    """Whether any of `methods` needs more than the extremes."""
    return any(METHODS[name].HISTOGRAM for name in methods)


def compute_ranges(statistics: Mapping[str, TensorStatistics], method: str) -> dict[str, float]:
    """The bound of every tensor's range by `method`: finite, and never below MIN_AMAX."""
    compute: Callable[[TensorStatistics], float] = METHODS[method].amax
    return {name: _clamp_bound(compute(each)) for name, each in statistics.items()}


def _clamp_bound(bound: float) -> float:
    assert math.isfinite(bound), bound
    return max(bound, MIN_AMAX)
