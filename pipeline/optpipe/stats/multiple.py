"""Several hypotheses at once."""

from collections.abc import Sequence


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
