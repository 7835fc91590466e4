"""Is B faster than A? Interleaved blocks, fresh processes as the unit of replication, an interval on the ratio.

Samples of one process share its memory layout, clocks and thread placement: a thousand of them are one observation of
what the next process will do (Georges et al., OOPSLA 2007; Kalibera & Jones, ISMM 2013). So each process gives one
number, the pair of one round gives one log ratio, and Student's t over the rounds gives the interval. Rounds are pairs
in time, which takes slow changes of the machine out.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import exp, isfinite, log, sqrt
from typing import Any

from optpipe.stats.distributions import student_t_quantile, student_t_tail

SMALLEST_ROUNDS = 4
"""With fewer rounds the interval of Student's t is so wide that the comparison would be theatre."""


class Change(StrEnum):
    """What a comparison shows about the contender against the baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Contender over baseline, of a duration: below 1 is faster."""

    value: float
    ci: tuple[float, float]
    change: Change
    rounds: int
    confidence: float
    p_value: float
    smallest_visible: float
    """The smallest relative difference that this many rounds, this noisy, would show in 90 % of runs."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"ci": list(self.ci), "change": str(self.change)}


def ratio_from_rounds(baseline: Sequence[float], contender: Sequence[float], confidence: float = 0.95) -> Ratio:
    """The geometric-mean ratio of paired rounds, each value being one process's statistic (its median latency).

    Mirrors exactly: exchanging the two inverts the value and the interval. Raises ValueError for fewer than
    SMALLEST_ROUNDS rounds or durations that are not positive.
    """
    logs = _log_ratios(baseline, contender)
    count = len(logs)
    centre = sum(logs) / count
    error = sqrt(sum((each - centre) ** 2 for each in logs) / (count - 1) / count)
    return _ratio(centre, error, count - 1, count, confidence)


def _ratio(centre: float, error: float, freedom: float, rounds: int, confidence: float) -> Ratio:
    """From a mean of log ratios and its standard error, by Student's t."""
    quantile = student_t_quantile(0.5 + confidence / 2, freedom)
    low, high = centre - quantile * error, centre + quantile * error
    p_value = 2 * student_t_tail(abs(centre) / error, freedom) if error > 0 else float(centre == 0)
    change = Change.FASTER if high < 0 else Change.SLOWER if low > 0 else Change.NO_DIFFERENCE
    visible = exp((quantile + student_t_quantile(0.9, freedom)) * error) - 1
    return Ratio(exp(centre), (exp(low), exp(high)), change, rounds, confidence, p_value, visible)


def _log_ratios(baseline: Sequence[float], contender: Sequence[float]) -> list[float]:
    if len(baseline) != len(contender) or len(baseline) < SMALLEST_ROUNDS:
        raise ValueError(f"need {SMALLEST_ROUNDS} or more rounds of both, got {len(baseline)} and {len(contender)}")
    if not all(isfinite(value) and value > 0 for value in (*baseline, *contender)):
        raise ValueError("durations must be positive and finite")
    return [log(after) - log(before) for before, after in zip(baseline, contender, strict=True)]


def ratio_from_medians(baseline: Sequence[float], contender: Sequence[float], confidence: float = 0.95) -> Ratio:
    """The ratio of two *unpaired* sets of process statistics (Welch's t on logs): for runs made at different times."""
    first, second = [log(value) for value in baseline], [log(value) for value in contender]
    if min(len(first), len(second)) < SMALLEST_ROUNDS:
        raise ValueError(f"need {SMALLEST_ROUNDS} or more processes of both, got {len(first)} and {len(second)}")
    means = [sum(logs) / len(logs) for logs in (first, second)]
    errors = [
        sum((value - mean) ** 2 for value in logs) / (len(logs) - 1) / len(logs)
        for logs, mean in zip((first, second), means, strict=True)
    ]
    centre, error = means[1] - means[0], sqrt(sum(errors))
    freedom = (
        sum(errors) ** 2 / sum(each**2 / (len(logs) - 1) for each, logs in zip(errors, (first, second), strict=True))
        if error > 0
        else float(len(first) + len(second) - 2)
    )
    return _ratio(centre, error, freedom, min(len(first), len(second)), confidence)
