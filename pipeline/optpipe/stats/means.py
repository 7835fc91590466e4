"""Intervals of means and of rates over windows of one measurement, by Student's t."""

from math import sqrt
from typing import TYPE_CHECKING

from optpipe.stats.distributions import student_t_quantile

if TYPE_CHECKING:
    import numpy as np


def compute_mean_interval(values: "np.ndarray", confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval for the mean of independent `values` (window means); None for fewer than 3."""
    import numpy as np

    if len(values) < 3:
        return None
    half = student_t_quantile(0.5 + confidence / 2, len(values) - 1) * float(np.std(values, ddof=1)) / sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def compute_ratio_of_sums_interval(
    numerators: "np.ndarray", denominators: "np.ndarray", confidence: float = 0.95
) -> tuple[float, float] | None:
    """Student's t interval for a rate, sum over sum, of independent windows; it holds the ratio of these very sums.

    The ratio estimator of survey sampling (Cochran, Sampling Techniques, 3rd ed., 2.11): windows may differ in length,
    and the longer weighs more. The mean of the windows' own ratios is another figure and may lie outside. None for
    fewer than 3 windows, or denominators that add up to nothing.
    """
    import numpy as np

    count, total = len(numerators), float(np.sum(denominators))
    if count < 3 or total <= 0:
        return None
    ratio = float(np.sum(numerators)) / total
    residuals = numerators - ratio * denominators
    error = sqrt(count / (count - 1) * float(np.sum(residuals**2))) / total
    half = student_t_quantile(0.5 + confidence / 2, count - 1) * error
    return ratio - half, ratio + half
