"""Rates with honest intervals, out of the times of consecutive batches."""

from collections.abc import Sequence
from math import exp, hypot, log

WINDOWS = 12
"""A measurement is cut into at most so many windows of equally many batches; their times give the interval."""


def images_per_s(batch_ns: Sequence[int], batch_size: int) -> float:
    """All images over all time."""
    return batch_size * len(batch_ns) / (sum(batch_ns) / 1e9)


def rate_interval(batch_ns: Sequence[int], group: int, batch_size: int) -> tuple[float, float] | None:
    """95 % interval of images per second; None where it cannot be told.

    `group` batches belong together (a round of the DataLoader's workers): a window holds whole groups. The interval is
    that of the mean time of a window, so it holds the rate, which is all images over all time.
    """
    import numpy as np

    from optpipe.stats.stability import mean_interval

    groups = len(batch_ns) // group
    count = min(WINDOWS, groups)
    if count < 3:
        return None
    size = groups // count * group
    windows = np.asarray(batch_ns[-size * count :], float).reshape(count, size).sum(axis=1)
    interval = mean_interval(windows)
    if interval is None or interval[0] <= 0:
        return None  # windows so unequal that nothing can be said
    low, high = (batch_size * size * 1e9 / each for each in reversed(interval))
    return low, high


def ratio_interval(
    one: float, one_interval: tuple[float, float], other: float, other_interval: tuple[float, float]
) -> tuple[float, float]:
    """95 % interval of `one` / `other`, measured independently: on a log scale, relative errors add as squares."""
    ratio = one / other
    below = hypot(log(one / one_interval[0]), log(other_interval[1] / other))
    above = hypot(log(one_interval[1] / one), log(other / other_interval[0]))
    return ratio * exp(-below), ratio * exp(above)
