"""How long a queue has to be watched before its latencies show what it does in the long run."""

from math import ceil

from optpipe.stats.percentiles import count_samples_needed

RELAXATIONS_LEFT_OUT = 10
"""A queue that starts empty is measured after this many relaxation times."""
QUEUE_FACTOR = 3
"""Relaxation times for each sample that a percentile needs: queries that wait for the same one resemble each other."""


def compute_relaxation_queries(utilization: float) -> float:
    """The relaxation time of a queue with random arrivals in queries, 1 / (1 − u)² at a utilization u below 1.

    Whitt, Planning Queueing Simulations, Management Science 35, 1989.
    """
    return (1 - utilization) ** -2


def count_transient_queries(utilization: float, percent: float) -> int:
    """How many queries are left out at first; at most as many as the percentile needs."""
    most = count_samples_needed(percent)
    return most if utilization >= 1 else min(most, ceil(RELAXATIONS_LEFT_OUT * compute_relaxation_queries(utilization)))


def count_queries_needed(utilization: float, percent: float) -> int:
    """How many queries the percentile needs; beyond saturation, where no number suffices, what other loads need."""
    factor = 1.0 if utilization >= 1 else max(1.0, QUEUE_FACTOR * compute_relaxation_queries(utilization))
    return ceil(count_samples_needed(percent) * factor - 1e-6)
