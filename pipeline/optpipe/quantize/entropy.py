"""`entropy`: the range that loses the least information, by Kullback-Leibler divergence.

After Migacz, "8-bit Inference with TensorRT" (GTC 2017): for each candidate bound the values below it, the clipped ones
added to the last bin, are the reference; the same bins merged into the levels of INT8 and spread out again over the
bins that hold something are the approximation. Zeros are left out: INT8 represents them exactly at any scale. The first bin
counts as full as the second, as in NVIDIA ModelOpt: an activation leaves many values near zero, which any scale keeps, and
they would decide the range alone. The signs have bins of their own, as in ONNX Runtime's calibrator: one histogram of magnitudes
hides clipped values behind others of the opposite sign (an image's bright pixels behind its black background).
"""

import numpy as np
from numpy.typing import NDArray

from optpipe.quantize.histogram import Magnitudes
from optpipe.quantize.statistics import TensorStatistics

HISTOGRAM = True
ENTROPY_BINS = 2048
ENTROPY_LEVELS = 128
_STRIDE = 8
_COMMON = 0.9999
"""Of the values above zero; what is rarer may be an outlier."""
_FARTHEST = 8
"""The histogram ends at this multiple of the common values: with outliers farther out they would share too few bins."""
_ROUNDING = 1e-12
"""Bins that hold less of the whole are empty but for rounding."""


def amax(statistics: TensorStatistics) -> float:
    """The range's bound."""
    assert statistics.magnitudes is not None
    sides = statistics.magnitudes.nonzero_by_sign()
    if not sides:
        return 0.0
    bound = min(statistics.amax, _FARTHEST * _find_common(statistics.magnitudes))
    bins = np.stack(
        [rebin_linearly(low, np.minimum(high, statistics.amax), counts, bound) for low, high, counts in sides]
    )
    beyond = np.array([counts.sum() for _, _, counts in sides]) - bins.sum(axis=1)
    bins[:, 0] = np.where(bins[:, 1] > 0, bins[:, 1], bins[:, 0])
    ends = np.arange(ENTROPY_BINS, ENTROPY_LEVELS - 1, -_STRIDE)  # of equals the widest wins
    losses = [compute_divergence(bins, int(end), beyond) for end in ends]
    return float(bound * ends[int(np.argmin(losses))] / ENTROPY_BINS)


def _find_common(magnitudes: Magnitudes) -> float:
    """The upper edge of the bin below which all but the rarest values lie."""
    _, high, counts = magnitudes.nonzero()
    cumulated = np.cumsum(counts)
    return float(high[int(np.searchsorted(cumulated, _COMMON * cumulated[-1]))])


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


def compute_divergence(bins: NDArray[np.float64], end: int, beyond: NDArray[np.float64]) -> float:
    """The divergence of `bins`, (signs, BINS), clipped after `end` from the same merged into LEVELS levels; both sum to one.

    `beyond` is the mass above all bins, (signs,).
    """
    kept = bins[:, :end]
    reference = kept.copy()
    reference[:, -1] += bins[:, end:].sum(axis=1) + beyond
    starts = np.arange(ENTROPY_LEVELS) * end // ENTROPY_LEVELS
    holds = kept > 0
    merged = np.add.reduceat(kept, starts, axis=1)
    members = np.add.reduceat(holds.astype(np.float64), starts, axis=1)
    level = np.repeat(merged / np.maximum(members, 1.0), np.diff(np.append(starts, end)), axis=1)
    spread = np.where(holds, level, 0.0)
    if spread.sum() == 0:
        return float("inf")
    p, q = reference / reference.sum(), spread / spread.sum()
    both = p > 0
    if np.any(q[both] == 0):  # only the last bin of a sign can hold clipped values where nothing lay before
        q = np.maximum(q, 1e-12)
    return float(np.sum(p[both] * np.log(p[both] / q[both])))
