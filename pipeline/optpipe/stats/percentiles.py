"""Percentiles as order statistics, with distribution-free intervals and the sample counts that they need.

A percentile is a measured value, never interpolated: the k-th smallest of n, k = ⌈n·p⌉. Its interval is a pair
of order statistics chosen by the binomial distribution of ranks (David & Nagaraja, Order Statistics, 7.1); it assumes
nothing about the shape of the distribution. Consecutive latencies are correlated, so ranks are drawn for the
*effective* sample count: that of the indicator {x ≤ percentile}, bounded by that of the whole series, because the few
samples above a high percentile can look independent by luck.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from math import ceil, floor, log, log1p, sqrt
from typing import Literal

import numpy as np

from optpipe.core.measurement import LatencySummary
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Estimate
from optpipe.stats.means import Interval, compute_t_quantile, mean_from_runs, special
from optpipe.stats.remember import remember
from optpipe.stats.stability import compute_effective_count, compute_variation_interval

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENCE = 0.95
FEWEST_STRETCHES = 25
"""A series worth fewer independent samples is too short to estimate its correlation."""
CAUTION = 1.0
"""Standard errors by which correlation is taken larger than estimated: near FEWEST_STRETCHES the series that are shown are those
whose correlation seems small by luck, and without it their intervals covered p50 in 91%.
"""
TAIL_CREDIT = 5 / 3
"""Samples above a high percentile are less correlated than the series; they count for at most this much more."""
MARGIN = 1.25
"""Factor of the samples that an estimate of correlation requires, so that a second estimate rarely requires more."""


@cache
def count_samples_needed(percent: float, *, risk: float = 0.01) -> int:
    """The samples that a percentile needs: two or more of them lie above it with probability 1 − `risk`.

    MLPerf LoadGen's rule with one sample over the limit allowed: p90 64, p95 130, p99 662, p99.9 6,636.
    """
    inside, most = percent / 100, 2
    while _at_most_one_above(most, inside) > risk:
        most *= 2
    return bisect_left(
        range(most), True, key=lambda count: _at_most_one_above(count, inside) <= risk
    )


def _at_most_one_above(count: int, inside: float) -> float:
    return float(inside**count + count * (1 - inside) * inside ** (count - 1))


def find_order_statistic(ordered: np.ndarray, percent: float) -> float:
    """The ⌈n·p⌉-th smallest value of sorted, non-empty `ordered`."""
    rank = min(max(ceil(len(ordered) * percent / 100 - 1e-9), 1), len(ordered))
    return float(ordered[rank - 1])


@remember
def pool_percentile(processes: Sequence[np.ndarray], percent: float) -> tuple[float, ...]:
    """Each process's contribution to the percentile of all requests, with equal weights of processes; their mean is that percentile.

    The values are the jackknife's: the loss from leaving out one process of `processes`, (samples,) each. Their scatter gives the
    percentile's error, except that of p50 of few processes.
    """
    values, sizes, count = (
        np.concatenate(processes),
        [len(process) for process in processes],
        len(processes),
    )
    order = np.argsort(values, kind="stable")
    values, owner = values[order], np.repeat(np.arange(count), sizes)[order]
    weights = 1 / np.array(sizes)[owner]

    def find(kept: np.ndarray) -> float:
        total = np.cumsum(kept)
        return float(values[np.searchsorted(total, total[-1] * percent / 100 * (1 - 1e-12))])

    whole = find(weights)
    if count < 2:
        return (whole,)
    without = [find(np.where(owner == left_out, 0.0, weights)) for left_out in range(count)]
    return tuple(
        whole + (count - 1) * (sum(without) / count - percentile) for percentile in without
    )


STALL_REQUESTS = 30
"""Assumed length of a stall: consecutive requests of which all are slow or none."""
STALL_GAP = log1p(0.15)
"""Assumed distance of stalls that too few requests may have missed, as the logarithm of a ratio."""


def count_stretches_for_stalls(percent: float, risk: float = 0.025) -> float:
    """The stretches of requests among which stalls that move the percentile are met with probability 1 - `risk`: p99 367, p95 72.

    Of n stretches none is slow with probability pⁿ if 1 - p of them are.
    """
    return log(risk) / log(percent / 100)


def count_stretches(latencies_ns: np.ndarray) -> float:
    """The independent stretches of requests that one process's latencies (samples,) are: of STALL_REQUESTS each, or longer if their
    ranks are correlated for longer.

    >>> count_stretches(np.random.default_rng(0).normal(10e6, 1e5, 700))
    23.333333333333332
    """
    return min(len(latencies_ns) / STALL_REQUESTS, _stretches(np.asarray(latencies_ns, float)))


@remember
def invert_clustered_share(
    runs: Sequence[Sequence[np.ndarray]],
    percent: float,
    confidence: float,
    first: Sequence[int] | None = None,
) -> Interval | None:
    """The interval of the percentile of all requests, by the share of requests beyond a value in each process.

    A value belongs to it unless the mean share of processes beyond it differs from 1 - p, by Student's t over processes nested in
    runs (`mean_from_runs`). The share has a smooth distribution where the percentile lies at a jump of the latencies, at which
    the jackknife of `pool_percentile` fails (Woodruff, Journal of the American Statistical Association 47, 1952; Francisco &
    Fuller, Annals of Statistics 19, 1991). Its error is at least that of independent requests. `runs` holds the values of each
    run's processes, (samples,) each; None for fewer processes than show their scatter.
    """
    processes = [[np.sort(process) for process in run] for run in runs]
    values = np.sort(np.concatenate([process for run in processes for process in run]))
    tail, count = 1 - percent / 100, len(values)

    def bound_share(value: float, *, above: bool) -> float | None:
        """The upper bound of the share above `value`, or the lower bound of the share at least as large."""
        side: Literal["left", "right"] = "right" if above else "left"
        shares = [
            [1 - float(np.searchsorted(process, value, side)) / len(process) for process in run]
            for run in processes
        ]
        mean = mean_from_runs(shares, first)
        if mean is None:
            return None
        error = max(mean.error, sqrt(max(mean.value * (1 - mean.value), 0.0) / count))
        half = compute_t_quantile(0.5 + confidence / 2, mean.freedom) * error
        return mean.value + half if above else mean.value - half

    if bound_share(float(values[0]), above=True) is None:
        return None
    highest = bisect_left(
        range(count - 1),
        True,
        key=lambda at: (bound_share(float(values[at]), above=True) or 0.0) <= tail,
    )
    lowest = bisect_left(
        range(count),
        True,
        key=lambda at: (bound_share(float(values[at]), above=False) or 0.0) < tail,
    )
    return float(values[max(lowest - 1, 0)]), float(values[highest])


def count_samples_for_ranks(percent: float, confidence: float = CONFIDENCE) -> int:
    """The fewest independent samples of which two order statistics enclose the percentile with `confidence`."""
    rarer = min(percent / 100, 1 - percent / 100)
    return max(2, ceil(log((1 - confidence) / 2) / log(1 - rarer) - 1e-9))


def interval_ranks(
    count: float, percent: float, confidence: float = CONFIDENCE
) -> tuple[int, int] | None:
    """Ranks (1-based) whose order statistics enclose the percentile with at least `confidence`; None for too few."""
    if floor(count) < count_samples_for_ranks(percent, confidence):
        return None
    trials, inside, tail = floor(count), percent / 100, (1 - confidence) / 2
    low, high = (
        _binomial_quantile(tail, trials, inside),
        _binomial_quantile(1 - tail, trials, inside) + 1,
    )
    return (low, high) if low >= 1 and high <= trials else None


def _binomial_quantile(level: float, trials: int, probability: float) -> int:
    """The smallest count with P(X ≤ count) ≥ `level`."""
    count = max(0, floor(float(special.bdtrik(level, trials, probability))))
    while float(special.bdtr(count, trials, probability)) < level:
        count += 1
    while count > 0 and float(special.bdtr(count - 1, trials, probability)) >= level:
        count -= 1
    return count


def choose_sample_count(
    durations: np.ndarray, percent: float, longest: int, confidence: float = CONFIDENCE
) -> int:
    """The samples for `percent` and the usual percentiles below it, given the `durations` so far; at most `longest`.

    Decided once, from durations in measured order: repeated checks would stop when the estimate of correlation is small by
    luck. `len(durations)` if they are enough.
    """
    ordered, count, stretches = np.sort(durations), len(durations), _stretches(durations)
    wanted = count
    for percentile in (percent, *(lower for lower in PERCENTS if lower < percent)):
        effective = _effective(
            durations, find_order_statistic(ordered, percentile), percentile, stretches
        )
        ranks = count_samples_for_ranks(percentile, confidence)
        for has, needs in ((effective, ranks), (stretches, _fewest_stretches(count))):
            if has < needs:
                wanted = max(wanted, ceil(MARGIN * count * needs / has))
    return min(wanted, longest)


def summary_from_ns(
    durations_ns: np.ndarray, percents: Sequence[float] = PERCENTS, confidence: float = CONFIDENCE
) -> LatencySummary:
    """Summarizes durations in measured order. Raises ValueError for none."""
    if len(durations_ns) == 0:
        raise ValueError("no samples to summarize")
    values = np.asarray(durations_ns, dtype=np.float64)
    ordered, stretches, cv = np.sort(values), _stretches(values), None
    if len(values) > 1 and float(np.mean(values)):
        interval = compute_variation_interval(values, confidence)
        cv = Estimate(float(values.std(ddof=1) / values.mean()), *(interval or ()))
    shown: dict[str, Estimate] = {}
    withheld: dict[str, str] = {}
    for percent in sorted(percents):
        answer = _percentile(values, ordered, percent, confidence, stretches)
        if withheld and not isinstance(answer, str):  # its few slow samples hide their dependence
            answer = f"{next(iter(withheld))}, which is below it, cannot be shown"
        if isinstance(answer, str):
            withheld[format_percentile_name(percent)] = answer
        else:
            shown[format_percentile_name(percent)] = answer
    return LatencySummary(
        samples=len(values),
        percentiles=shown,
        minimum=float(ordered[0]),
        maximum=float(ordered[-1]),
        mean=float(values.mean()),
        stddev=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        withheld=withheld,
        cv=cv,
        confidence=confidence,
        median=find_order_statistic(ordered, 50.0)
        if len(values) >= count_samples_needed(50.0)
        else None,
    )


def _percentile(
    values: np.ndarray, ordered: np.ndarray, percent: float, confidence: float, stretches: float
) -> Estimate | str:
    count, needed = len(values), count_samples_needed(percent)
    if count < needed:
        return f"needs {needed:,} samples, has {count:,}"
    if ordered[0] == ordered[-1]:
        return f"all {count:,} samples are equal, so that their scatter is not known"
    value = find_order_statistic(ordered, percent)
    effective = _effective(values, value, percent, stretches)
    ranks = interval_ranks(effective, percent, confidence)
    if ranks is None or stretches < _fewest_stretches(count):
        least = min(effective, stretches)
        return f"the {count:,} samples are so correlated that they carry the information of {least:,.0f}"
    scale = count / floor(effective)
    low = max(1, floor(ranks[0] * scale)) if scale > 1 else ranks[0]
    high = min(count, ceil(ranks[1] * scale)) if scale > 1 else ranks[1]
    return Estimate(
        value, min(value, float(ordered[low - 1])), max(value, float(ordered[high - 1]))
    )


def _fewest_stretches(count: int) -> float:
    return min(float(FEWEST_STRETCHES), count / 2)


@remember
def _stretches(values: np.ndarray, caution: float = 0.0) -> float:
    """The effective count of the ranks: outliers do not hide the length of the correlation."""
    return compute_effective_count(_rank(values), caution=caution)


def _rank(values: np.ndarray) -> np.ndarray:
    """For each value (values,), how many are smaller plus how many are not larger."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    ends = np.append(begins[1:], len(values))
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.repeat(begins + ends, ends - begins)
    return ranks


def _effective(values: np.ndarray, value: float, percent: float, stretches: float) -> float:
    """The number of independent samples that `values` are worth for the percentile `value`."""
    bound = _stretches(values, caution=CAUTION) if percent <= 50 else TAIL_CREDIT * stretches
    return min(compute_effective_count(values <= value, caution=CAUTION), bound)


RELAXATIONS_LEFT_OUT = 10
"""A queue that starts empty is measured after this many relaxation times."""
QUEUE_FACTOR = 3
"""Relaxation times per sample of a percentile: queries that wait for the same one are correlated."""


def compute_relaxation_queries(utilization: float) -> float:
    """The relaxation time of a queue with random arrivals in queries, 1 / (1 − u)² at a utilization u below 1.

    Whitt, Planning Queueing Simulations, Management Science 35, 1989.
    """
    return (1 - utilization) ** -2


def count_transient_queries(utilization: float, percent: float) -> int:
    """Queries to leave out at first; at most as many as the percentile needs."""
    most = count_samples_needed(percent)
    return (
        most
        if utilization >= 1
        else min(most, ceil(RELAXATIONS_LEFT_OUT * compute_relaxation_queries(utilization)))
    )


def count_queries_needed(utilization: float, percent: float) -> int:
    """Queries that the percentile needs; at saturation, where no number suffices, as for other loads."""
    factor = (
        1.0
        if utilization >= 1
        else max(1.0, QUEUE_FACTOR * compute_relaxation_queries(utilization))
    )
    return ceil(count_samples_needed(percent) * factor - 1e-6)
