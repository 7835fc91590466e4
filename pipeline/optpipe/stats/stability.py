"""Was it one steady thing that was measured? Warm-up, drift, and runtimes with two speeds."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

STEADY_WINDOWS = 4
STEADY_SPREAD = 1.05
"""Medians of the last windows lie within 5 % of each other (perf_analyzer asks 10 % of three windows)."""


def is_steady(window_medians: Sequence[float]) -> bool:
    """Whether warm-up may end: the last windows agree, and do not all move the same way by more than noise."""
    last = list(window_medians[-STEADY_WINDOWS:])
    if len(last) < STEADY_WINDOWS or min(last) <= 0:
        return False
    spread = max(last) / min(last)
    falling = all(later < earlier for earlier, later in itertools.pairwise(last))
    return spread <= (1 + (STEADY_SPREAD - 1) / 2 if falling else STEADY_SPREAD)


@dataclass(frozen=True, slots=True)
class Trend:
    """A monotone change over the whole measurement."""

    change: float
    """Last over first level, less one: 0.05 is 5 % slower at the end."""
    p_value: float


def find_trend(values: "np.ndarray", blocks: int = 20) -> Trend | None:
    """Mann-Kendall test and Theil-Sen slope over the medians of consecutive blocks; None for under 32 values."""
    import numpy as np

    blocks = min(blocks, len(values) // 4)
    if blocks < 8:
        return None
    medians = np.array([float(np.median(block)) for block in np.array_split(values, blocks)])
    first, second = np.triu_indices(blocks, k=1)
    score = float(np.sign(medians[second] - medians[first]).sum())
    deviation = sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    p_value = erfc(max(0.0, abs(score) - 1) / deviation / sqrt(2))
    slope = float(np.median((medians[second] - medians[first]) / (second - first)))
    level = float(np.median(medians))
    return Trend(change=slope * (blocks - 1) / level if level else 0.0, p_value=p_value)


@dataclass(frozen=True, slots=True)
class Modes:
    """Two speeds of one runtime."""

    fast: float
    slow: float
    slow_share: float


SMALLEST_MODE = 0.05
"""Fewer samples than this share are outliers, which percentiles show, not a second speed."""
MOST_OUTLIER_GROUPS = 4
SMALLEST_GAP = 0.05
"""The slow mode is at least this much slower."""


def find_two_modes(values: "np.ndarray") -> Modes | None:
    """Finds two separated peaks, or None.

    The split that minimizes the variance inside both parts (Otsu) on a log scale; the parts must be clearly apart
    (Ashman's D over 3), and few samples may lie between their quartiles, which a long tail never satisfies.
    """
    import numpy as np

    if len(values) < 40 or float(np.min(values)) <= 0:
        return None
    ordered = np.sort(np.log(values))
    smallest = SMALLEST_MODE * len(values)
    for _ in range(MOST_OUTLIER_GROUPS):
        split = _otsu(ordered)
        fast, slow = ordered[:split], ordered[split:]
        if len(slow) >= smallest:
            break
        ordered = fast  # a group too small to be a mode; only this check looks past it, no figure does
    if min(len(fast), len(slow)) < smallest:
        return None
    # medians and inter-quartile ranges, so that outliers beyond the modes do not hide them
    centres = float(np.median(fast)), float(np.median(slow))
    widths = [float(np.subtract(*np.percentile(part, [75, 25]))) / 1.349 for part in (fast, slow)]
    apart = sqrt(2) * (centres[1] - centres[0]) / max(sqrt(widths[0] ** 2 + widths[1] ** 2), 1e-9)
    third = (centres[1] - centres[0]) / 3
    between = np.count_nonzero((ordered > centres[0] + third) & (ordered < centres[1] - third))
    valley = between < 0.5 * min(len(fast), len(slow)) * (1 / 3)
    gap = float(np.exp(centres[1] - centres[0])) - 1
    if gap < SMALLEST_GAP or apart < 3 or not valley:
        return None
    return Modes(float(np.exp(centres[0])), float(np.exp(centres[1])), len(slow) / len(values))


def _otsu(ordered: "np.ndarray") -> int:
    """Where to cut sorted values so that the variance between the two parts is largest; outer 1 % left together."""
    import numpy as np

    clipped = np.clip(ordered, *np.percentile(ordered, [1, 99]))
    count = len(clipped)
    sizes = np.arange(1, count)
    sums = np.cumsum(clipped)
    fast_mean = sums[:-1] / sizes
    slow_mean = (sums[-1] - sums[:-1]) / (count - sizes)
    between = sizes * (count - sizes) * (slow_mean - fast_mean) ** 2
    return int(np.argmax(between)) + 1
