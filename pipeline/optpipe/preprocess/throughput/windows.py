"""Rates with honest intervals, out of the times of consecutive batches."""

from collections.abc import Sequence
from math import exp, hypot, log

WINDOWS = 12
"""The most windows of consecutive batches that a measurement is cut into; their times give the interval."""
FEWEST_WINDOWS = 6
"""With fewer, Student's factor alone makes the interval several times as wide as the spread: it would say nothing."""
WIDEST = 0.5
"""Half the interval of the time per image, relative to it, from which nothing is said: the rate's end would double it."""


def compute_images_per_s(batch_ns: Sequence[int], batch_size: int) -> float:
    """All images over all time."""
    return batch_size * len(batch_ns) / (sum(batch_ns) / 1e9)


def compute_rate_interval(batch_ns: Sequence[int], group: int, batch_size: int) -> tuple[float, float] | None:
    """95 % interval of `compute_images_per_s` of the same batches, which it holds; None where it cannot be told.

    `group` batches belong together (a round of the DataLoader's workers): a window holds whole groups. All of them are
    in a window, so that the interval and the rate speak of the same time; windows differ by a group at most.
    """
    import numpy as np

    from optpipe.stats.means import compute_ratio_of_sums_interval

    groups = len(batch_ns) // group
    count = min(WINDOWS, groups)
    if count < FEWEST_WINDOWS:
        return None
    starts = np.arange(count) * groups // count * group
    images = np.diff(starts, append=len(batch_ns)) * float(batch_size)
    interval = compute_ratio_of_sums_interval(np.add.reduceat(np.asarray(batch_ns, float), starts), images)
    if interval is None or interval[1] - interval[0] >= WIDEST * (interval[1] + interval[0]):
        return None  # windows so unequal that nothing can be said
    rate = compute_images_per_s(batch_ns, batch_size)  # between the two but for rounding
    return min(1e9 / interval[1], rate), max(1e9 / interval[0], rate)


def compute_ratio_interval(
    one: float, one_interval: tuple[float, float], other: float, other_interval: tuple[float, float]
) -> tuple[float, float]:
    """95 % interval of `one` / `other`, measured independently: on a log scale, relative errors add as squares."""
    ratio = one / other
    below = hypot(log(one / one_interval[0]), log(other_interval[1] / other))
    above = hypot(log(one_interval[1] / one), log(other / other_interval[0]))
    return ratio * exp(-below), ratio * exp(above)
