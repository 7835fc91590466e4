"""Latency limits (`p99=15ms`), and the largest batch size or arrival rate inside one.

A rate is found by the percentile's value, then confirmed on fresh arrivals by its upper bound, stepping down until that
holds: the search selects the rate whose arrivals were most favorable, so that its own measurement cannot confirm it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from optpipe.core.errors import BadInputError
from optpipe.core.measurement import Measurement, Validity
from optpipe.core.percentile_names import format_percentile_name
from optpipe.core.quantity import Dimension, Estimate, format_quantity, quantity_from_text
from optpipe.core.wording import Argument
from optpipe.stats.percentiles import PERCENTS

_FORM = re.compile(r"\s*p(\d+(?:\.\d+)?)\s*(?:=|<=|≤)\s*(.+)")


@dataclass(frozen=True, slots=True)
class Slo:
    percent: float
    limit_ns: float

    def __str__(self) -> str:
        return f"{format_percentile_name(self.percent)} ≤ {format_quantity(self.limit_ns, Dimension.TIME)}"

    def is_met_by(self, measurement: Measurement) -> bool:
        """Whether the percentile's whole interval is within the limit."""
        estimate = self.read(measurement)
        return estimate is not None and estimate.is_at_most(self.limit_ns)

    def explain_not_judged(self, measurement: Measurement) -> str | None:
        """Why the limit cannot be judged: neither the percentile has an interval nor does a lower one exceed the limit. None if it can."""
        latency, estimate = measurement.latency_ns, self.read(measurement)
        if latency is None or (estimate is not None and estimate.interval is not None):
            return None
        lower = (latency.percentile(percent) for percent in PERCENTS if percent < self.percent)
        if any(
            percentile.is_above(self.limit_ns) for percentile in lower if percentile is not None
        ):
            return None
        name = format_percentile_name(self.percent)
        if estimate is not None:
            return f"{name} has no interval: {estimate.note or 'not computed'}"
        return f"{name} is not reported: {latency.withheld.get(name, 'not computed')}"

    def read(self, measurement: Measurement) -> Estimate | None:
        """The percentile in ns; None if it could not be measured."""
        return (
            None
            if measurement.latency_ns is None
            else measurement.latency_ns.percentile(self.percent)
        )


def slo_from_text(text: str) -> Slo:
    """Reads `--slo`. Raises BadInputError for anything but pNN=TIME with a unit and a percentile that summaries have."""
    form = _FORM.fullmatch(text)
    percent = float(form[1]) if form else 0.0
    if form is None or (percent not in PERCENTS and not 99 < percent < 100):
        raise BadInputError(
            "expected pNN=TIME, such as "
            + Argument("slo", "p99=15ms")
            + " (p50, p90, p95, p99 or higher)",
            argument=Argument("slo", text),
        )
    try:
        limit_ns = quantity_from_text(form[2], Dimension.TIME)
    except ValueError as error:
        raise BadInputError(str(error), argument=Argument("slo", text)) from error
    if limit_ns == 0:
        raise BadInputError(
            "the limit must be greater than zero, such as " + Argument("slo", "p99=15ms"),
            argument=Argument("slo", text),
        )
    return Slo(percent, limit_ns)


def sweep_batch_sizes(
    measure: Callable[[int], Measurement], sizes: Sequence[int], slo: Slo | None = None
) -> list[Measurement]:
    """Measures `sizes` upwards until memory or the limit stops it; then bisects to the limit.

    A size that ran out of memory is in the result, without figures. A withheld percentile does not stop the sweep.
    """
    measurements: list[Measurement] = []
    for size in sorted(set(sizes)):
        measurements.append(measure(size))
        if measurements[-1].interrupted or measurements[-1].latency_ns is None:
            break
        if (
            slo is not None
            and not slo.is_met_by(measurements[-1])
            and slo.explain_not_judged(measurements[-1]) is None
        ):
            break
    if slo is not None and not measurements[-1].interrupted:
        measurements += bisect_batch_size(measure, measurements, slo)
    return sorted(measurements, key=lambda measurement: measurement.load.batch_size)


def bisect_batch_size(
    measure: Callable[[int], Measurement], measurements: Sequence[Measurement], slo: Slo
) -> list[Measurement]:
    """Bisects between the largest size inside the limit and the smallest beyond it, to one eighth of the size or to 1."""
    inside = max(
        (measurement.load.batch_size for measurement in measurements if slo.is_met_by(measurement)),
        default=0,
    )
    outside = (
        measurement.load.batch_size
        for measurement in measurements
        if not slo.is_met_by(measurement)
    )
    beyond = min((size for size in outside if size > inside), default=0)
    more: list[Measurement] = []
    while inside and beyond - inside > max(1, inside // 8):
        more.append(measure((inside + beyond) // 2))
        if more[-1].interrupted:
            break
        if slo.is_met_by(more[-1]):
            inside = more[-1].load.batch_size
        else:
            beyond = more[-1].load.batch_size
    return more


def find_largest_inside(measurements: Sequence[Measurement], slo: Slo) -> Measurement | None:
    """The largest batch that meets the limit; an INVALID measurement only if no valid one does."""
    met = (measurement for measurement in measurements if slo.is_met_by(measurement))
    return max(
        met,
        key=lambda measurement: (measurement.is_valid, measurement.load.batch_size),
        default=None,
    )


BISECTION_STEPS = 6
"""Halvings on a log scale after the bracket; from a factor of two they leave about 1%."""
STEP_DOWN = 0.97
"""Factor from a rate that fresh arrivals do not confirm to the next."""
MOST_CONFIRMATIONS = 12


def find_highest_rate(
    measure: Callable[[float], Measurement], service_s: float, slo: Slo
) -> tuple[list[Measurement], Measurement | None]:
    """Measures rates from a twentieth to all of what the service time allows; returns all, and the confirmed one.

    The confirmed measurement is the last, and its percentile's upper bound is inside the limit. None if no rate is.
    """
    measurements: list[Measurement] = []
    rate = _searched(measure, service_s, slo, measurements)
    for _ in range(MOST_CONFIRMATIONS):
        if rate is None or measurements[-1].interrupted:
            break
        measurements.append(measure(rate))
        if slo.is_met_by(measurements[-1]) and not _behind(measurements[-1]):
            return measurements, measurements[-1]
        rate *= STEP_DOWN
    return measurements, None


def _searched(
    measure: Callable[[float], Measurement],
    service_s: float,
    slo: Slo,
    measurements: list[Measurement],
) -> float | None:
    """The highest tried rate whose percentile is inside the limit by its value; None if there is none."""

    def inside(rate: float) -> bool:
        measurements.append(measure(rate))
        value = slo.read(measurements[-1])
        return value is not None and value.value <= slo.limit_ns and not _behind(measurements[-1])

    beyond, rate = 1.0 / service_s, 0.5 / service_s
    while not inside(rate):
        beyond, rate = rate, rate / 2
        if (
            measurements[-1].interrupted
            or measurements[-1].latency_ns is None
            or rate * service_s < 0.05
        ):
            return None
    low = rate
    for _ in range(BISECTION_STEPS):
        if measurements[-1].interrupted:
            return None
        rate = (low * beyond) ** 0.5
        if inside(rate):
            low = rate
        else:
            beyond = rate
    return low


def _behind(measurement: Measurement) -> bool:
    return any(reason.code == "falling-behind" for reason in measurement.reasons)


@dataclass(frozen=True, slots=True)
class ArtifactLimit:
    artifact: str
    label: str
    slo: str
    met: bool | None
    """None if no VALID measurement decides it."""
    inside: bool
    measurement: str | None
    """The largest point inside the limit, otherwise the closest; the next five fields describe it."""
    batch_size: int | None
    rate_per_s: float | None
    value_ns: float | None
    upper_bound_ns: float | None
    verdict: Validity | None
    not_judged: Mapping[str, str] = field(default_factory=dict)
    """The reason by point, `batch 8` or `200 queries/s`."""


def judge_limit(
    artifact: str,
    label: str,
    slo: Slo,
    measurements: Sequence[Measurement],
    best: Measurement | None,
) -> ArtifactLimit:
    """Judges the limit for one artifact; `met` is None if no valid measurement decides it: an interval may include the limit."""
    read = [
        (value.value, at)
        for at, measurement in enumerate(measurements)
        if (value := slo.read(measurement)) is not None
    ]
    shown = best or (
        measurements[min(read)[1]] if read else None
    )  # the closest if nothing meets the limit
    value = None if shown is None else slo.read(shown)
    reasons = [
        (measurement.load, slo.explain_not_judged(measurement)) for measurement in measurements
    ]
    not_judged = {
        name_point(load.batch_size, load.rate_per_s): why
        for load, why in reasons
        if why is not None
    }
    met: bool | None = None
    if best is not None and best.is_valid:
        met = True
    elif best is None and shown is not None and not not_judged:
        # a growing queue is INVALID, but proves that the limit is not met
        beyond = _behind(shown) or (value is not None and value.is_above(slo.limit_ns))
        met = False if beyond and {"falling-behind"}.issuperset(shown.invalid_codes) else None
    return ArtifactLimit(
        artifact=artifact,
        label=label,
        slo=str(slo),
        met=met,
        inside=best is not None,
        measurement=None if shown is None else shown.id,
        batch_size=None if shown is None else shown.load.batch_size,
        rate_per_s=None if shown is None else shown.load.rate_per_s,
        value_ns=None if value is None else value.value,
        upper_bound_ns=None if value is None else value.high,
        verdict=None if shown is None else shown.verdict,
        not_judged=not_judged,
    )


def name_point(batch_size: int | None, rate_per_s: float | None) -> str:
    return f"batch {batch_size}" if rate_per_s is None else f"{rate_per_s:.4g} queries/s"
