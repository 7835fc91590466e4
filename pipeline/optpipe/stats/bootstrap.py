"""The paired bootstrap over samples: intervals of scores that are not means over samples, such as mean IoU and AP.

Samples are drawn anew with replacement (Efron & Tibshirani, An Introduction to the Bootstrap, 1993),
for both models the same ones, so that what is common to both leaves the difference.
"""

from typing import TYPE_CHECKING

from optpipe.stats.paired import CONFIDENCE, Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST_SAMPLES = 20
"""Fewer give no interval: of one sample it is a point; of 3, 10, 20 normal values it holds their mean in 76, 90, 92 % of draws."""
REPLICATES = 1000
SEED = 0


def draw_sample_weights(samples: int, replicates: int = REPLICATES, seed: int = SEED) -> "NDArray[np.float64]":
    """How often each sample is drawn in each replicate (replicates, samples): whole numbers that add up to `samples`."""
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
