"""Means and rates with their intervals by Student's t: over windows of one measurement, over processes, over runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, expm1, hypot, inf, log, log1p, sqrt

import numpy as np

from optpipe.core import LazyModule

special = LazyModule("scipy.special")

Interval = tuple[float, float]

POOLING_RISK = 0.25
"""Runs count as one if an F test at this level sees no difference (Bozivich, Bancroft & Hartley, Annals of Mathematical
Statistics 27, 1956).
"""
SIMILAR_RUNS_FREEDOM = 1.5
"""Degrees of freedom for each run after the first if the runs seem alike. With those of all processes the interval would cover
86% (two runs) and 91% (three) if runs scatter as much as processes do, since the F test mostly misses that; with 1.5 it
covers 94% at 95% whatever the scatter of either (`benchmarks/calibration_of_intervals.py`).
"""
MAX_RUNS = 20
"""More are not suggested."""
MIN_VALUES = 3
"""An interval from two values would be 13 standard errors wide on either side."""


@dataclass(frozen=True, slots=True)
class Mean:
    """An estimate whose error has Student's t distribution."""

    value: float
    error: float
    """Standard error."""
    freedom: float

    def interval(self, confidence: float) -> Interval:
        half = compute_t_quantile(0.5 + confidence / 2, self.freedom) * self.error
        return self.value - half, self.value + half

    def take_logarithm(self) -> "Mean":
        """The mean of the logarithm, by the delta method: ratios of values are differences of logarithms."""
        return Mean(log(self.value), self.error / self.value, self.freedom)

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of a value at least this far above `limit` if `limit` is the truth."""
        if self.error == 0:
            return 0.0 if self.value > limit else 1.0
        return compute_t_tail((self.value - limit) / self.error, self.freedom)

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of a value at least this far below `limit` if `limit` is the truth."""
        return Mean(-self.value, self.error, self.freedom).compute_p_value_above(-limit)


def compute_t_quantile(level: float, freedom: float) -> float:
    """The value that Student's T stays below with probability `level`. Raises ValueError unless 0.5 <= level < 1."""
    if not 0.5 <= level < 1:
        raise ValueError(f"no quantile at level {level}: it must be at least 0.5 and under 1")
    return float(special.stdtrit(freedom, level))


def compute_t_tail(value: float, freedom: float) -> float:
    """P(T > value) of Student's T."""
    return float(special.stdtr(freedom, -value))


def mean_from_values(values: Sequence[float], known: Sequence[float] | None = None) -> Mean | None:
    """The mean of independent `values`, such as the figures of processes; None for fewer than MIN_VALUES.

    `known` are the values whose scatter determined the number of values, if any did: they give the error, since the scatter of
    all is too small if a few were enough (Stein, Annals of Mathematical Statistics 16, 1945).
    """
    known = values if known is None else known
    if len(known) < MIN_VALUES:
        return None
    middle = sum(known) / len(known)
    variance = sum((each - middle) ** 2 for each in known) / (len(known) - 1)
    return Mean(sum(values) / len(values), sqrt(variance / len(values)), len(known) - 1)


def predict_next_upper_bound(values: Sequence[float], confidence: float) -> float | None:
    """The value that one more of `values` exceeds with probability (1 − `confidence`) / 2; None for fewer than MIN_VALUES.

    The prediction bound of normal values (Hahn & Meeker, Statistical Intervals, 1991, section 4.8).
    """
    mean = mean_from_values(values)
    if mean is None:
        return None
    deviation = mean.error * sqrt(len(values))
    return mean.value + compute_t_quantile(0.5 + confidence / 2, mean.freedom) * deviation * sqrt(
        1 + 1 / len(values)
    )


def mean_from_runs(
    runs: Sequence[Sequence[float]], first: Sequence[int] | None = None
) -> Mean | None:
    """The mean over processes of several runs; `runs` holds the figures of each run's processes.

    `first` counts each run's processes that determined the number of processes; default: all.

    Processes of one run share its conditions (time, other work, temperature), so every run has the same weight, however
    many processes it has. If an F test shows that the runs differ, the run is the unit and there are as many values as runs;
    otherwise the process is (Kalibera & Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013), with SIMILAR_RUNS_FREEDOM
    for differences that the test misses. One run shows nothing about other runs. None for fewer than MIN_VALUES processes.
    """
    groups = [list(each) for each in runs]
    every = [value for each in groups for value in each]
    first = first or [len(each) for each in groups]
    known = [value for each, count in zip(groups, first, strict=True) for value in each[:count]]
    pooled = mean_from_values(every, known)
    inside_freedom = len(every) - len(groups)
    if pooled is None or len(groups) < 2 or inside_freedom < 1:
        return pooled
    means = [sum(each) / len(each) for each in groups]
    middle = sum(means) / len(means)
    between = sum(
        len(each) * (mean - pooled.value) ** 2 for each, mean in zip(groups, means, strict=True)
    )
    inside = sum(
        (value - mean) ** 2 for each, mean in zip(groups, means, strict=True) for value in each
    )
    between, inside = between / (len(groups) - 1), inside / inside_freedom
    ratio = between / inside if inside > 0 else (inf if between > 0 else 0.0)
    if (
        float(special.fdtrc(len(groups) - 1, inside_freedom, ratio)) >= POOLING_RISK
    ):  # no difference is seen
        error = (
            pooled.error * sqrt(len(every) * sum(1 / len(each) for each in groups)) / len(groups)
        )
        return Mean(middle, error, min(pooled.freedom, SIMILAR_RUNS_FREEDOM * (len(groups) - 1)))
    variance = sum((mean - middle) ** 2 for mean in means) / (len(groups) - 1)
    return Mean(middle, sqrt(variance / len(groups)), len(groups) - 1)


@dataclass(frozen=True, slots=True)
class Scatter:
    """A standard deviation of logarithms, of runs or processes of one build."""

    sd: float
    freedom: float


def estimate_run_scatter(builds: Iterable[Sequence[Sequence[float]]]) -> Scatter | None:
    """The scatter of the means of runs of one build, pooled over `builds`, each with the figures of each run's processes.

    None if no build was measured in two runs.
    """
    squares, freedom = 0.0, 0
    for runs in builds:
        means = [log(sum(each) / len(each)) for each in runs if min(each) > 0]
        if len(means) > 1:
            squares += sum((each - sum(means) / len(means)) ** 2 for each in means)
            freedom += len(means) - 1
    return Scatter(sqrt(squares / freedom), freedom) if freedom else None


def count_runs_needed(
    runs: Sequence[Sequence[float]], half: float, confidence: float, fewest: float = 0
) -> int | None:
    """The total number of runs for an interval of ±`half`, if the others are like `runs` and each is followed by a look.

    Together they have at least `fewest` processes. At least one more than there are; None for more than MAX_RUNS. Raises
    ValueError for fewer than MIN_VALUES processes.
    """
    mean, processes = mean_from_runs(runs), sum(map(len, runs))
    if mean is None:
        raise ValueError(f"{processes} processes: give {MIN_VALUES} or more")
    each = (
        SIMILAR_RUNS_FREEDOM
        if len(runs) < 2
        else min(mean.freedom / (len(runs) - 1), SIMILAR_RUNS_FREEDOM)
    )
    for count in range(len(runs) + 1, MAX_RUNS + 1):
        error = mean.error * sqrt(len(runs) / count)
        level = compute_look_confidence(confidence, count)
        narrow = compute_t_quantile(0.5 + level / 2, each * (count - 1)) * error <= half
        if narrow and count * processes >= fewest * len(runs):
            return count
    return None


def compute_look_confidence(confidence: float, look: int) -> float:
    """The confidence of an interval at the `look`-th time, so that all looks together err no more often than 1 − `confidence`.

    Shares of 1 / (k (k + 1)) add up to 1 over all k, so looking until a verdict is decided gains nothing.
    """
    return 1 - (1 - confidence) / (look * (look + 1))


def subtract_means(new: Mean, old: Mean) -> Mean:
    """The difference of two independent means, with Welch's degrees of freedom (Biometrika 34, 1947)."""
    variance = new.error**2 + old.error**2
    shares = new.error**4 / new.freedom + old.error**4 / old.freedom
    freedom = variance**2 / shares if shares > 0 else new.freedom + old.freedom
    return Mean(new.value - old.value, sqrt(variance), freedom)


def subtract_across_runs(
    new: Mean, old: Mean, runs: tuple[int, int], scatter: Scatter | None
) -> Mean | None:
    """`subtract_means` of logarithms over processes of different runs, `runs` of either; None if a single run's error is unknown.

    The mean of several runs includes the scatter of runs (`mean_from_runs`); the mean of one run takes it from other builds.
    """
    if min(runs) > 1:
        return subtract_means(new, old)
    if scatter is None:
        return None
    sides = (
        mean
        if count > 1
        else Mean(mean.value, max(mean.error, scatter.sd), min(mean.freedom, scatter.freedom))
        for mean, count in zip((new, old), runs, strict=True)
    )
    found = subtract_means(*sides)
    return Mean(
        found.value, found.error, min(found.freedom, scatter.freedom)
    )  # both sides may use the same estimate


def split_scatter(
    values: Sequence[float], half_widths: Sequence[float], confidence: float
) -> tuple[float, float] | None:
    """The scatter of processes' figures between and inside processes, from the half width of each one's interval.

    Standard deviations as shares of the figure. The variance between processes is that of their figures less the mean variance of
    one figure (one-way random effects). None for fewer than MIN_VALUES.
    """
    mean = mean_from_values(values)
    if mean is None or mean.value == 0:
        return None
    z = compute_t_quantile(0.5 + confidence / 2, inf)
    inside = sum((each / z) ** 2 for each in half_widths) / len(half_widths)
    between = max(0.0, mean.error**2 * len(values) - inside)
    return sqrt(between) / abs(mean.value), sqrt(inside) / abs(mean.value)


def compute_ratio_of_sums_interval(
    numerators: np.ndarray, denominators: np.ndarray, confidence: float = 0.95
) -> Interval | None:
    """Student's t interval for a rate, sum over sum, of independent windows; it contains the ratio of these sums.

    The ratio estimator of survey sampling (Cochran, Sampling Techniques, 3rd ed., 2.11): windows may differ in length,
    and longer ones have more weight. The mean of the windows' ratios is another figure and may lie outside. None for
    fewer than MIN_VALUES windows, or denominators with sum 0.
    """
    count, total = len(numerators), float(np.sum(denominators))
    if count < MIN_VALUES or total <= 0:
        return None
    ratio = float(np.sum(numerators)) / total
    error = (
        sqrt(count / (count - 1) * float(np.sum((numerators - ratio * denominators) ** 2))) / total
    )
    return Mean(ratio, error, count - 1).interval(confidence)


def reject_by_holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Rejects hypotheses so that the probability of rejecting any true one is at most `level`.

    Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979): the smallest p-value must be at most
    level / k, the next level / (k − 1), and so on until one is not. It needs no independence.
    """
    found, left = [False] * len(p_values), len(p_values)
    for at in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        if not p_values[at] <= level / left:
            break
        found[at], left = True, left - 1
    return found


# A few processes that agree cannot exclude that the build has two speeds and all of them ran at one: memory layout and core
# placement differ from process to process. With a share p of the processes at the other speed, the long run lies p · gap from the one
# that was drawn, and n processes all drew it with probability (1 - p)ⁿ. Distances and gaps are logarithms of ratios.
SPEED_GAP = log1p(0.05)
"""Smallest assumed distance of two speeds of one build: processes of one host differed by 5% (`benchmarks/README.md`)."""


def compute_unseen_p_value(distance: float, processes: int, gap: float = SPEED_GAP) -> float:
    """The largest probability of drawing `processes` at one speed if the long run lies `distance` from it."""
    return max(0.0, 1 - distance / gap) ** processes


def widen_for_unseen_speed(
    value: float,
    interval: Interval,
    processes: int,
    confidence: float,
    gap: float = SPEED_GAP,
    percent: float = 0.0,
) -> tuple[Interval, str]:
    """The interval of a positive `value` over `processes`, widened by a speed that none of them drew, and the reason.

    A percentile of all requests, `percent` above 50, moves by the whole gap if the share of slow processes can exceed its tail.
    """
    gap, share = max(gap, SPEED_GAP), 1 - exp(log((1 - confidence) / 2) / processes)
    reach = gap * share
    low, high = min(interval[0], value * exp(-reach)), max(interval[1], value * exp(reach))
    if percent > 50 and share >= 1 - percent / 100:
        high = value * exp(hypot(gap, log(interval[1] / value)))
        why = f"{100 * expm1(gap):.1f}% above: {processes} processes cannot rule out a second, slower speed"
        return (low, high), why
    why = f"widened to ±{100 * expm1(reach):.1f}%: {processes} processes cannot rule out a second speed"
    return (low, high), "" if (low, high) == interval else why


def count_processes_for_reach(
    distance: float, level: float, gap: float = SPEED_GAP, percent: float = 0.0
) -> float:
    """The number of processes that limits the effect of an unseen speed to `distance`; infinite for none."""
    other = percent / 100 if percent > 50 and 0 < distance < gap else 1 - distance / gap
    return inf if distance <= 0 else 1 if other <= 0 else ceil(log(level) / log(other) - 1e-9)
