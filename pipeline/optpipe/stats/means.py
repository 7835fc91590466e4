"""Means and rates with their intervals by Student's t: over windows of one measurement, over processes, over runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, expm1, hypot, inf, log, log1p, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


POOLING_RISK = 0.25
"""Runs count as one where an F test at this level sees no difference (Bozivich, Bancroft & Hartley, Annals of Mathematical
Statistics 27, 1956)."""
SIMILAR_RUNS_FREEDOM = 1.5
"""Degrees of freedom for each run after the first where the runs seem alike. With those of all processes the interval would cover
86 % (two runs) and 91 % (three) where runs scatter as much as processes do, for the F test mostly misses that; with 1.5 it
covers 94 % at 95 % whatever the scatter of either (`benchmarks/calibration_of_intervals.py`)."""
MAX_RUNS = 20
"""More are not suggested."""
MIN_VALUES = 3
"""An interval from two values would be 13 standard errors wide either way."""


@dataclass(frozen=True, slots=True)
class Mean:
    """An estimate whose error has Student's t distribution."""

    value: float
    error: float
    """Standard error."""
    freedom: float

    def interval(self, confidence: float) -> tuple[float, float]:
        """Two-sided."""
        half = compute_t_quantile(0.5 + confidence / 2, self.freedom) * self.error
        return self.value - half, self.value + half

    def take_logarithm(self) -> "Mean":
        """That of a positive value, by the delta method: ratios of the values themselves come of differences of these."""
        return Mean(log(self.value), self.error / self.value, self.freedom)

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of a value this far above `limit` or farther, were `limit` the truth."""
        if self.error == 0:
            return 0.0 if self.value > limit else 1.0
        return compute_t_tail((self.value - limit) / self.error, self.freedom)

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of a value this far below `limit` or farther, were `limit` the truth."""
        return Mean(-self.value, self.error, self.freedom).compute_p_value_above(-limit)


def compute_t_quantile(level: float, freedom: float) -> float:
    """The value that Student's T stays below with probability `level`. Raises ValueError unless 0.5 <= level < 1."""
    from scipy.special import stdtrit

    if not 0.5 <= level < 1:
        raise ValueError(f"no quantile at level {level}: it must be at least 0.5 and under 1")
    return float(stdtrit(freedom, level))


def compute_t_tail(value: float, freedom: float) -> float:
    """P(T > value) of Student's T."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -value))


def mean_from_values(values: Sequence[float], known: Sequence[float] | None = None) -> Mean | None:
    """The mean of independent `values`, such as the figures of processes; None for fewer than MIN_VALUES.

    `known` are those of the values whose scatter decided how many there would be, if any did: the error is then theirs, for
    the scatter of all is too small where few were enough (Stein, Annals of Mathematical Statistics 16, 1945).
    """
    known = values if known is None else known
    if len(known) < MIN_VALUES:
        return None
    middle = sum(known) / len(known)
    variance = sum((each - middle) ** 2 for each in known) / (len(known) - 1)
    return Mean(sum(values) / len(values), sqrt(variance / len(values)), len(known) - 1)


def predict_next_upper_bound(values: Sequence[float], confidence: float) -> float | None:
    """What one more of such `values` exceeds with probability (1 − `confidence`) / 2; None for fewer than MIN_VALUES.

    The prediction bound of normal values (Hahn & Meeker, Statistical Intervals, 1991, section 4.8).
    """
    mean = mean_from_values(values)
    if mean is None:
        return None
    deviation = mean.error * sqrt(len(values))
    return mean.value + compute_t_quantile(0.5 + confidence / 2, mean.freedom) * deviation * sqrt(1 + 1 / len(values))


def mean_from_runs(runs: Sequence[Sequence[float]], first: Sequence[int] | None = None) -> Mean | None:
    """The mean over processes that were started in several runs; `runs` holds the figures of each run's processes.

    `first` says how many of each run's processes decided how many there would be; all, where it is not given.

    Processes of one run share what the run had (the hour, other work, the temperature), so every run weighs the same, however
    many processes it has. Where an F test sees that the runs differ, the run is the unit and there are as many values as runs;
    otherwise the process is (Kalibera & Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013), with SIMILAR_RUNS_FREEDOM
    for what the test misses. One run shows nothing about other runs. None for fewer than MIN_VALUES processes.
    """
    groups = [list(each) for each in runs]
    every = [value for each in groups for value in each]
    from scipy.special import fdtrc

    first = first or [len(each) for each in groups]
    pooled = mean_from_values(
        every, [value for each, known in zip(groups, first, strict=True) for value in each[:known]]
    )
    inside_freedom = len(every) - len(groups)
    if pooled is None or len(groups) < 2 or inside_freedom < 1:
        return pooled
    means = [sum(each) / len(each) for each in groups]
    middle = sum(means) / len(means)
    between = sum(len(each) * (mean - pooled.value) ** 2 for each, mean in zip(groups, means, strict=True))
    inside = sum((value - mean) ** 2 for each, mean in zip(groups, means, strict=True) for value in each)
    between, inside = between / (len(groups) - 1), inside / inside_freedom
    ratio = between / inside if inside > 0 else (inf if between > 0 else 0.0)
    if float(fdtrc(len(groups) - 1, inside_freedom, ratio)) >= POOLING_RISK:  # no difference is seen
        error = pooled.error * sqrt(len(every) * sum(1 / len(each) for each in groups)) / len(groups)
        return Mean(middle, error, min(pooled.freedom, SIMILAR_RUNS_FREEDOM * (len(groups) - 1)))
    variance = sum((mean - middle) ** 2 for mean in means) / (len(groups) - 1)
    return Mean(middle, sqrt(variance / len(groups)), len(groups) - 1)


@dataclass(frozen=True, slots=True)
class Scatter:
    """A standard deviation of logarithms: how much runs, or processes, of one build differ."""

    sd: float
    freedom: float


def estimate_run_scatter(builds: Iterable[Sequence[Sequence[float]]]) -> Scatter | None:
    """How much the means of runs of one build differ, pooled over `builds`, each with the figures of each run's processes.

    None where no build was measured in two runs.
    """
    squares, freedom = 0.0, 0
    for runs in builds:
        means = [log(sum(each) / len(each)) for each in runs if min(each) > 0]
        if len(means) > 1:
            squares += sum((each - sum(means) / len(means)) ** 2 for each in means)
            freedom += len(means) - 1
    return Scatter(sqrt(squares / freedom), freedom) if freedom else None


def count_runs_needed(runs: Sequence[Sequence[float]], half: float, confidence: float, fewest: float = 0) -> int | None:
    """How many runs in all make the interval `half` wide on either side, if the others are like `runs` and a look is after each.

    Together they have `fewest` processes or more. At least one more than there are; None for more than MAX_RUNS. Raises
    ValueError for fewer than MIN_VALUES processes.
    """
    mean, processes = mean_from_runs(runs), sum(map(len, runs))
    if mean is None:
        raise ValueError(f"{processes} processes: give {MIN_VALUES} or more")
    each = SIMILAR_RUNS_FREEDOM if len(runs) < 2 else min(mean.freedom / (len(runs) - 1), SIMILAR_RUNS_FREEDOM)
    for count in range(len(runs) + 1, MAX_RUNS + 1):
        error = mean.error * sqrt(len(runs) / count)
        level = compute_look_confidence(confidence, count)
        narrow = compute_t_quantile(0.5 + level / 2, each * (count - 1)) * error <= half
        if narrow and count * processes >= fewest * len(runs):
            return count
    return None


def compute_look_confidence(confidence: float, look: int) -> float:
    """The confidence of an interval at the `look`-th time, so that all looks together err no more often than 1 − `confidence`.

    Shares of 1 / (k (k + 1)) add up to 1 over all k, so whoever looks until a verdict is decided gains nothing by it.
    """
    return 1 - (1 - confidence) / (look * (look + 1))


def subtract_means(new: Mean, old: Mean) -> Mean:
    """The difference of two independent means, with Welch's degrees of freedom (Biometrika 34, 1947)."""
    variance = new.error**2 + old.error**2
    shares = new.error**4 / new.freedom + old.error**4 / old.freedom
    freedom = variance**2 / shares if shares > 0 else new.freedom + old.freedom
    return Mean(new.value - old.value, sqrt(variance), freedom)


def subtract_across_runs(new: Mean, old: Mean, runs: tuple[int, int], scatter: Scatter | None) -> Mean | None:
    """As `subtract_means`, of logarithms over processes of different runs, `runs` of either; None where a single one's error is not known.

    The mean of several runs holds what runs scatter already (`mean_from_runs`); that of one gets it from other builds.
    """
    if min(runs) > 1:
        return subtract_means(new, old)
    if scatter is None:
        return None
    sides = (
        mean if count > 1 else Mean(mean.value, max(mean.error, scatter.sd), min(mean.freedom, scatter.freedom))
        for mean, count in zip((new, old), runs, strict=True)
    )
    found = subtract_means(*sides)
    return Mean(
        found.value, found.error, min(found.freedom, scatter.freedom)
    )  # both sides may rest on the one estimate


def count_processes_needed(first: Sequence[float], half: float, confidence: float) -> int:
    """How many processes make the interval `half` wide on either side, decided from the figures of the `first` alone.

    Stein's two-stage rule (Annals of Mathematical Statistics 16, 1945): whoever instead looks after every process whether
    the interval is narrow enough stops when the scatter is small by luck. At least as many as there are.
    """
    mean = mean_from_values(first)
    if mean is None or half <= 0:
        raise ValueError(
            f"{len(first)} processes and an interval of {half:g}: give {MIN_VALUES} or more and a width above 0"
        )
    quantile = compute_t_quantile(0.5 + confidence / 2, mean.freedom)
    return max(len(first), ceil(len(first) * (quantile * mean.error / half) ** 2 - 1e-9))


def split_scatter(
    values: Sequence[float], half_widths: Sequence[float], confidence: float
) -> tuple[float, float] | None:
    """The scatter of processes' figures between and inside processes, from the half width of each one's interval.

    Standard deviations as shares of the figure; that between is without what the noise inside explains.

    The variance between processes' figures less the mean variance of one figure (one-way random effects). None for fewer
    than MIN_VALUES.
    """
    mean = mean_from_values(values)
    if mean is None or mean.value == 0:
        return None
    z = compute_t_quantile(0.5 + confidence / 2, inf)
    inside = sum((each / z) ** 2 for each in half_widths) / len(half_widths)
    between = max(0.0, mean.error**2 * len(values) - inside)
    return sqrt(between) / abs(mean.value), sqrt(inside) / abs(mean.value)


def compute_ratio_of_sums_interval(
    numerators: "np.ndarray", denominators: "np.ndarray", confidence: float = 0.95
) -> tuple[float, float] | None:
    """Student's t interval for a rate, sum over sum, of independent windows; it holds the ratio of these very sums.

    The ratio estimator of survey sampling (Cochran, Sampling Techniques, 3rd ed., 2.11): windows may differ in length,
    and the longer weighs more. The mean of the windows' own ratios is another figure and may lie outside. None for
    fewer than MIN_VALUES windows, or denominators that add up to nothing.
    """
    import numpy as np

    count, total = len(numerators), float(np.sum(denominators))
    if count < MIN_VALUES or total <= 0:
        return None
    ratio = float(np.sum(numerators)) / total
    residuals = numerators - ratio * denominators
    error = sqrt(count / (count - 1) * float(np.sum(residuals**2))) / total
    return Mean(ratio, error, count - 1).interval(confidence)


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


# What a few processes that agree cannot exclude is that the build has two speeds, and all of them ran at one: memory layout and core
# placement differ from process to process. With a share p of the processes at the other speed, the long run lies p · gap from the one
# that was drawn, and n processes all drew it with probability (1 - p)ⁿ. Distances and gaps are logarithms of ratios.
SPEED_GAP = log1p(0.05)
"""How far apart two speeds of one build are taken to be at least: processes of one host were seen 5 % apart (`benchmarks/README.md`)."""


def compute_unseen_p_value(distance: float, processes: int, gap: float = SPEED_GAP) -> float:
    """The largest probability of drawing `processes` at one speed where the long run lies `distance` from it."""
    return max(0.0, 1 - distance / gap) ** processes


def widen_for_unseen_speed(
    value: float,
    interval: tuple[float, float],
    processes: int,
    confidence: float,
    gap: float = SPEED_GAP,
    percent: float = 0.0,
) -> tuple[tuple[float, float], str]:
    """The interval of a positive `value` over `processes`, as wide as a speed that none of them drew may move the long run, and why.

    A percentile of all requests, `percent` above 50, moves by the whole gap where a share of processes that it leaves is slow.
    """
    gap, share = max(gap, SPEED_GAP), 1 - exp(log((1 - confidence) / 2) / processes)
    reach = gap * share
    low, high = min(interval[0], value * exp(-reach)), max(interval[1], value * exp(reach))
    if percent > 50 and share >= 1 - percent / 100:
        high = value * exp(hypot(gap, log(interval[1] / value)))
        why = f"{100 * expm1(gap):.1f} % above: a slower speed that none of the {processes} processes ran at would show there"
        return (low, high), why
    why = f"widened to ±{100 * expm1(reach):.1f} %: all {processes} may have run at one of two speeds"
    return (low, high), "" if (low, high) == interval else why


def count_processes_for_reach(distance: float, level: float, gap: float = SPEED_GAP, percent: float = 0.0) -> float:
    """How many processes bring what an unseen speed can move down to `distance`; infinite for none."""
    other = percent / 100 if percent > 50 and 0 < distance < gap else 1 - distance / gap
    return inf if distance <= 0 else 1 if other <= 0 else ceil(log(level) / log(other) - 1e-9)
