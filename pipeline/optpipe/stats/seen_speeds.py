"""Processes that were seen to run at two speeds: the interval of their mean by the exact interval of their shares.

Student's t takes a mean of few values of two kinds for normal. Where few of many processes are slow, it is not: with one slow process
of 19, all of them scatter little, and a build of which a fifth are slow looks faster than it is (`benchmarks/README.md`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import expm1, hypot, isfinite, log

import numpy as np

from optpipe.stats.means import MIN_VALUES, Interval, Mean, special

SMALLEST_DIFFERENCE = 1e-12
"""Of two p-values."""


@dataclass(frozen=True, slots=True)
class SeenSpeeds:
    """The means of the lower and of the larger values, and how many are larger: only their share is uncertain.

    The share has its exact interval (Clopper & Pearson, Biometrika 26, 1934).

    >>> speeds = seen_speeds_from_values([10.0] * 18 + [10.8])
    >>> [round(bound, 3) for bound in speeds.interval(0.95)]
    [10.001, 10.208]
    """

    lower: float
    """The mean of the values below the gap."""
    upper: float
    count: int
    larger: int

    @property
    def gap(self) -> float:
        """The distance of both, as the logarithm of a ratio; 0 if one is not positive."""
        return log(self.upper / self.lower) if self.lower > 0 else 0.0

    def bound_share(self, confidence: float) -> Interval:
        """Of the larger values among all."""
        tail, rest = (1 - confidence) / 2, self.count - self.larger
        least = float(special.betaincinv(self.larger, rest + 1, tail))
        return least, float(special.betaincinv(self.larger + 1, rest, 1 - tail))

    def interval(self, confidence: float) -> Interval:
        least, most = self.bound_share(confidence)
        apart = self.upper - self.lower
        return self.lower + least * apart, self.lower + most * apart

    def describe(self, confidence: float) -> str:
        """Such as `1 of 19 processes is 8.0% above the others, as may be 0.1% to 26.0% of all`."""
        is_or_are = "is" if self.larger == 1 else "are"
        least, most = self.bound_share(confidence)
        return (
            f"{self.larger} of {self.count} processes {is_or_are} {100 * expm1(self.gap):.1f}% above the"
            f" others, as may be {100 * least:.1f}% to {100 * most:.1f}% of all"
        )

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of so many larger ones, or more, if the mean is `limit`."""
        return float(special.bdtrc(self.larger - 1, self.count, self._find_share(limit)))

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of so few larger ones, or fewer, if the mean is `limit`."""
        return float(special.bdtr(self.larger, self.count, self._find_share(limit)))

    def _find_share(self, mean: float) -> float:
        return min(max((mean - self.lower) / (self.upper - self.lower), 0.0), 1.0)


def seen_speeds_from_values(values: Sequence[float]) -> SeenSpeeds | None:
    """Parts `values` at the widest gap between neighbors, the first of equal ones.

    None for fewer than MIN_VALUES, equal ones, or one that is not finite.
    """
    if len(values) < MIN_VALUES or not all(map(isfinite, values)):
        return None
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    gaps = np.diff(ordered)
    if not gaps.max() > 0:
        return None
    place = int(np.argmax(gaps)) + 1
    lower, upper = float(ordered[:place].mean()), float(ordered[place:].mean())
    return SeenSpeeds(lower, upper, len(ordered), len(ordered) - place)


@dataclass(frozen=True, slots=True)
class SpeedMean:
    """The mean of values that may be of two kinds: the wider of both intervals, the larger of both tails."""

    mean: Mean
    speeds: SeenSpeeds

    @property
    def value(self) -> float:
        return self.mean.value

    def interval(self, confidence: float) -> Interval:
        return _join(self.mean.interval(confidence), self.speeds.interval(confidence))

    def explain(self, confidence: float) -> str:
        """What the speeds are, where they make the interval wider."""
        widens = self.interval(confidence) != self.mean.interval(confidence)
        return self.speeds.describe(confidence) if widens else ""

    def compute_p_value_above(self, limit: float) -> float:
        return max(estimate.compute_p_value_above(limit) for estimate in (self.mean, self.speeds))

    def compute_p_value_below(self, limit: float) -> float:
        return max(estimate.compute_p_value_below(limit) for estimate in (self.mean, self.speeds))


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """The logarithm of the ratio of two positive means, of which either may be of values of two kinds.

    It has the interval of the `change` of their logarithms, and at least that of the speeds: each bound is the sides' distances from
    their own bounds, added in quadrature (Zou & Donner, Statistics in Medicine 27, 2008). A side without speeds has the distance 0.
    """

    change: Mean
    new: float
    old: float
    new_speeds: SeenSpeeds | None
    old_speeds: SeenSpeeds | None

    @property
    def value(self) -> float:
        return self.change.value

    def interval(self, confidence: float) -> Interval:
        return _join(self.change.interval(confidence), self._combine_sides(confidence))

    def compute_p_value_above(self, limit: float) -> float:
        return self._find_level(
            self.change.compute_p_value_above(limit), lambda bounds: bounds[0] > limit
        )

    def compute_p_value_below(self, limit: float) -> float:
        return self._find_level(
            self.change.compute_p_value_below(limit), lambda bounds: bounds[1] < limit
        )

    def _combine_sides(self, confidence: float) -> Interval:
        below, above = _find_distances(self.new, self.new_speeds, confidence)
        under, over = _find_distances(self.old, self.old_speeds, confidence)
        middle = log(self.new / self.old)
        return middle - hypot(below, over), middle + hypot(above, under)

    def _find_level(self, least: float, excludes: Callable[[Interval], bool]) -> float:
        """The smallest one-sided level, and at least `least`, at which the interval of the sides excludes a limit; 0.5 if none does."""
        low, high = least, max(least, 0.5)
        if excludes(self._combine_sides(1 - 2 * low)):
            return low
        while high - low > SMALLEST_DIFFERENCE:
            middle = (low + high) / 2
            hit = excludes(self._combine_sides(1 - 2 * middle))
            low, high = (low, middle) if hit else (middle, high)
        return high


def _join(first: Interval, second: Interval) -> Interval:
    return min(first[0], second[0]), max(first[1], second[1])


def _find_distances(mean: float, speeds: SeenSpeeds | None, confidence: float) -> Interval:
    """How far the bounds of positive values lie below and above their mean, in logarithms."""
    if speeds is None:
        return 0.0, 0.0
    low, high = speeds.interval(confidence)
    return max(log(mean / low), 0.0), max(log(high / mean), 0.0)
