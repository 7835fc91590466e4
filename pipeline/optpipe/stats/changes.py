"""Change points of a series of runs: by energy statistics, with a permutation test.

The method is that of Apache Otava (Fleming and others, Hunter: Using Change Point Detection to Hunt for Performance Regressions,
ICPE 2023): e-divisive means, which splits a series where the distance of the values on both sides is largest and goes on in the parts
(Matteson & James, A Nonparametric Approach for Multiple Change Point Analysis of Multivariate Data, JASA 109, 2014). A split is
tested as they do, by permutations of the runs. Otava's t test does not know that a split is the best of many: it calls three to five
times as many quiet series changed as its p-value says (`benchmarks/change_points.py`).

Only the order of quiet runs must be arbitrary; their values may have any distribution. Runs that resemble their neighbors, as on a
machine that slowly warms up, show changes that are the machine's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np

LEAST_RUNS = 3
"""Runs on either side of a change: one or two slow ones are none."""
RISK = 0.01
"""Probability that a history without a change shows one, over all its series."""
MOST_RUNS = 200
"""The newest runs of a series in which changes are looked for."""
DRAWS, HITS, BLOCK = 9999, 10, 256
"""Permutations at most, and at once; a test ends when HITS of them are as far apart as the runs (Besag & Clifford, Biometrika 78,
1991)."""
SHARE_OF_NEWEST = 0.8
"""Of the risk for changes that last until the newest run; the rest is for levels that came back."""


@dataclass(frozen=True, slots=True)
class Split:
    at: int
    """Position of the first value after the change."""
    p_value: float


def find_changes(
    series: Sequence[Sequence[float] | np.ndarray], risk: float = RISK
) -> list[list[Split]]:
    """The changes of each series, in order, so that one of all series has a false one with probability `risk` at most.

    By Holm's procedure over the series: a part of a series that has a change is split further at the level of the strictest test.
    """
    first = [find_split(values) for values in series]
    known = sorted((split.p_value, at) for at, split in enumerate(first) if split is not None)
    changes: list[list[Split]] = [[] for _ in series]
    for rank, (p_value, at) in enumerate(known):
        if p_value > risk / (len(known) - rank):
            break
        split = first[at]
        assert split is not None
        changes[at] = _divide(series[at], split, risk / len(known))
    return changes


def count_runs_to_show(series: int, risk: float = RISK) -> int:
    """The fewest runs of which some order is improbable enough for a change in one of `series`: first all slow ones, then the others."""
    runs = 2 * LEAST_RUNS
    while 4 / comb(runs, runs // 2) > SHARE_OF_NEWEST * risk / max(series, 1):
        runs += 1
    return runs


def _divide(values: Sequence[float] | np.ndarray, split: Split, level: float) -> list[Split]:
    """`split` and the changes in the parts on both sides of it."""
    changes = [split]
    for begin, end in ((0, split.at), (split.at, len(values))):
        inner = find_split(values[begin:end])
        if inner is not None and inner.p_value <= level:
            parts = _divide(values[begin:end], inner, level)
            changes += [Split(begin + part.at, part.p_value) for part in parts]
    return sorted(changes, key=lambda change: change.at)


def find_split(values: Sequence[float] | np.ndarray) -> Split | None:
    """The split of `values` (runs,) into parts that are farthest apart, and how probable such a distance is by chance.

    The later part reaches to the newest run, or ends earlier: a level that came back hides a change from a test of all later runs.
    Both are tested, the first with most of the risk, since it shows a change soonest.

    None if the runs are too few for two parts. The same values have the same answer: the permutations are seeded.
    """
    given = np.asarray(values, dtype=float)
    if len(given) < 2 * LEAST_RUNS:
        return None
    distances = np.abs(given[:, None] - given[None, :])
    newest = _test(distances, _measure_splits, BLOCK)
    newest = Split(newest.at, min(1.0, newest.p_value / SHARE_OF_NEWEST))
    if newest.p_value <= 10 / DRAWS:
        return newest
    passing = _test(distances, _measure_windows, BLOCK // 8)
    passing = Split(passing.at, min(1.0, passing.p_value / (1 - SHARE_OF_NEWEST)))
    return min(newest, passing, key=lambda split: split.p_value)


def _test(distances: np.ndarray, measure: Callable[[np.ndarray], np.ndarray], block: int) -> Split:
    """The split where `measure`, of distances (orders, runs, runs), is largest, against its largest value in random orders."""
    apart = measure(distances[None])[0]
    at, farthest = LEAST_RUNS + int(apart.argmax()), float(apart.max())
    if farthest <= 0:
        return Split(at, 1.0)
    hits = drawn = 0
    orders = _draw_orders(len(distances))
    for begin in range(0, DRAWS, block):
        order = orders[begin : begin + block]
        permuted = distances[order[:, :, None], order[:, None, :]]
        for hit in measure(permuted).max(axis=1) >= farthest * (1 - 1e-9):
            drawn, hits = drawn + 1, hits + int(hit)
            if hits == HITS:
                return Split(at, hits / drawn)
    return Split(at, (hits + 1) / (drawn + 1))


@cache
def _draw_orders(runs: int) -> np.ndarray:
    """(DRAWS, runs): permutations of the runs, the same each time."""
    generator = np.random.default_rng(runs)
    numbers = np.tile(np.arange(runs, dtype=np.int16), (DRAWS, 1))
    return np.asarray(generator.permuted(numbers, axis=1))


def _measure_splits(distances: np.ndarray) -> np.ndarray:
    """The distance of both parts of every split into all earlier and all later runs: (orders, splits).

    For parts of n and m values it is nm / (n + m) times the energy distance, twice the mean distance between the parts less the mean
    distances within each (Székely & Rizzo, Journal of Statistical Planning and Inference 143, 2013).
    """
    runs = distances.shape[1]
    earlier = np.tri(runs, k=-1)
    to_earlier = np.einsum("bij,ij->bi", distances, earlier).cumsum(axis=1)
    to_later = np.einsum("bij,ji->bi", distances, earlier)[:, ::-1].cumsum(axis=1)[:, ::-1]
    before = np.arange(LEAST_RUNS, runs - LEAST_RUNS + 1)
    after = runs - before
    inside_before, inside_after = to_earlier[:, before - 1], to_later[:, before]
    between = to_earlier[:, -1:] - inside_before - inside_after
    return _compute_energy(before, after, between, inside_before, inside_after)


def _measure_windows(distances: np.ndarray) -> np.ndarray:
    """The largest distance of both parts of every split if the later one may end anywhere: (orders, splits)."""
    orders, runs, _ = distances.shape
    sums = np.zeros(
        (orders, runs + 1, runs + 1)
    )  # over all pairs of the first i and the first j runs
    sums[:, 1:, 1:] = distances.cumsum(axis=1).cumsum(axis=2)
    own = np.einsum("bii->bi", sums)
    cut = np.arange(LEAST_RUNS, runs - LEAST_RUNS + 1)
    end = np.arange(2 * LEAST_RUNS, runs + 1)
    across = sums[:, cut[:, None], end[None, :]]
    inside_before = own[:, cut, None] / 2
    between = across - own[:, cut, None]
    inside_after = (own[:, None, end] - 2 * across + own[:, cut, None]) / 2
    before, after = cut[:, None], end[None, :] - cut[:, None]
    possible = after >= LEAST_RUNS
    energy = _compute_energy(
        before, np.where(possible, after, LEAST_RUNS), between, inside_before, inside_after
    )
    farthest: np.ndarray = np.where(possible, energy, -np.inf).max(axis=2)
    return farthest


def _compute_energy(
    before: np.ndarray,
    after: np.ndarray,
    between: np.ndarray,
    inside_before: np.ndarray,
    inside_after: np.ndarray,
) -> np.ndarray:
    """The distance of two parts, by their numbers of values and their sums of distances over pairs."""
    energy = (
        2 * between / (before * after)
        - 2 * inside_before / (before * (before - 1))
        - 2 * inside_after / (after * (after - 1))
    )
    distance: np.ndarray = before * after / (before + after) * energy
    return distance
