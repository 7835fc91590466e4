"""Means and rates with their intervals by Student's t: over windows of one measurement, over processes, over runs."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, hypot, inf, isfinite, log, log1p, sqrt

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
    """The mean of independent `values`, such as the figures of processes; None for fewer than MIN_VALUES, or one that is not finite.

    `known` are the values whose scatter determined the number of values, if any did: they give the error, since the scatter of
    all is too small if a few were enough (Stein, Annals of Mathematical Statistics 16, 1945).
    """
    known = values if known is None else known
    if len(known) < MIN_VALUES or not all(map(isfinite, values)):
        return None
    middle = sum(known) / len(known)
    variance = sum((value - middle) ** 2 for value in known) / (len(known) - 1)
    if min(known) == max(known):  # equal values do not scatter; rounding of their mean is no error
        variance = 0.0
    return Mean(sum(values) / len(values), sqrt(variance / len(values)), len(known) - 1)


def compute_mean_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """The interval of the mean of independent `values`; None if they are too few, equal, or not finite.

    >>> compute_mean_interval([5.0] * 40, 0.95)
    """
    mean = mean_from_values(values)
    return None if mean is None or min(values) == max(values) else mean.interval(confidence)


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
    groups = [list(run) for run in runs]
    every = [value for run in groups for value in run]
    first = first or [len(run) for run in groups]
    known = [value for run, count in zip(groups, first, strict=True) for value in run[:count]]
    pooled = mean_from_values(every, known)
    inside_freedom = len(every) - len(groups)
    if pooled is None or len(groups) < 2 or inside_freedom < 1:
        return pooled
    means = [sum(run) / len(run) for run in groups]
    middle = sum(means) / len(means)
    between = sum(
        len(run) * (mean - pooled.value) ** 2 for run, mean in zip(groups, means, strict=True)
    )
    inside = sum(
        (value - mean) ** 2 for run, mean in zip(groups, means, strict=True) for value in run
    )
    between, inside = between / (len(groups) - 1), inside / inside_freedom
    ratio = between / inside if inside > 0 else (inf if between > 0 else 0.0)
    if (
        float(special.fdtrc(len(groups) - 1, inside_freedom, ratio)) >= POOLING_RISK
    ):  # no difference is seen
        error = pooled.error * sqrt(len(every) * sum(1 / len(run) for run in groups)) / len(groups)
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
        means = [log(sum(run) / len(run)) for run in runs if min(run) > 0]
        if len(means) > 1:
            squares += sum((mean - sum(means) / len(means)) ** 2 for mean in means)
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
    run_freedom = (
        SIMILAR_RUNS_FREEDOM
        if len(runs) < 2
        else min(mean.freedom / (len(runs) - 1), SIMILAR_RUNS_FREEDOM)
    )
    for count in range(len(runs) + 1, MAX_RUNS + 1):
        error = mean.error * sqrt(len(runs) / count)
        level = compute_look_confidence(confidence, count)
        narrow = compute_t_quantile(0.5 + level / 2, run_freedom * (count - 1)) * error <= half
        if narrow and count * processes >= fewest * len(runs):
            return count
    return None


def compute_look_confidence(confidence: float, look: int) -> float:
    """The confidence of an interval at the `look`-th time, so that all looks together err no more often than 1 − `confidence`."""
    return Look(look).compute_confidence(confidence)


@dataclass(frozen=True, slots=True)
class Look:
    """Which of a build's tests on one kind of evidence this is, and out of how many builds it may have been chosen by that evidence.

    Each test spends a part of the error. The k-th gets 1 / (k (k + 1)), which adds up to 1 over all k, so that looking until a
    verdict is decided gains nothing (spending of errors: Lan & DeMets, Biometrika 70, 1983; for tests without a planned end: Foster
    & Stine, Journal of the Royal Statistical Society B 70, 2008). Of `sampled` figures, looks after the second get 2 / (k² (k + 1)),
    0.79 over all: the far tails of Johnson's correction err twice as often as they say at the level of a tenth look (by enumeration,
    `benchmarks/README.md`). Builds that were measured or evaluated together share their part equally, so that the best of them gains
    nothing either (Bonferroni; on the bias of selection: Cawley & Talbot, Journal of Machine Learning Research 11, 2010).

    >>> Look(2).compute_confidence(0.95), Look(1, builds=16).parts
    (0.9916666666666667, 32)
    """

    number: int = 1
    builds: int = 1
    sampled: bool = False
    """Whether the figures are scores of samples (`SampledFigure`), not means over processes."""

    @property
    def parts(self) -> int:
        """The error is divided by it."""
        plain = self.number * (self.number + 1)
        return (plain * max(2, self.number) // 2 if self.sampled else plain) * self.builds

    def compute_confidence(self, confidence: float) -> float:
        return 1 - (1 - confidence) / self.parts


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
    difference = subtract_means(*sides)
    return Mean(
        difference.value, difference.error, min(difference.freedom, scatter.freedom)
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
    inside = sum((half_width / z) ** 2 for half_width in half_widths) / len(half_widths)
    between = max(0.0, mean.error**2 * len(values) - inside)
    return sqrt(between) / abs(mean.value), sqrt(inside) / abs(mean.value)


def compute_ratio_of_sums_interval(
    numerators: np.ndarray, denominators: np.ndarray, confidence: float = 0.95
) -> Interval | None:
    """Student's t interval for a rate, sum over sum, of independent windows; it contains the ratio of these sums.

    The ratio estimator of survey sampling (Cochran, Sampling Techniques, 3rd ed., 2.11): windows may differ in length,
    and longer ones have more weight. The mean of the windows' ratios is another figure and may lie outside. None for
    fewer than MIN_VALUES windows, windows of one ratio, denominators with sum 0, or values that are not finite.
    """
    count, total = len(numerators), float(np.sum(denominators))
    if count < MIN_VALUES or not (0 < total < inf and np.isfinite(numerators).all()):
        return None
    ratio = float(np.sum(numerators)) / total
    error = (
        sqrt(count / (count - 1) * float(np.sum((numerators - ratio * denominators) ** 2))) / total
    )
    low, high = Mean(ratio, error, count - 1).interval(confidence)
    return (low, high) if low < high else None


def compute_part_interval(
    parts: Sequence[int], wholes: Sequence[int], confidence: float
) -> Interval | None:
    """`compute_ratio_of_sums_interval` of windows of which `parts` are no larger than `wholes`, inside [0, 1].

    Windows of one ratio, such as 1, do not exclude others that were not drawn. n windows all miss a share s of them with probability
    (1 - s)ⁿ, and these may have any ratio. None for fewer than MIN_VALUES windows.

    >>> [round(bound, 3) for bound in compute_part_interval([7] * 20, [7] * 20, 0.95)]
    [0.832, 1.0]
    """
    part, whole, count = sum(parts), sum(wholes), len(parts)
    if count < MIN_VALUES or not whole:
        return None
    if all(
        numerator * whole == part * denominator
        for numerator, denominator in zip(parts, wholes, strict=True)
    ):
        unseen, ratio = 1 - ((1 - confidence) / 2) ** (1 / count), part / whole
        return ratio * (1 - unseen), ratio + (1 - ratio) * unseen
    interval = compute_ratio_of_sums_interval(np.array(parts), np.array(wholes), confidence)
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def reject_by_holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Rejects hypotheses so that the probability of rejecting any true one is at most `level`.

    Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979): the smallest p-value must be at most
    level / k, the next level / (k − 1), and so on until one is not. It needs no independence.
    """
    rejected, left = [False] * len(p_values), len(p_values)
    for at in sorted(range(len(p_values)), key=lambda index: p_values[index]):
        if not p_values[at] <= level / left:
            break
        rejected[at], left = True, left - 1
    return rejected


# A few processes that agree cannot exclude that the build has two speeds and all of them ran at one: memory layout and core
# placement differ from process to process. The same holds for processes that were left out as INVALID: they are a share of what
# the build does, and how large a share is known only by their count. With a share p of processes at the other speed, the long run
# is p · (exp(gap) - 1) away from those that count. Distances and gaps are logarithms of ratios.
SPEED_GAP = log1p(0.05)
"""Smallest assumed distance of two speeds of one build: processes of one host differed by 5% (`benchmarks/README.md`)."""
MOST_PROCESSES = 1 << 20
"""More are not suggested."""


@dataclass(frozen=True, slots=True)
class OtherSpeed:
    """What the processes that do not count may add to a figure: those left out, and those of a speed that no process drew.

    They are non-ignorable missing values (Little & Rubin, Statistical Analysis with Missing Data, 3rd ed., chapter 15): their share
    is bounded by its exact interval (Clopper & Pearson, Biometrika 26, 1934), and their distance by the farthest one that was seen.

    >>> speed = OtherSpeed(processes=5)
    >>> round(speed.bound_share(0.025), 3)
    0.522
    """

    processes: int
    """Processes that count."""
    left_out: int = 0
    """Tries that were left out, whatever the reason."""
    gap: float = SPEED_GAP
    """Their largest distance from those that count, as the logarithm of a ratio."""
    percent: float = 0.0
    """The percentile, if the figure is one over all requests; such a figure moves by the whole gap if the share exceeds its tail."""
    repeated: float = 0.0
    """A change that all processes repeat while they are measured, as the logarithm of a ratio: the long run may lie at its end."""

    def bound_share(self, level: float) -> float:
        """The share of processes at the other speed that so few, or fewer, show with probability `level`."""
        if not self.processes:
            return 1.0
        return float(special.betaincinv(self.left_out + 1, self.processes, 1 - level))

    def compute_reach(self, level: float) -> float:
        """The distance of the long run from the processes that count, for the share of `bound_share`."""
        return log1p(self.bound_share(level) * expm1(self.gap))

    def compute_p_value(self, distance: float) -> float:
        """The largest probability of so few processes at the other speed if the long run lies `distance` away."""
        distance -= self.repeated
        if distance >= self.gap:
            return 0.0 if distance > 0 else 1.0
        share = expm1(max(distance, 0.0)) / expm1(self.gap)
        return float(special.bdtr(self.left_out, self.processes + self.left_out, share))

    def compute_pair_p_value(self, distance: float) -> float:
        """The largest probability that two builds of the same long run, with as many processes each, lie `distance` apart.

        All of one build may have run at its fast speed and all of the other at its slow one. Of two shares that add up to the distance,
        equal ones are the likeliest, since the probability of either is log-concave.

        >>> OtherSpeed(processes=5).compute_pair_p_value(SPEED_GAP) == 0.5**10
        True
        """
        distance -= self.repeated
        share = expm1(max(distance, 0.0)) / expm1(self.gap) if self.gap > 0 else inf
        if share >= 2:
            return float(distance <= 0)
        return float(special.bdtr(self.left_out, self.processes + self.left_out, share / 2)) ** 2

    def widen(self, value: float, interval: Interval, confidence: float) -> tuple[Interval, str]:
        """The interval of a positive `value` over the processes that count, with what the others may add, and the reason.

        A change that all processes repeat is added to both ends.
        """
        if self.repeated > 0:
            widened, why = replace(self, repeated=0.0).widen(value, interval, confidence)
            moved = (
                f"every process ended up to {100 * expm1(self.repeated):.1f}% away from its median"
            )
            away = exp(self.repeated)
            return (widened[0] / away, widened[1] * away), "; ".join(filter(None, (why, moved)))
        level = (1 - confidence) / 2
        reach, share = self.compute_reach(level), self.bound_share(level)
        low = min(interval[0], value * exp(-reach))
        high = max(interval[1], value * exp(reach))
        if self.percent > 50 and share >= 1 - self.percent / 100 and self.gap > 0:
            high = value * exp(hypot(self.gap, log(interval[1] / value)))
            why = f"{100 * expm1(self.gap):.1f}% above: {self._explain()}"
            return (low, high), why
        why = f"widened to ±{100 * expm1(reach):.1f}%: {self._explain()}"
        return (low, high), "" if (low, high) == interval else why

    def _explain(self) -> str:
        """Such as `2 of 7 processes were left out, up to 12.0% away`."""
        if not self.left_out:
            what = "a second, slower speed or stalls" if self.percent > 50 else "a second speed"
            return f"{self.processes} processes cannot rule out {what}"
        tries = self.processes + self.left_out
        were = "was" if self.left_out == 1 else "were"
        return (
            f"{self.left_out} of {tries} processes {were} left out, up to"
            f" {100 * expm1(self.gap):.1f}% away"
        )

    def count_processes_for_reach(self, distance: float, level: float) -> float:
        """The number of counting processes that limits the effect to `distance`, if as large a share is left out; or infinity."""
        distance -= self.repeated
        if distance <= 0:
            return inf
        if distance >= self.gap:
            return 1
        share = 1 - self.percent / 100 if self.percent > 50 else expm1(distance) / expm1(self.gap)
        rate = self.left_out / max(self.processes, 1)

        def suffices(count: int) -> bool:
            known = replace(self, processes=count, left_out=ceil(rate * count - 1e-9))
            return known.bound_share(level) <= share * (1 + 1e-9)

        most = 1
        while not suffices(most):
            most *= 2
            if most > MOST_PROCESSES:
                return inf
        return bisect_left(range(most), True, key=suffices)


def combine_speeds(first: OtherSpeed, second: OtherSpeed) -> OtherSpeed:
    """Of the ratio of two figures: the fewer processes, the more left out, the larger gap, and what both repeat."""
    return OtherSpeed(
        min(first.processes, second.processes),
        max(first.left_out, second.left_out),
        max(first.gap, second.gap),
        first.percent,
        first.repeated + second.repeated,
    )
