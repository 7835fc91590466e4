"""The highest rate of arrivals inside a latency limit: open loop, other arrivals for every measurement.

Found by the percentile's value, then confirmed on fresh arrivals by its upper bound, stepping down until that holds: the
search picks the rate whose arrivals were kindest, and its own measurement cannot say so.
"""

from collections.abc import Callable

from optpipe.core.measurement import Measurement
from optpipe.measure.slo import Slo, has_figures

BISECTION_STEPS = 6
"""Halvings on a log scale after the bracket; from a factor of two they leave about 1 %."""
STEP_DOWN = 0.97
"""From a rate that fresh arrivals do not confirm to the next one."""
MOST_CONFIRMATIONS = 12


def find_highest_rate(
    measure: Callable[[float], Measurement], service_s: float, slo: Slo
) -> tuple[list[Measurement], Measurement | None]:
    """Measures rates between a twentieth of and all that the service time allows; returns all, and the confirmed one.

    The confirmed measurement is the last; its percentile's upper bound is inside the limit. None where no rate is.
    """
    found: list[Measurement] = []
    rate = _searched(measure, service_s, slo, found)
    for _ in range(MOST_CONFIRMATIONS):
        if rate is None or found[-1].interrupted:
            break
        found.append(measure(rate))
        if slo.is_met_by(found[-1]) and not _behind(found[-1]):
            return found, found[-1]
        rate *= STEP_DOWN
    return found, None


def _searched(
    measure: Callable[[float], Measurement], service_s: float, slo: Slo, found: list[Measurement]
) -> float | None:
    """The highest rate tried whose percentile is inside the limit by its value; None where none is."""

    def inside(rate: float) -> bool:
        found.append(measure(rate))
        return is_sustained(found[-1], slo)

    beyond, rate = 1.0 / service_s, 0.5 / service_s
    while not inside(rate):
        beyond, rate = rate, rate / 2
        if found[-1].interrupted or not has_figures(found[-1]) or rate * service_s < 0.05:
            return None
    low = rate
    for _ in range(BISECTION_STEPS):
        if found[-1].interrupted:
            return None
        rate = (low * beyond) ** 0.5
        if inside(rate):
            low = rate
        else:
            beyond = rate
    return low


def is_sustained(measurement: Measurement, slo: Slo) -> bool:
    """Whether the rate was kept up with and the percentile's value is inside the limit: where the search goes on upwards."""
    found = slo.read(measurement)
    return found is not None and found.value <= slo.limit_ns and not _behind(measurement)


def _behind(measurement: Measurement) -> bool:
    return any(reason.code == "falling-behind" for reason in measurement.reasons)
