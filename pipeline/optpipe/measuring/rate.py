"""The highest rate of arrivals inside a latency limit: open loop, the same seeded pattern stretched for every rate."""

from collections.abc import Callable

from optpipe.core.measurement import Measurement
from optpipe.measuring.slo import Slo, has_figures, is_valid

BISECTION_STEPS = 6
"""Halvings on a log scale after the bracket; from a factor of two they leave about 1 %."""


def find_highest_rate(
    measure: Callable[[float], Measurement], service_s: float, slo: Slo
) -> tuple[list[Measurement], Measurement | None]:
    """Measures rates between a twentieth of and all that the service time allows; returns all, and the best inside.

    The best is an INVALID measurement only where no valid one is inside.
    """
    found: list[Measurement] = []

    def inside(rate: float) -> bool:
        found.append(measure(rate))
        return is_sustained(found[-1], slo)

    beyond, rate = 1.0 / service_s, 0.5 / service_s
    while not inside(rate):
        beyond, rate = rate, rate / 2
        if found[-1].interrupted or not has_figures(found[-1]) or rate * service_s < 0.05:
            return found, None
    low = rate
    for _ in range(BISECTION_STEPS):
        if found[-1].interrupted:
            break
        rate = (low * beyond) ** 0.5
        if inside(rate):
            low = rate
        else:
            beyond = rate
    good = [each for each in found if is_sustained(each, slo)]
    return found, max(good, key=lambda each: (is_valid(each), each.offered_rate_per_s or 0.0), default=None)


def is_sustained(measurement: Measurement, slo: Slo) -> bool:
    """Whether the rate was kept up with and the percentile itself is inside the limit.

    The percentile's value decides and not its upper bound: queueing makes neighbours alike, and the bound would ask for
    hours. The interval is in the result beside it.
    """
    found = slo.value(measurement)
    behind = any(reason.code == "falling-behind" for reason in measurement.reasons)
    return found is not None and found[0] <= slo.limit_ms and not behind
