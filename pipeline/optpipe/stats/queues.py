"""What the times of requests show of a server's queue: how busy it is, and whether it falls behind.

The client sees when a request was due and when it was answered, not when a server began it nor how many servers there are.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from optpipe.stats.means import compute_t_quantile, mean_from_values

BATCHES = 20
"""Consecutive batches of requests whose means give an error (Law, Simulation Modeling and Analysis, 5th ed., 9.5.3)."""
FEWEST_WAITING = 2 * BATCHES
"""Answers while others waited that show a server's capacity."""
UNLOADED = 0.05
"""The quantile of the latencies that stands for a request that did not wait."""


def estimate_utilization(latency_ns: NDArray[np.float64]) -> float:
    """The utilization, below 1, of one server with constant service at which requests wait as long as these, (requests,), on average.

    Pollaczek and Khinchine's mean wait in services, w = u / (2 (1 - u)), solved for u. The latency without a wait is that of the
    fastest requests. Services that differ raise the estimate. Several servers that share a queue lower it: their waits are shorter.
    """
    service = float(np.quantile(latency_ns, UNLOADED))
    if service <= 0:
        return 0.0
    wait = max(0.0, float(np.mean(latency_ns)) / service - 1)
    return 2 * wait / (1 + 2 * wait)


def is_falling_behind(
    due_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    rate_per_s: float,
    confidence: float = 0.95,
) -> bool:
    """Whether a backlog is answered more slowly than requests arrive, shown at the upper half of 1 - `confidence`.

    `due_ns` and `end_ns`, (requests,), are of the same requests. The capacity is taken from the gaps between answers while at least
    as many requests were open as at the median answer. Where a queue is stable, answers come faster than arrivals at
    and above every such level, because each rise through it is followed by a fall; with any number of servers.
    """
    due, end = np.sort(due_ns), np.sort(end_ns)
    left = np.searchsorted(due, end, "right") - np.arange(1, len(end) + 1)
    level = max(1, int(np.median(left))) if len(left) else 1
    gaps_s = np.diff(end)[left[:-1] >= level] / 1e9
    if len(gaps_s) < FEWEST_WAITING:
        return False
    mean = mean_from_values([float(batch.mean()) for batch in np.array_split(gaps_s, BATCHES)])
    assert mean is not None
    quantile = compute_t_quantile(0.5 + confidence / 2, mean.freedom)
    return rate_per_s * (mean.value - quantile * mean.error) >= 1


def bound_late_share(late: Sequence[bool], confidence: float = 0.95) -> float:
    """The lower bound of the share of `late` requests, in their order, by the means of BATCHES batches; 0 for too few."""
    if len(late) < FEWEST_WAITING:
        return 0.0
    shares = [float(batch.mean()) for batch in np.array_split(np.asarray(late, float), BATCHES)]
    mean = mean_from_values(shares)
    assert mean is not None
    least = sqrt(max(mean.value * (1 - mean.value), 0.0) / len(late))  # of independent requests
    quantile = compute_t_quantile(0.5 + confidence / 2, mean.freedom)
    return max(0.0, mean.value - quantile * max(mean.error, least))
