"""`percentile`: the magnitude below which a share of all values lies, zeros included; 99.99 % unless told otherwise."""

import numpy as np

from optpipe.quantize.statistics import TensorStatistics

HISTOGRAM = True
PERCENT = 99.99


def amax(statistics: TensorStatistics, percent: float = PERCENT) -> float:
    """The range's bound, interpolated inside its bin and never above the largest value."""
    assert statistics.magnitudes is not None
    low, high, counts = statistics.magnitudes.nonzero()
    if not counts.size:
        return 0.0
    rank = percent / 100 * statistics.magnitudes.total - statistics.magnitudes.zeros
    below = np.concatenate([[0.0], np.cumsum(counts)])
    index = min(max(int(np.searchsorted(below, rank, side="left")) - 1, 0), counts.size - 1)
    share = min(max((rank - below[index]) / counts[index], 0.0), 1.0)
    return min(float(low[index] + share * (high[index] - low[index])), statistics.amax)
