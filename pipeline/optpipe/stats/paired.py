"""Two classifiers on the same samples: shares, their difference, and what the pairs say about it.

The interval of a difference is Tango's score interval (Statistics in Medicine 17, 1998): it uses only the pairs in
which the two differ, keeps its coverage where they hardly ever do, and is not empty where they never do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper."""
        return self.low, self.high


def compute_normal_quantile(confidence: float) -> float:
    """Half the width, in standard deviations, that holds this share of a normal distribution: 1.96 for 95 %."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def compute_share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact interval of a share (Clopper & Pearson, Biometrika 26, 1934): neither end errs more often than it says.

    Raises ValueError for no samples.
    """
    from scipy.special import betaincinv

    if n < 1:
        raise ValueError("no samples, no share")
    tail = (1 - confidence) / 2
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - tail)) if hits < n else 1.0
    return Interval(low, high)


def compute_share_p_value(hits: int, n: int, limit: float) -> float:
    """The probability of as few hits or fewer, were the true share `limit`: exact, by the binomial distribution."""
    from scipy.special import bdtr

    return float(bdtr(hits, n, limit))


def compute_difference_interval(lost: int, won: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Tango's interval of (lost - won) / n: of `n` pairs, `lost` are right in the first only and `won` in the second only."""
    z = compute_normal_quantile(confidence)
    estimate = (lost - won) / n
    low = _root(lambda delta: _score(lost, won, n, delta) - z, -1.0, estimate)
    high = _root(lambda delta: _score(lost, won, n, delta) + z, estimate, 1.0)
    return Interval(low, high)


def compute_difference_p_value(lost: int, won: int, n: int, limit: float) -> float:
    """The probability of a difference this far above `limit` or farther, were `limit` the truth; by the score statistic."""
    return 1 - NormalDist().cdf(_score(lost, won, n, limit))


def _score(lost: int, won: int, n: int, delta: float) -> float:
    """The score statistic at the difference `delta`; falls with it."""
    b = -lost - won + (2 * n - lost + won) * delta
    cross = 8 * n * won * delta * (1 - delta)
    root = abs(b) if cross == 0 else sqrt(max(b * b + cross, 0.0))  # the square of a tiny `b` is 0
    q = (root - b) / (4 * n)
    variance = n * (2 * q + delta * (1 - delta))
    gap = lost - won - n * delta
    if variance <= 0:
        return 0.0 if gap == 0 else float("inf") * gap
    return gap / sqrt(variance)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def compute_mcnemar_p_value(lost: int, won: int) -> float:
    """The exact two-sided probability of so unequal a split if both were equally good; 1 where they never differ."""
    n = lost + won
    if n == 0:
        return 1.0
    tail = sum(comb(n, k) for k in range(min(lost, won) + 1)) / 2**n
    return float(min(1.0, 2 * tail))


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `n` independent samples, and how improbable that is."""

    hits: int
    n: int

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of as many hits or more, were the true share `limit`."""
        return compute_share_p_value(self.n - self.hits, self.n, 1 - limit)

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of as few hits or fewer, likewise."""
        return compute_share_p_value(self.hits, self.n, limit)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """`lost` and `won` of `n` pairs, and how improbable their difference (lost - won) / n is."""

    lost: int
    won: int
    n: int

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of so large a difference or a larger one, were the truth `limit`."""
        return compute_difference_p_value(self.lost, self.won, self.n, limit)

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of so small a difference or a smaller one, likewise."""
        return compute_difference_p_value(self.won, self.lost, self.n, -limit)
