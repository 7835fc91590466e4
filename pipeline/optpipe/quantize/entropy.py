"""`entropy`: the range that loses the least information, by Kullback-Leibler divergence.

After Migacz, "8-bit Inference with TensorRT" (GTC 2017): for each candidate bound the values below it, the clipped ones
added to the last bin, are the reference; the same bins merged into the levels of INT8 and spread out again over the
bins that hold something are the approximation. Zeros are left out: INT8 represents them exactly at any scale.
"""

import numpy as np
from numpy.typing import NDArray

from optpipe.quantize.statistics import TensorStatistics

HISTOGRAM = True
ENTROPY_BINS = 2048
ENTROPY_LEVELS = 128
_STRIDE = 8
_COARSE = 2 * ENTROPY_LEVELS
"""A best end at or below this many bins was chosen among too few, too wide ones."""
_ROUNDING = 1e-12
"""Bins that hold less of the whole are empty but for rounding."""


def amax(statistics: TensorStatistics) -> float:
    """The range's bound."""
    assert statistics.magnitudes is not None
    low, high, counts = statistics.magnitudes.nonzero()
    if not counts.size:
        return 0.0
    bound, ends = statistics.amax, np.arange(ENTROPY_BINS, ENTROPY_LEVELS - 1, -_STRIDE)  # of equals the widest wins
    while True:
        bins = rebin_linearly(low, np.minimum(high, statistics.amax), counts, bound)
        beyond = float(counts.sum() - bins.sum())
        losses = [compute_divergence(bins, int(end), beyond) for end in ends]
        best = int(ends[int(np.argmin(losses))])
        if best > _COARSE or bound * best / ENTROPY_BINS <= low[0]:
            return float(bound * best / ENTROPY_BINS)
        bound *= 4 * _COARSE / ENTROPY_BINS  # so far out are the outliers that the rest shares a few bins: look closer


def rebin_linearly(
    low: NDArray[np.float64], high: NDArray[np.float64], counts: NDArray[np.float64], bound: float
) -> NDArray[np.float64]:
    """`counts` of the intervals [low, high) shared out over BINS equal bins up to `bound`, in proportion to overlap."""
    edges = np.linspace(0.0, bound, ENTROPY_BINS + 1)
    positions = np.stack([low, np.maximum(high, low * (1 + 1e-12))], axis=1).reshape(-1)
    cumulated = np.cumsum(counts)
    heights = np.stack([cumulated - counts, cumulated], axis=1).reshape(-1)
    bins = np.diff(np.interp(edges, positions, heights, left=0.0, right=float(cumulated[-1])))
    return np.where(bins > _ROUNDING * cumulated[-1], bins, 0.0)


def compute_divergence(bins: NDArray[np.float64], end: int, beyond: float = 0.0) -> float:
    """The divergence of `bins` clipped after `end` from the same merged into LEVELS levels; both sum to one.

    `beyond` is the mass above all bins.
    """
    kept = bins[:end]
    reference = kept.copy()
    reference[-1] += bins[end:].sum() + beyond
    starts = np.arange(ENTROPY_LEVELS) * end // ENTROPY_LEVELS
    holds = kept > 0
    merged = np.add.reduceat(kept, starts)
    members = np.add.reduceat(holds.astype(np.float64), starts)
    level = np.repeat(merged / np.maximum(members, 1.0), np.diff(np.append(starts, end)))
    spread = np.where(holds, level, 0.0)
    if spread.sum() == 0:
        return float("inf")
    p, q = reference / reference.sum(), spread / spread.sum()
    both = p > 0
    if np.any(q[both] == 0):  # only the last bin can hold clipped values where nothing lay before
        q = np.maximum(q, 1e-12)
    return float(np.sum(p[both] * np.log(p[both] / q[both])))
