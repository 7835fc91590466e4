"""A criterion compared with what was observed: PASS, FAIL or INCONCLUSIVE, with the reason and the remedy.

The rule, for a limit L and an interval [low, high] around the observed value ("at most"; "at least" mirrors it):
PASS where high ≤ L, FAIL where the value is so far above L that Holm's procedure over all figures judged together rejects L,
INCONCLUSIVE else. The interval and the p-value of processes allow for a second speed that none of them drew (`stats.means`).
A cap (random weights, an INVALID
measurement, a foreign environment) leaves nothing to judge: INCONCLUSIVE, whatever the figures say.
Hence the laws that the tests hold it to: loosening a limit never turns PASS or INCONCLUSIVE into FAIL, and a build
exactly on the limit passes no more often than the interval's error rate.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist

from optpipe.core.verdict import CriterionResult, Missing, Observation, Verdict, combine_verdicts
from optpipe.report.document import format_observed
from optpipe.signoff.policy import Criterion
from optpipe.signoff.policy_format import Sense
from optpipe.stats.means import SPEED_GAP, compute_look_confidence, compute_unseen_p_value, reject_by_holm
from optpipe.stats.paired import compute_normal_quantile


def judge_criteria(
    observed: Sequence[tuple[Criterion, Sequence[Observation] | Missing]], confidence: float, look: int = 1
) -> list[CriterionResult]:
    """Judges all criteria of a policy. The worst observation of a criterion decides it and is the one shown.

    PASS by each interval alone: all of them must keep, so none needs a correction (Berger, Technometrics 24, 1982). FAIL only
    where Holm's procedure over everything observed rejects the limit at half of what the confidence leaves to this `look`.
    """
    confidence = compute_look_confidence(confidence, look)
    every = [(criterion, one) for criterion, found in observed if not isinstance(found, Missing) for one in found]
    tests = [
        (id(one), p)
        for criterion, one in every
        if (p := _compute_p_value(criterion, one, confidence, look)) is not None
    ]
    rejected = reject_by_holm([p for _, p in tests], (1 - confidence) / 2)
    broken = {name for (name, _), hit in zip(tests, rejected, strict=True) if hit}
    return [_judge_criterion(criterion, found, broken, len(tests)) for criterion, found in observed]


def _judge_criterion(
    criterion: Criterion, found: Sequence[Observation] | Missing, broken: set[int], tests: int
) -> CriterionResult:
    if isinstance(found, Missing) or not found:
        absent = found if isinstance(found, Missing) else Missing("no measurement", "measure it first")
        return _make_result(criterion, Verdict.INCONCLUSIVE, absent.reason, absent.remedy)
    verdict, _, worst = min(
        ((_decide_verdict(criterion, one, broken), _margin(criterion, one), one) for one in found), key=_rank_badness
    )
    if worst.blockers:
        reason = "; ".join(dict.fromkeys(cap.reason for cap in worst.blockers)) + (
            f" ({worst.about})" if worst.about else ""
        )
        remedy = "; ".join(dict.fromkeys(cap.remedy for cap in worst.blockers))
        return _make_result(criterion, verdict, reason, remedy, worst)
    reason = _reason(criterion, worst, verdict)
    if verdict is Verdict.INCONCLUSIVE and _is_beyond(criterion, worst):
        reason = f"{_reason(criterion, worst, Verdict.FAIL)}, but not clearly enough among the {tests} figures judged together"
    return _make_result(criterion, verdict, reason, _remedy(criterion, verdict, worst), worst)


def _compute_p_value(criterion: Criterion, seen: Observation, confidence: float, look: int) -> float | None:
    """The probability of a figure this far beyond the limit, were the limit the truth; None where nothing is estimated.

    That all processes drew one speed is no likelier for looking again: only what is left of it after the first look is added.
    """
    if seen.blockers or criterion.sense is Sense.EQUALS or isinstance(seen.value, str):
        return None
    low, high = _bounds(seen)
    if not low < high:
        return None
    distance = criterion.measure_distance(float(seen.value))
    gap = max(SPEED_GAP, seen.left_out_gap)
    unseen = compute_unseen_p_value(distance, seen.processes, gap) if seen.processes else 0.0
    return unseen / (look * (look + 1)) + _compute_tail(criterion, seen, confidence)


def _compute_tail(criterion: Criterion, seen: Observation, confidence: float) -> float:
    """That of the estimate's own distribution; where only its interval is known, of a normal one."""
    (low, high), value = _bounds(seen), float(seen.value)
    limit, at_most = float(criterion.threshold), criterion.sense is not Sense.AT_LEAST
    if seen.tail is not None:
        found = seen.tail.compute_p_value_above if at_most else seen.tail.compute_p_value_below
        return found(limit)
    spread = (value - low if at_most else high - value) / compute_normal_quantile(confidence)
    distance = value - limit if at_most else limit - value
    if spread <= 0:
        return 0.0 if distance > 0 else 1.0
    return 1 - NormalDist().cdf(distance / spread)


def _is_beyond(criterion: Criterion, seen: Observation) -> bool:
    if criterion.sense is Sense.EQUALS:
        return False
    low, high = _bounds(seen)
    limit = float(criterion.threshold)
    return high < limit if criterion.sense is Sense.AT_LEAST else low > limit


def decide_overall_verdict(judged: Iterable[CriterionResult]) -> Verdict:
    """The verdict on all criteria together; waived ones are left out, and nothing left is INCONCLUSIVE."""
    return combine_verdicts(one.verdict for one in judged if one.waived is None)


def _decide_verdict(criterion: Criterion, seen: Observation, broken: set[int]) -> Verdict:
    if seen.blockers:
        return Verdict.INCONCLUSIVE
    if criterion.sense is Sense.EQUALS:
        return Verdict.PASS if seen.value == criterion.threshold else Verdict.INCONCLUSIVE
    low, high = _bounds(seen)
    limit = float(criterion.threshold)
    if not (low <= high):  # also where either is NaN
        return Verdict.INCONCLUSIVE
    if _is_beyond(criterion, seen) and (low == high or id(seen) in broken):
        return Verdict.FAIL
    kept = low >= limit if criterion.sense is Sense.AT_LEAST else high <= limit
    return Verdict.PASS if kept else Verdict.INCONCLUSIVE


def _bounds(seen: Observation) -> tuple[float, float]:
    value = float(seen.value)
    return (value if seen.low is None else seen.low), (value if seen.high is None else seen.high)


def _margin(criterion: Criterion, seen: Observation) -> float:
    """How far the critical bound keeps the limit; negative where it breaks it. Orders observations of one verdict."""
    if isinstance(seen.value, str):
        return 0.0
    if math.isnan(seen.value):
        return -math.inf
    low, high = _bounds(seen)
    limit = float(criterion.threshold)
    return low - limit if criterion.sense is Sense.AT_LEAST else limit - high


_ORDER = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)


def _rank_badness(judged: tuple[Verdict, float, Observation]) -> tuple[int, bool, float, str]:
    verdict, margin, seen = judged
    return _ORDER.index(verdict), not seen.blockers, margin, seen.source


def _reason(criterion: Criterion, seen: Observation, verdict: Verdict) -> str:
    text = format_observed(_make_result(criterion, verdict, "", None, seen))
    limit = criterion.limit.removeprefix(f"{criterion.sense} ")
    if verdict is Verdict.FAIL and text == limit:  # they differ in digits that are not shown
        text, limit = (f"{float(each):.12g} {criterion.dimension}" for each in (seen.value, criterion.threshold))
    about = f" ({seen.about})" if seen.about else ""
    if criterion.sense is Sense.EQUALS:
        return (
            f"measured on {text}"
            if verdict is Verdict.PASS
            else f"measured on {text}, but the policy requires {criterion.threshold}"
        )
    if verdict is Verdict.PASS:
        return f"{text} {'meets the minimum of' if criterion.sense is Sense.AT_LEAST else 'is within the limit of'} {limit}{about}"
    if verdict is Verdict.FAIL:
        return f"{text} {'is below the minimum of' if criterion.sense is Sense.AT_LEAST else 'exceeds the limit of'} {limit}{about}"
    return f"the interval {text} straddles the limit of {limit}{about}"


def _remedy(criterion: Criterion, verdict: Verdict, seen: Observation) -> str | None:
    if verdict is Verdict.PASS:
        return None
    if criterion.sense is Sense.EQUALS:
        return f"measure on {criterion.threshold}, or change the policy's [environment]"
    if verdict is Verdict.INCONCLUSIVE:
        return seen.to_narrow or "collect more data to narrow the interval"
    return seen.to_fix or "change the build, or justify a different limit"


def _make_result(
    criterion: Criterion, verdict: Verdict, reason: str, remedy: str | None, seen: Observation | None = None
) -> CriterionResult:
    result = CriterionResult(
        criterion.name,
        verdict,
        reason,
        criterion.limit,
        remedy,
        threshold=criterion.threshold,
        unit=criterion.dimension,
    )
    if seen is None:
        return result
    result = replace(result, about=seen.about, source=seen.source)
    if isinstance(seen.value, str):
        return replace(result, observed=seen.value)
    if not math.isfinite(seen.value):
        return result  # a blocker says why nothing could be observed
    bounded = seen.low is not None and math.isfinite(seen.low)
    return replace(result, observed=seen.value, ci=_bounds(seen) if bounded else None)
