"""Two classifiers on the same samples: shares, their difference, and what the pairs say about it.

The interval of a difference is Tango's score interval (Statistics in Medicine 17, 1998): it uses only the pairs in
which the two differ, keeps its coverage where they hardly ever do, and is not empty where they never do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float

    def to_list(self) -> list[float]:
        """`[low, high]`, as JSON holds it."""
        return [self.low, self.high]


def compute_normal_quantile(confidence: float) -> float:
    """Half the width, in standard deviations, that holds this share of a normal distribution: 1.96 for 95 %."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def compute_share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a share. Raises ValueError for no samples."""
    if n < 1:
        raise ValueError("no samples, no share")
    z = compute_normal_quantile(confidence)
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def compute_difference_interval(lost: int, won: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Tango's interval of (lost - won) / n: of `n` pairs, `lost` are right in the first only and `won` in the second only."""
    z = compute_normal_quantile(confidence)
    estimate = (lost - won) / n
    low = _root(lambda delta: _score(lost, won, n, delta) - z, -1.0, estimate)
    high = _root(lambda delta: _score(lost, won, n, delta) + z, estimate, 1.0)
    return Interval(low, high)


def _score(lost: int, won: int, n: int, delta: float) -> float:
    """The score statistic at the difference `delta`; falls with it."""
    b = -lost - won + (2 * n - lost + won) * delta
    q = (sqrt(max(b * b + 8 * n * won * delta * (1 - delta), 0.0)) - b) / (4 * n)
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


def compute_macro_f1(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> float:
    """The mean over classes, of those that occur, of the harmonic mean of precision and recall."""
    import numpy as np

    hits = np.bincount(labels[labels == predicted], minlength=classes)
    sizes = np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    there = sizes > 0
    return float(np.mean(2 * hits[there] / sizes[there])) if there.any() else 0.0


def compute_macro_f1_difference(
    labels: "NDArray[np.int64]",
    first: "NDArray[np.int64]",
    second: "NDArray[np.int64]",
    classes: int,
    *,
    rounds: int = 1000,
) -> Interval:
    """The interval of the first's macro F1 less the second's: percentiles of a seeded bootstrap over pairs."""
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(rounds):
        rows = rng.integers(0, len(labels), len(labels))
        one, other = (
            compute_macro_f1(labels[rows], first[rows], classes),
            compute_macro_f1(labels[rows], second[rows], classes),
        )
        drawn.append(one - other)
    low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(float(low), float(high))
