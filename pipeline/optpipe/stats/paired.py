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
        """The probability of as few hits or fewer, were the true share `limit`."""
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
        """The probability of so small a difference or a smaller one, were the truth `limit`."""
        return compute_difference_p_value(self.won, self.lost, self.n, -limit)


FEWEST_SAMPLES = 20
"""Fewer give no interval: of one sample it is a point; of 3, 10, 20 normal values it holds their mean in 76, 90, 92 % of draws."""
REPLICATES = 1000
SEED = 0


def draw_sample_weights(samples: int, replicates: int = REPLICATES, seed: int = SEED) -> "NDArray[np.float64]":
    """How often each sample is drawn in each replicate of the paired bootstrap (replicates, samples): whole numbers, `samples` in all.

    Both models get the same ones, so that what is common to both leaves the difference (Efron & Tibshirani, An Introduction to the
    Bootstrap, 1993). It is for scores that are not means over samples, such as mean IoU and AP.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.multinomial(samples, np.full(samples, 1 / samples), size=replicates).astype(np.float64)


def compute_bootstrap_interval(
    replicated: "NDArray[np.float64]", value: float, confidence: float = CONFIDENCE
) -> Interval:
    """The interval of a score from its replicates (replicates,) and its `value` on all samples; replicates that are NaN are left out.

    Bias-corrected percentiles: a score that few samples flatter, as AP, is flattered once more in each replicate, and plain percentiles
    would lie off by twice as much (Efron & Tibshirani 1993, chapter 14, without acceleration).
    """
    import numpy as np
    from scipy.special import ndtr, ndtri

    known = replicated[~np.isnan(replicated)]
    if not len(known) or np.isnan(value):
        return Interval(float("nan"), float("nan"))
    below = (np.sum(known < value) + np.sum(known == value) / 2) / len(known)
    bias = ndtri(np.clip(below, 0.5 / len(known), 1 - 0.5 / len(known)))
    half = ndtri((1 + confidence) / 2)
    low, high = np.quantile(known, ndtr(2 * bias + np.array([-half, half])))
    return Interval(float(low), float(high))


PSEUDO_PAIRS = 2
"""Added to the pairs that differ, one for each classifier (Bonett & Price, Statistics in Medicine 31, 2012): two that never
differ on these samples are not proven equal."""


def compute_macro_f1(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> float:
    """The mean over classes, of those that occur, of the harmonic mean of precision and recall.

    `labels` and `predicted` have the shape (samples,).
    """
    import numpy as np

    hits = np.bincount(labels[labels == predicted], minlength=classes)
    sizes = _sizes(labels, predicted, classes)
    there = sizes > 0
    return float(np.mean(2 * hits[there] / sizes[there])) if there.any() else 0.0


def compute_macro_f1_difference(
    labels: "NDArray[np.int64]",
    first: "NDArray[np.int64]",
    second: "NDArray[np.int64]",
    classes: int,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The interval of the first's macro F1 less the second's, by the delta method (Takahashi et al., Applied Intelligence 52,
    2022) with PSEUDO_PAIRS; all arrays have the shape (samples,). It is never empty.
    """
    import numpy as np

    n = len(labels)
    apart = _influence(labels, first, classes) - _influence(labels, second, classes)
    typical = _weight_of_a_pair(labels, first, second, classes)
    value = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
    variance = (float(np.sum(apart**2)) + PSEUDO_PAIRS * typical**2) / (n + PSEUDO_PAIRS) ** 2
    half = compute_normal_quantile(confidence) * variance**0.5
    return Interval(max(-1.0, value - half), min(1.0, value + half))


def _sizes(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> "NDArray[np.int64]":
    """Per class, as often as it is the label plus as often as it is predicted."""
    import numpy as np

    return np.asarray(np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes))


def _influence(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> "NDArray[np.float64]":
    """What each sample adds to n times the macro F1 (samples,): its derivative by the sample's weight."""
    import numpy as np

    hit, n = labels == predicted, len(labels)
    sizes = _sizes(labels, predicted, classes)
    there = np.maximum(sizes, 1)
    scores = 2 * np.bincount(labels[hit], minlength=classes) / there
    weight = n / there / max(int(np.count_nonzero(sizes)), 1)
    return np.asarray(
        2 * hit * weight[labels] - scores[labels] * weight[labels] - scores[predicted] * weight[predicted]
    )


def _weight_of_a_pair(
    labels: "NDArray[np.int64]", first: "NDArray[np.int64]", second: "NDArray[np.int64]", classes: int
) -> float:
    """By how much n times the macro F1 changes, root mean square over samples, where one classifier is right and one wrong."""
    import numpy as np

    sizes = np.maximum((_sizes(labels, first, classes) + _sizes(labels, second, classes)) / 2, 1)
    present = max(int(np.count_nonzero(np.bincount(labels, minlength=classes))), 1)
    return float(np.sqrt(np.mean((2 * len(labels) / sizes[labels] / present) ** 2)))
