"""Is B faster than A? Rounds of subjects in turn, new processes as the unit of replication, an interval on the ratio.

Samples of one process share its memory layout, clocks and thread placement: a thousand of them are one observation of
the next process (Georges et al., OOPSLA 2007; Kalibera & Jones, ISMM 2013). So each process gives one number, the pair of
one round gives one log ratio, and Student's t over the rounds gives the interval. Pairs of a round are close in time, which
removes slow changes of the machine. The order is drawn for each round: a disturbance that recurs every few trials hits the
same subject again and again in A B B A, but not in a drawn order (Fisher, The Design of Experiments, 1935).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, isfinite, log, log1p
from random import Random
from typing import TypeVar

import numpy as np

from optpipe.stats.means import Interval, compute_t_quantile, compute_t_tail, mean_from_values

T = TypeVar("T")


class Change(StrEnum):
    """The contender against the baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Contender over baseline, of a duration: below 1 is faster."""

    value: float
    ci: Interval
    change: Change
    rounds: int
    confidence: float
    p_value: float
    smallest_visible: float
    """The smallest relative difference that this many rounds, this noisy, would show in 90% of runs."""

    @property
    def is_known(self) -> bool:
        """False if all rounds have the same ratio: they do not show their scatter, and nothing is claimed."""
        return self.ci[1] < UNBOUNDED

    def __str__(self) -> str:
        """`1.31 (1.29 to 1.32)`."""
        if not self.is_known:
            return f"{self.value:.2f} ({EQUAL_ROUNDS})"
        return f"{self.value:.2f} ({self.ci[0]:.2f} to {self.ci[1]:.2f})"


UNBOUNDED = 1e30
"""The upper end of an interval that is not known; its inverse is the lower end. JSON has no infinity."""
EQUAL_SHARE = 1e-12
"""Rounds whose ratios differ by less are equal: that is the rounding of a logarithm."""
EQUAL_ROUNDS = "no interval: all rounds have the same ratio, which does not show their scatter"
SMALLEST_ROUNDS = 4
"""With fewer rounds the interval of Student's t is too wide for any conclusion."""


class Order:
    """The order of the subjects in each round, drawn from `seed`, which is recorded with the trials."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"order {seed}")

    def draw(self, subjects: Iterable[T]) -> list[T]:
        """All `subjects`, in the order of the next round."""
        listed = list(subjects)
        return self._random.sample(listed, len(listed))


def alternate(
    subjects: Mapping[str, Callable[[], T]], rounds: int, seed: int
) -> dict[str, list[T]]:
    """Calls every subject once in each round; returns their results in the order of the rounds."""
    order = Order(seed)
    results: dict[str, list[T]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name in order.draw(subjects):
            results[name].append(subjects[name]())
    return results


def ratio_from_rounds(
    baseline: Sequence[float],
    contender: Sequence[float],
    confidence: float = 0.95,
    first: int | None = None,
) -> Ratio:
    """The geometric-mean ratio of paired rounds; each value is one process's statistic (its median latency).

    `first` is the number of rounds whose scatter determined their total: their scatter then gives the interval
    (`mean_from_values`), and the error rate stays that of a fixed number of rounds.
    Exchanging the two inverts the value and the interval. Raises ValueError for fewer than SMALLEST_ROUNDS rounds or
    durations that are not positive.
    """
    logs = _log_ratios(baseline, contender)
    count = len(logs)
    mean = mean_from_values(logs, logs[: first or count])
    if mean is None:
        raise ValueError(f"the first {first} rounds are too few to know their scatter")
    return _ratio(mean.value, mean.error, mean.freedom, count, confidence)


MOST_ENUMERATED = 16
"""Rounds whose exchanges are enumerated; the mean of more is close enough to normal for Student's t."""


def compute_exchange_p_value(baseline: Sequence[float], contender: Sequence[float]) -> float:
    """How often exchanging the two in some rounds gives a mean log ratio as far from 0; 0 for over MOST_ENUMERATED rounds.

    Fisher's randomization test for rounds of drawn order: exact for any disturbance that affects both alike. Student's t over a few
    rounds is not exact for a disturbance with two levels.
    """
    logs = np.array(_log_ratios(baseline, contender))
    if len(logs) > MOST_ENUMERATED:
        return 0.0
    signs = 1 - 2 * (
        (np.arange(1 << (len(logs) - 1))[:, None] >> np.arange(len(logs))) & 1
    )  # the last keeps its sign
    return float(np.mean(np.abs(signs @ logs) >= abs(logs.sum()) * (1 - 1e-9)))


def count_rounds_needed(ratio: Ratio, resolution: float) -> int:
    """The number of rounds as noisy as those of `ratio` that would show a difference of `resolution` in 90% of runs.

    As many as there were if they do not show their noise.
    """
    if not ratio.is_known:
        return ratio.rounds
    return ceil(ratio.rounds * (log1p(ratio.smallest_visible) / log1p(resolution)) ** 2 - 1e-9)


def count_rounds_to_settle(ratio: Ratio, limit: float) -> int:
    """The number of rounds as noisy as those of `ratio`, around the same value, that puts its interval below 1 + limit or above 1.

    Twice as many as there were if the interval is there already, but exchanging the two in so few rounds does not show it.
    """
    center = log(ratio.value)
    half, room = log(ratio.ci[1]) - center, max(log1p(limit) - center, center)
    needed = ceil(ratio.rounds * (half / room) ** 2)
    return needed if needed > ratio.rounds else 2 * ratio.rounds


def _ratio(center: float, error: float, freedom: float, rounds: int, confidence: float) -> Ratio:
    """From a mean of log ratios and its standard error, by Student's t; nothing is known without any scatter."""
    if error <= EQUAL_SHARE * max(1.0, abs(center)):
        ci = 1 / UNBOUNDED, UNBOUNDED
        value = exp(center)
        return Ratio(value, ci, Change.NO_DIFFERENCE, rounds, confidence, 1.0, UNBOUNDED)
    quantile = compute_t_quantile(0.5 + confidence / 2, freedom)
    low, high = center - quantile * error, center + quantile * error
    p_value = 2 * compute_t_tail(abs(center) / error, freedom)
    change = Change.FASTER if high < 0 else Change.SLOWER if low > 0 else Change.NO_DIFFERENCE
    visible = exp((quantile + compute_t_quantile(0.9, freedom)) * error) - 1
    return Ratio(exp(center), (exp(low), exp(high)), change, rounds, confidence, p_value, visible)


def _log_ratios(baseline: Sequence[float], contender: Sequence[float]) -> list[float]:
    if len(baseline) != len(contender) or len(baseline) < SMALLEST_ROUNDS:
        raise ValueError(
            f"need {SMALLEST_ROUNDS} or more rounds of both, got {len(baseline)} and {len(contender)}"
        )
    if not all(isfinite(value) and value > 0 for value in (*baseline, *contender)):
        raise ValueError("durations must be positive and finite")
    return [log(after) - log(before) for before, after in zip(baseline, contender, strict=True)]
