"""The paired bootstrap over samples: intervals of scores that are no mean over samples, as mean IoU and AP.

Samples are drawn anew with replacement (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13: percentiles),
for both models the same ones, so that what is common to both leaves the difference.
"""

from typing import TYPE_CHECKING

from optpipe.stats.paired import CONFIDENCE, Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REPLICATES = 1000
SEED = 0


def draw_sample_weights(samples: int, replicates: int = REPLICATES, seed: int = SEED) -> "NDArray[np.float64]":
    """How often each sample is drawn in each replicate (replicates, samples): whole numbers that add up to `samples`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return rng.multinomial(samples, np.full(samples, 1 / samples), size=replicates).astype(np.float64)


def compute_percentile_interval(replicated: "NDArray[np.float64]", confidence: float = CONFIDENCE) -> Interval:
    """The interval of a score from its replicates (replicates,); those without a value (NaN) are left out."""
    import numpy as np

    tail = (1 - confidence) / 2
    low, high = np.nanquantile(replicated, (tail, 1 - tail))
    return Interval(float(low), float(high))
