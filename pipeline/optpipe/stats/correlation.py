"""What a series of values that resemble their neighbors is worth, in independent values."""

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_DIRECT_LAGS = 64
"""Lags that are computed one by one; a series that is correlated over more of them goes through a Fourier transform."""


def compute_effective_count(series: "np.ndarray", *, caution: float = 0.0) -> float:
    """How many independent values `series` (values,) is worth for its mean: n / (1 + 2 Σ ρₖ), at most n.

    The sum of the autocorrelations ends by Geyer's initial monotone sequence (Practical Markov Chain Monte Carlo,
    Statistical Science 7, 1992, section 3.3): sums of two neighboring lags, while they are positive, none above the one
    before it. With `caution` it is taken that many of its standard errors larger (Madras & Sokal, Journal of Statistical
    Physics 50, 1988, appendix C), for where a small one decides whether a figure is shown at all.
    """
    import numpy as np

    count = len(series)
    centered = np.asarray(series, dtype=np.float64) - np.mean(series)
    variance = float(centered @ centered) / max(count, 1)
    if count < 4 or variance <= 1e-18 * float(np.mean(np.square(series))):
        return float(count)
    pairs = _positive_pairs(centered)
    total = float(np.minimum.accumulate(pairs).sum()) if len(pairs) else 0.0
    doubt = 1 + caution * sqrt(2 * (4 * len(pairs) + 1) / count)
    return count / max(1.0, (2 * total - variance) / variance * doubt)


def _positive_pairs(centered: "np.ndarray") -> "np.ndarray":
    """Autocovariances of lags 2k and 2k + 1 together, up to the first sum that is not positive.

    Each is divided by the number of values, whatever its lag.
    """
    import numpy as np

    even = len(centered) // 2 * 2
    found: list[float] = []
    for lag in range(0, min(_DIRECT_LAGS, even), 2):  # most series end after a few
        pair = _covariance(centered, lag) + _covariance(centered, lag + 1)
        if pair <= 0:
            return np.array(found)
        found.append(pair)
    if even <= _DIRECT_LAGS:
        return np.array(found)
    covariances = _by_fourier(centered, even)
    pairs = covariances[0::2] + covariances[1::2]
    ends = np.flatnonzero(pairs <= 0)
    return np.asarray(pairs[: ends[0]] if len(ends) else pairs)


def _covariance(centered: "np.ndarray", lag: int) -> float:
    return float(centered[: len(centered) - lag] @ centered[lag:]) / len(centered)


def _by_fourier(centered: "np.ndarray", lags: int) -> "np.ndarray":
    import numpy as np

    size = 1 << (2 * len(centered) - 1).bit_length()
    spectrum = np.fft.rfft(centered, size)
    return np.asarray(np.fft.irfft(spectrum * np.conj(spectrum), size)[:lags] / len(centered))
