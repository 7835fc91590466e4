"""Warm-up, drift, and runtimes with two speeds."""

import itertools
from collections.abc import Iterator, Sequence
from math import erfc, exp, inf, log, log1p, sqrt

import numpy as np

from optpipe.stats.means import (
    Interval,
    compute_t_quantile,
    compute_t_tail,
    mean_from_values,
    special,
)
from optpipe.stats.remember import remember

_DIRECT_VALUES = 128
"""The lags of so few values are computed one by one; those of more by a Fourier transform."""


def compute_effective_count(series: np.ndarray, *, caution: float = 0.0) -> float:
    """The number of independent values that `series` (values,) is worth for its mean: n / (1 + 2 Σ ρₖ), at most n.

    The sum of the autocorrelations ends by Geyer's initial monotone sequence (Practical Markov Chain Monte Carlo,
    Statistical Science 7, 1992, section 3.3): sums of two adjacent lags, while they are positive, none above the one
    before it. `caution` raises it by that many of its standard errors (Madras & Sokal, Journal of Statistical Physics 50,
    1988, appendix C), for decisions whether to show a figure at all.
    """
    count = len(series)
    varies, excess, pairs = _measure_correlation(series)
    if not varies:
        return float(count)
    return count / max(1.0, excess * (1 + caution * sqrt(2 * (4 * pairs + 1) / count)))


_Correlation = tuple[bool, float, int]
"""Whether the values vary at all, 1 + 2 Σ ρₖ, and the number of pairs of lags in the sum."""


@remember
def _measure_correlation(series: np.ndarray) -> _Correlation:
    series, count = series.astype(np.float64), len(series)
    if count < 4:
        return False, 1.0, 0
    centered = series - series.mean()
    # no product of BLAS, whose threads wait for each other a hundred times longer than they add
    variance = float(np.square(centered).sum()) / count
    if variance <= 1e-18 * float(np.mean(np.square(series))):
        return False, 1.0, 0
    pairs = _positive_pairs(centered)
    total = float(np.minimum.accumulate(pairs).sum()) if len(pairs) else 0.0
    return True, (2 * total - variance) / variance, len(pairs)


def _positive_pairs(centered: np.ndarray) -> np.ndarray:
    """Autocovariances of lags 2k and 2k + 1 together, up to the first sum that is not positive.

    Each is divided by the number of values, whatever its lag.
    """
    even = len(centered) // 2 * 2
    if len(centered) <= _DIRECT_VALUES:
        covariances = np.correlate(centered, centered, "full")[len(centered) - 1 :][:even]
    else:
        size = 1 << (2 * len(centered) - 1).bit_length()
        spectrum = np.fft.rfft(centered, size)
        covariances = np.fft.irfft(spectrum * np.conj(spectrum), size)[:even]
    covariances = covariances / len(centered)
    pairs = covariances[0::2] + covariances[1::2]
    ends = np.flatnonzero(pairs <= 0)
    return np.asarray(pairs[: ends[0]] if len(ends) else pairs)


STEADY_WINDOWS = 4
STEADY_SPREAD = 1.05
"""Medians of the last windows lie within 5% of each other (perf_analyzer requires 10% of three windows)."""


def is_steady(window_medians: Sequence[float]) -> bool:
    """Whether warm-up may end: the last windows agree, and do not all move the same way by more than noise."""
    last = list(window_medians[-STEADY_WINDOWS:])
    if len(last) < STEADY_WINDOWS or min(last) <= 0:
        return False
    spread = max(last) / min(last)
    falling = all(later < earlier for earlier, later in itertools.pairwise(last))
    return spread <= (1 + (STEADY_SPREAD - 1) / 2 if falling else STEADY_SPREAD)


def find_trend(values: np.ndarray) -> tuple[float, float] | None:
    """A change from the first to the last of `values` (samples,), or there and back, and its p-value; None for under 32 values.

    The change is last over first level (there and back: ends over middle), less one: 0.05 is 5% slower at the end.
    Mann-Kendall test and Theil-Sen slope over the medians of consecutive blocks, in their order and folded in the middle, so
    that the ends meet; the p-value is for both. Returns the change that is less likely chance.
    """
    medians = _cut_into_medians(values)
    if medians is None:
        return None
    blocks = len(medians)
    folded = (medians[: blocks // 2][::-1] + medians[blocks // 2 :]) / 2
    level = float(np.median(medians))
    change, p_value = min(
        _monotone(medians, level), _monotone(folded, level), key=lambda trend: trend[1]
    )
    return change, min(1.0, 2 * p_value)


def _cut_into_medians(values: np.ndarray) -> np.ndarray | None:
    """The medians of up to 20 consecutive blocks, an even number; None for fewer than 8 of 4 values."""
    blocks = min(20, len(values) // 4) // 2 * 2
    if blocks < 8:
        return None
    return np.array([float(np.median(block)) for block in np.array_split(values, blocks)])


def compute_trend_p_value(values: np.ndarray) -> float:
    """The probability that slow noise without a trend moves positive `values` (samples,) as much; 1 for under 32 values.

    The noise of the medians of blocks is autoregressive, and its correlation is measured from the residuals of the trend (the
    means of batches of a correlated series: Law & Kelton, Operations Research 32, 1984). Where the correlation cannot be told from
    1, the noise is a random walk, whose steps show its size (Perron & Yabu, Journal of Econometrics 151, 2009, section 3). The
    p-value is for both trends of `find_trend`, each by regression on all blocks.

    >>> generator = np.random.default_rng(1)
    >>> compute_trend_p_value(np.linspace(1, 1.05, 700) * np.exp(generator.normal(0, 0.01, 700))) < 1e-5
    True
    >>> compute_trend_p_value(np.exp(np.cumsum(generator.normal(0, 0.002, 700)))) < 1e-5
    False
    """
    medians = _cut_into_medians(values)
    if medians is None or float(medians.min()) <= 0:
        return 1.0
    place = np.arange(len(medians), dtype=float)
    trends = place, np.abs(place - place.mean())
    return min(1.0, 2 * min(_regress_on_trend(np.log(medians), trend) for trend in trends))


def _regress_on_trend(series: np.ndarray, trend: np.ndarray) -> float:
    """The two-sided p-value of `trend` in a `series` with autoregressive noise."""
    count = len(series)
    trend, centered = trend - trend.mean(), series - series.mean()
    residuals = centered - (trend @ centered) / (trend @ trend) * trend
    square = float(residuals @ residuals)
    correlation = float(residuals[1:] @ residuals[:-1]) / square if square > 0 else 0.0
    # the bias of an autocorrelation beside a fitted trend (Kendall, Biometrika 41, 1954; Roy & Fuller, Journal of Business &
    # Economic Statistics 19, 2001)
    correlation = min(max(correlation + (2 + 4 * correlation) / count, 0.0), 1.0)
    walks = correlation >= 1 - 1 / sqrt(count)
    kept = 1.0 if walks else correlation
    steps, trends = series[1:] - kept * series[:-1], trend[1:] - kept * trend[:-1]
    if not walks:
        steps, trends = steps - steps.mean(), trends - trends.mean()
    slope, freedom = float(trends @ steps) / float(trends @ trends), count - 2 - (not walks)
    rest = steps - slope * trends
    error = sqrt(float(rest @ rest) / freedom / float(trends @ trends))
    if error == 0:
        return float(slope == 0)
    return 2 * compute_t_tail(abs(slope) / error, freedom)


END = 8
"""The end of a measurement is one of so many parts of it."""
FEWEST_FOR_END = 64
"""Fewer samples have no end to compare with all of them."""
REPEATED_CONFIDENCE = 0.975
"""Processes that change by chance seem to repeat a change in 2.5% of figures. At 99%, five processes in slow noise miss a step of 3% at
the last tenth in 4% of cases, and a build on its limit then passes (`benchmarks/README.md`)."""


def compute_end_change(values: np.ndarray) -> float | None:
    """How far positive `values` (samples,), in order, end from their median, as the logarithm of a ratio; None for a few.

    >>> round(compute_end_change(np.repeat([1.0, 1.03], [150, 50])), 4)
    0.0296
    """
    if len(values) < FEWEST_FOR_END:
        return None
    last, middle = float(np.median(values[-(len(values) // END) :])), float(np.median(values))
    return log(last / middle) if min(last, middle) > 0 else None


def bound_repeated_change(changes: Sequence[float]) -> float:
    """The largest change that the `compute_end_change` of all processes share; 0 if chance explains it.

    Inside one process, slow noise looks like a step. But other processes do not repeat it: their changes are independent and centered
    on 0, whatever the correlation inside each, so that Student's t over processes finds what all have in common (independent
    replications: Law, Simulation Modeling and Analysis, 5th ed., 9.5).

    >>> bound_repeated_change([0.02, -0.01, 0.005, -0.015, 0.01])
    0.0
    >>> round(bound_repeated_change([0.029, 0.030, 0.031, 0.030, 0.030]), 4)
    0.0311
    """
    mean = mean_from_values(changes)
    if mean is None:
        return 0.0
    low, high = mean.interval(REPEATED_CONFIDENCE)
    return max(abs(low), abs(high)) if low > 0 or high < 0 else 0.0


FEWEST_REPEATS = 10
"""Fewer measurements of one input do not show its cost."""


def remove_input_costs(
    values: np.ndarray, inputs: np.ndarray, repeats: float = FEWEST_REPEATS
) -> np.ndarray:
    """Positive `values` (samples,) as if all `inputs` (samples,), the index of each sample's input, cost the same.

    Each value is divided by the median of its input and multiplied by the median of all, so that what is left is the noise within
    inputs (strata: Cochran, Sampling Techniques, 3rd ed., 5.3). Unchanged if one input was measured fewer times than `repeats`.

    >>> remove_input_costs(np.array([1.0, 2.0, 1.0, 2.0]), np.array([0, 1, 0, 1]), repeats=2).tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    which, place, counts = np.unique(inputs, return_inverse=True, return_counts=True)
    if len(which) < 2 or counts.min() < repeats:
        return values
    costs = np.array([float(np.median(values[place == at])) for at in range(len(which))])
    if costs.min() <= 0:
        return values
    leveled = values / costs[place] * float(np.median(values))
    return np.asarray(leveled)


def _monotone(medians: np.ndarray, level: float) -> tuple[float, float]:
    """The Mann-Kendall test by its normal approximation, and the Theil-Sen slope."""
    count = len(medians)
    first, second = np.triu_indices(count, k=1)
    score = float(np.sign(medians[second] - medians[first]).sum())
    deviation = sqrt(count * (count - 1) * (2 * count + 5) / 18)
    p_value = erfc(max(0.0, abs(score) - 1) / deviation / sqrt(2))
    slope = float(np.median((medians[second] - medians[first]) / (second - first)))
    return slope * (count - 1) / level if level else 0.0, p_value


SMALLEST_MODE = 0.05
"""A smaller share of samples are outliers, which percentiles show, not a second speed."""
SMALLEST_GAP = 0.04
"""The slow mode is at least this much slower: a mode of 5% is then found in spite of noise."""
CHANCE = 0.03
"""Largest probability that the second peak is a ripple of the first one's tail."""
_CELLS = 400
_WIDTH = 0.3
"""Standard deviation of the smoothing kernel, in standard deviations of the main peak."""


def find_two_modes(values: np.ndarray) -> tuple[float, float, float] | None:
    """Two separated peaks among `values` (samples,), the faster first, and the share of the slower; None for one peak.

    Peaks and the valley between them are those of a Gaussian kernel estimate on a log scale. The valley must be less than
    half as high as the lower peak, and the counts in two windows of equal width, one at the peak and one at the valley, must
    differ by more than chance explains (a binomial test), which a long tail never satisfies.
    """
    if len(values) < 40 or float(np.min(values)) <= 0:
        return None
    ordered = np.sort(np.log(values))
    bulk = ordered[: int(len(ordered) * (1 - SMALLEST_MODE))]
    half = len(ordered) // 2
    narrowest = float(np.min(ordered[half:] - ordered[: len(ordered) - half]))
    scale = max(
        narrowest / 1.349, 1e-4
    )  # a normal peak's standard deviation, from the narrowest half of the values
    start, end = float(bulk[0]) - 3 * scale, float(ordered[-1]) + 3 * scale
    cell = max(scale / 8, (end - start) / (64 * _CELLS))
    grid = np.arange(start, end + cell, cell)
    width = _WIDTH * scale / cell
    kernel = np.exp(-0.5 * (np.arange(-int(4 * width) - 1, int(4 * width) + 2) / width) ** 2)
    density = np.convolve(np.histogram(ordered, grid)[0], kernel / kernel.sum(), mode="same")
    for peak, valley, other in _pairs_of_peaks(density):
        slow = len(ordered) - int(np.searchsorted(ordered, grid[valley]))
        if min(slow, len(ordered) - slow) < SMALLEST_MODE * len(ordered):
            continue
        fast_at, slow_at = sorted(float(grid[at]) + cell / 2 for at in (peak, other))
        lower = peak if density[peak] < density[other] else other
        at_peak, at_valley = (
            int(
                np.searchsorted(ordered, center + 0.6 * scale)
                - np.searchsorted(ordered, center - 0.6 * scale)
            )
            for center in (float(grid[lower]) + cell / 2, float(grid[valley]) + cell / 2)
        )
        # the probability of so unequal counts if the density is as high at the valley as at the peak
        ripple = (
            float(special.bdtr(at_valley, at_peak + at_valley, 0.5)) if at_peak + at_valley else 1.0
        )
        if slow_at - fast_at >= log1p(SMALLEST_GAP) and ripple < CHANCE:
            return float(np.exp(fast_at)), float(np.exp(slow_at)), slow / len(values)
    return None


def _pairs_of_peaks(density: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """The highest peak with each other peak across a valley of less than half its height: peak, valley, other."""
    peaks = np.flatnonzero((density[1:-1] > density[:-2]) & (density[1:-1] >= density[2:])) + 1
    highest = int(np.argmax(density))
    for other in sorted(
        (int(peak) for peak in peaks if peak != highest), key=lambda at: -density[at]
    ):
        low, high = min(highest, other), max(highest, other)
        valley = low + int(np.argmin(density[low : high + 1]))
        if density[valley] < density[other] / 2:
            yield highest, valley, other


FEWEST_FOR_VARIATION = 200
"""Fewer independent samples do not show their scatter."""


def compute_variation_interval(values: np.ndarray, confidence: float) -> Interval | None:
    """The interval of the coefficient of variation of `values` (samples,), in measured order.

    By the delta method on its logarithm, with the effective count of the influences, taken one standard error smaller; None
    if they are worth fewer than FEWEST_FOR_VARIATION independent ones, or do not vary.
    """
    mean, deviation = (
        float(np.mean(values)),
        float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
    )
    if deviation == 0 or mean == 0:
        return None
    apart = (values - mean) / deviation
    influence = (apart**2 - 1) / 2 - apart * deviation / mean
    worth = compute_effective_count(influence, caution=1.0)
    if worth < FEWEST_FOR_VARIATION:
        return None
    error = float(np.std(influence)) / sqrt(worth)
    half = compute_t_quantile(0.5 + confidence / 2, inf) * error
    return deviation / mean * exp(-half), deviation / mean * exp(half)
