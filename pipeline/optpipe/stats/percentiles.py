"""Percentiles as order statistics, with distribution-free intervals and the sample counts that they need.

A percentile is a value that was measured, never interpolated: the k-th smallest of n, k = ⌈n·p⌉. Its interval is a pair
of order statistics chosen by the binomial distribution of ranks (David & Nagaraja, Order Statistics, 7.1); it assumes
nothing of the shape of the distribution. Latencies that follow each other are correlated, so ranks are drawn for the
*effective* sample count, which batch means of the indicator {x ≤ percentile} give.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, floor, sqrt
from typing import TYPE_CHECKING

from optpipe.core.measurement import LatencySummary, Percentile, format_percentile_name
from optpipe.stats.distributions import binomial_quantile

if TYPE_CHECKING:
    import numpy as np

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENCE = 0.95


@cache
def count_samples_needed(percent: float, *, risk: float = 0.01) -> int:
    """How many samples a percentile needs: two or more of them lie above it with probability 1 − `risk`.

    MLPerf LoadGen's rule with one sample over the limit allowed: p90 64, p95 130, p99 662, p99.9 6,636.
    """
    inside = percent / 100
    low, high = 1, 2
    while _at_most_one_above(high, inside) > risk:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _at_most_one_above(middle, inside) > risk else (low, middle)
    return high


def _at_most_one_above(count: int, inside: float) -> float:
    return float(inside**count + count * (1 - inside) * inside ** (count - 1))


def find_order_statistic(ordered: "np.ndarray", percent: float) -> float:
    """The ⌈n·p⌉-th smallest value of sorted, non-empty `ordered`."""
    rank = min(max(ceil(len(ordered) * percent / 100 - 1e-9), 1), len(ordered))
    return float(ordered[rank - 1])


def interval_ranks(count: float, percent: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Ranks (1-based) whose order statistics enclose the percentile with at least `confidence`; None for too few."""
    trials, inside, tail = floor(count), percent / 100, (1 - confidence) / 2
    low = binomial_quantile(tail, trials, inside)
    high = binomial_quantile(1 - tail, trials, inside) + 1
    return (low, high) if low >= 1 and high <= trials else None


def effective_count(indicator: "np.ndarray") -> float:
    """How many independent samples a sequence of 0 and 1 is worth: n·var / (b·var of means over batches of b)."""
    import numpy as np

    count = len(indicator)
    variance = float(np.var(indicator))
    size = int(sqrt(count))
    if variance == 0 or size < 4:
        return float(count)
    batches = indicator[: size * (count // size)].reshape(-1, size).mean(axis=1)
    inflation = size * float(np.var(batches, ddof=1)) / variance
    return count / max(1.0, inflation)


def summary_from_ns(
    durations_ns: "np.ndarray", percents: Sequence[float] = PERCENTS, confidence: float = CONFIDENCE
) -> LatencySummary:
    """Summarizes durations in the order in which they were measured. Raises ValueError for none."""
    import numpy as np

    if len(durations_ns) == 0:
        raise ValueError("no samples to summarize")
    values = np.asarray(durations_ns, dtype=np.float64) / 1e6
    ordered = np.sort(values)
    found: list[Percentile] = []
    withheld: dict[str, str] = {}
    for percent in sorted(percents):
        answer = _percentile(values, ordered, percent, confidence)
        if withheld and not isinstance(answer, str):  # its few slow samples hide that they depend on each other
            answer = f"{next(iter(withheld))}, which is below it, cannot be shown"
        if isinstance(answer, str):
            withheld[format_percentile_name(percent)] = answer
        else:
            found.append(answer)
    return LatencySummary(
        samples=len(values),
        percentiles=tuple(found),
        minimum=float(ordered[0]),
        maximum=float(ordered[-1]),
        mean=float(values.mean()),
        stddev=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        withheld=withheld,
        confidence=confidence,
    )


def supports_percentile(durations: "np.ndarray", percent: float, confidence: float = CONFIDENCE) -> bool:
    """Whether durations, in the order in which they were measured, are enough and independent enough for this percentile.

    And for those below it that are usual, without which it would be withheld.
    """
    import numpy as np

    ordered, wanted = np.sort(durations), (percent, *(each for each in PERCENTS if each < percent))
    return all(not isinstance(_percentile(durations, ordered, each, confidence), str) for each in wanted)


def _percentile(values: "np.ndarray", ordered: "np.ndarray", percent: float, confidence: float) -> Percentile | str:
    count, needed = len(values), count_samples_needed(percent)
    if count < needed:
        return f"needs {needed:,} samples, has {count:,}"
    value = find_order_statistic(ordered, percent)
    effective = effective_count((values <= value).astype(float))
    ranks = interval_ranks(effective, percent, confidence)
    if ranks is None:
        return f"samples follow each other too closely: {count:,} are worth {effective:,.0f} independent ones"
    scale = count / floor(effective)
    low = max(1, floor(ranks[0] * scale)) if scale > 1 else ranks[0]
    high = min(count, ceil(ranks[1] * scale)) if scale > 1 else ranks[1]
    return Percentile(percent, value, (min(value, float(ordered[low - 1])), max(value, float(ordered[high - 1]))))
