"""`mse`: the range whose INT8 grid has the smallest mean squared error, rounding and clipping together.

It is the tensor's own error that is small, not the model's: outliers a thousand times higher than the rest outweigh
it by their squares, however little the next layer makes of them. There `percentile` and `entropy` do better.
"""

import numpy as np
from numpy.typing import NDArray

from optpipe.quantize.statistics import TensorStatistics

HISTOGRAM = True
LEVELS = 127
_COARSE, _FINE = 96, 24
_SMALLEST = 1 / 1024


def amax(statistics: TensorStatistics) -> float:
    """The range's bound: a geometric search over three decades below the largest value, then a finer one around."""
    assert statistics.magnitudes is not None
    low, high, counts = statistics.magnitudes.nonzero()
    if not counts.size:
        return 0.0
    values = (low + np.minimum(high, statistics.amax)) / 2
    coarse = statistics.amax * np.geomspace(_SMALLEST, 1.0, _COARSE)
    best = int(np.argmin(_compute_errors(values, counts, coarse)))
    around = np.geomspace(coarse[max(best - 1, 0)], coarse[min(best + 1, _COARSE - 1)], _FINE)
    return float(around[int(np.argmin(_compute_errors(values, counts, around)))])


def _compute_errors(
    values: NDArray[np.float64], counts: NDArray[np.float64], bounds: NDArray[np.float64]
) -> list[float]:
    return [compute_squared_error(values, counts, bound) for bound in bounds]


def compute_squared_error(values: NDArray[np.float64], counts: NDArray[np.float64], bound: float) -> float:
    """The sum of squared errors of `values`, each `counts` times, on the symmetric grid that ends at `bound`."""
    scale = bound / LEVELS
    quantized = np.minimum(np.rint(values / scale), LEVELS) * scale
    return float(counts @ (values - quantized) ** 2)
