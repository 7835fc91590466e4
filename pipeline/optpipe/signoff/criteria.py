"""A criterion held against what was observed: PASS, FAIL or INCONCLUSIVE, with the reason and the remedy.

The rule, for a limit L and an interval [low, high] around the observed value ("at most"; "at least" mirrors it):
PASS where high ≤ L, FAIL where low > L, INCONCLUSIVE where L lies inside. A cap (random weights, an INVALID
measurement, a foreign environment) leaves nothing to judge: INCONCLUSIVE, whatever the figures say.
Hence the laws that the tests hold it to: loosening a limit never turns PASS or INCONCLUSIVE into FAIL, and a build
exactly on the limit passes no more often than the interval's error rate.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from optpipe.core.observation import Missing, Observation
from optpipe.core.quantity import Dimension, quantity_text
from optpipe.core.verdict import Verdict, combined
from optpipe.signoff.policy import Criterion, Sense


@dataclass(frozen=True, slots=True)
class Judged:
    """A criterion with its verdict."""

    name: str
    threshold: float | str | None
    threshold_text: str
    verdict: Verdict
    reason: str
    remedy: str | None = None
    observation: Observation | None = None
    dimension: Dimension | None = None
    waived: str | None = None
    """The reason given for setting this criterion aside; its own verdict stays as it is."""


def judge(criterion: Criterion, found: Sequence[Observation] | Missing) -> Judged:
    """Holds `criterion` against everything observed for it: the worst observation decides and is the one shown."""
    if isinstance(found, Missing) or not found:
        absent = found if isinstance(found, Missing) else Missing("nothing was observed", "measure it first")
        return _judged(criterion, Verdict.INCONCLUSIVE, absent.reason, absent.remedy)
    verdict, _, worst = min(((_verdict(criterion, one), _margin(criterion, one), one) for one in found), key=_badness)
    if worst.caps:
        reason = "; ".join(dict.fromkeys(cap.reason for cap in worst.caps)) + (
            f" ({worst.about})" if worst.about else ""
        )
        remedy = "; ".join(dict.fromkeys(cap.remedy for cap in worst.caps))
        return _judged(criterion, verdict, reason, remedy, worst)
    return _judged(criterion, verdict, _reason(criterion, worst, verdict), _remedy(criterion, verdict), worst)


def overall(judged: Iterable[Judged]) -> Verdict:
    """The verdict on all criteria together; waived ones are left out, and nothing left is INCONCLUSIVE."""
    return combined(one.verdict for one in judged if one.waived is None)


def waive(judged: Sequence[Judged], waivers: dict[str, str]) -> tuple[Judged, ...]:
    """Marks the criteria named in `waivers` (name → reason). Raises KeyError with a name that no criterion has."""
    known = {one.name for one in judged}
    for name in waivers:
        if name not in known:
            raise KeyError(name)
    return tuple(replace(one, waived=waivers.get(one.name)) for one in judged)


def _verdict(criterion: Criterion, seen: Observation) -> Verdict:
    if seen.caps:
        return Verdict.INCONCLUSIVE
    if criterion.sense is Sense.EQUALS:
        return Verdict.PASS if seen.value == criterion.threshold else Verdict.INCONCLUSIVE
    low, high = _bounds(seen)
    limit = float(criterion.threshold)
    if not (low <= high):  # also where either is NaN
        return Verdict.INCONCLUSIVE
    if criterion.sense is Sense.AT_LEAST:
        low, high, limit = -high, -low, -limit
    if high <= limit:
        return Verdict.PASS
    return Verdict.FAIL if low > limit else Verdict.INCONCLUSIVE


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


def _badness(judged: tuple[Verdict, float, Observation]) -> tuple[int, bool, float, str]:
    verdict, margin, seen = judged
    return _ORDER.index(verdict), not seen.caps, margin, seen.source


def _reason(criterion: Criterion, seen: Observation, verdict: Verdict) -> str:
    text = _observed_text(seen, criterion.dimension)
    about = f" ({seen.about})" if seen.about else ""
    if criterion.sense is Sense.EQUALS:
        return f"measured on {text}" if verdict is Verdict.PASS else f"measured on {text}, not {criterion.threshold}"
    if verdict is Verdict.PASS:
        return f"{text} keeps {criterion.threshold_text}{about}"
    if verdict is Verdict.FAIL:
        return f"{text} breaks {criterion.threshold_text}{about}"
    return f"the interval {text} reaches across {criterion.threshold_text}{about}"


def _remedy(criterion: Criterion, verdict: Verdict) -> str | None:
    if verdict is Verdict.PASS:
        return None
    if criterion.sense is Sense.EQUALS:
        return f"measure on {criterion.threshold}, or change the policy's [environment]"
    if verdict is Verdict.INCONCLUSIVE:
        return _narrowed(criterion.section)
    return _mended(criterion.section)


def _narrowed(section: str) -> str:
    """What makes the interval of a section's figures narrower."""
    longer = "optpipe bench … --min-time 60"
    said = {
        "latency": f"measure longer, for a narrower interval: {longer}",
        "throughput": f"measure longer, for a narrower interval: {longer}",
        "regression": "measure contender and baseline side by side: optpipe bench A B --interleave",
        "energy": f"measure longer: {longer}",
        "accuracy": "evaluate on more labelled images: optpipe evaluate … --data DIR",
        "preprocessing": "prove parity on more images: optpipe preprocess … --images DIR",
    }
    return said.get(section, "gather more evidence, so that the interval becomes narrower")


def _mended(section: str) -> str:
    """What brings a build inside a section's limits, or shows what keeps it out."""
    compare, bench, profile = "optpipe compare", "optpipe bench … --tune", "optpipe profile …"
    said = {
        "latency": f"`{profile}` names the bottleneck; `{compare}` shows the faster builds",
        "throughput": f"`{compare}` shows the best batch size and build; `{bench}` searches the options",
        "regression": "`optpipe profile --diff BEFORE AFTER` shows what became slower since the baseline",
        "accuracy": "`optpipe calibrate … --sensitivity` finds the layers to spare from INT8",
        "preprocessing": "`optpipe preprocess …` names the step that contributes most",
        "precision": "`optpipe show ARTIFACT` lists the layers outside the wanted type",
        "memory": "a smaller batch size or precision needs less",
        "size": "a lower precision makes a smaller engine",
        "energy": "a lower precision or a larger batch needs less per image",
        "stability": "quiet the host and lock the clocks; `optpipe bench …` names the disturbance",
        "tensor_cores": f"`{profile}` lists the eligible layers that missed them",
    }
    return said.get(section, "change the build, or the limit with its reason")


def _judged(
    criterion: Criterion, verdict: Verdict, reason: str, remedy: str | None, seen: Observation | None = None
) -> Judged:
    return Judged(
        criterion.name,
        criterion.threshold,
        criterion.threshold_text,
        verdict,
        reason,
        remedy,
        seen,
        criterion.dimension,
    )


def _observed_text(seen: Observation, dimension: Dimension | None) -> str:
    if isinstance(seen.value, str) or dimension is None:
        return str(seen.value)
    if math.isnan(seen.value):
        return "–"
    low, high = _bounds(seen)
    text = quantity_text(seen.value, dimension)
    if low == high:
        return text
    return f"{text} [{quantity_text(low, dimension)}, {quantity_text(high, dimension)}]"
