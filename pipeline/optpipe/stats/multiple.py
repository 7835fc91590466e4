"""Several hypotheses at once."""

from collections.abc import Sequence
from functools import cache
from math import sqrt

from optpipe.stats.means import compute_t_tail


def reject_by_holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected so that none of the true ones is, but for a probability of `level`.

    Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979): the smallest p-value has to be at most
    level / k, the next level / (k − 1), and so on until one is not. It needs no independence.
    """
    found, left = [False] * len(p_values), len(p_values)
    for at in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        if not p_values[at] <= level / left:
            break
        found[at], left = True, left - 1
    return found


@cache
def compute_pairwise_confidence(means: int, freedom: float, confidence: float) -> float:
    """The confidence of Student's t interval of a difference of two of `means`, for those of all pairs to hold together.

    Tukey's honestly significant difference: `freedom` is that of the one scatter that all intervals are made of.
    """
    from scipy.stats import studentized_range

    return 1 - 2 * compute_t_tail(float(studentized_range.ppf(confidence, means, freedom)) / sqrt(2), freedom)
