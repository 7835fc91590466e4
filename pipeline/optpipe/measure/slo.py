"""A latency limit as users write it: `p99=15ms`."""

import re
from dataclasses import dataclass

from optpipe.core.errors import BadInputError
from optpipe.core.estimate import Estimate
from optpipe.core.measurement import Measurement, format_percentile_name
from optpipe.core.quantity import Dimension, format_quantity, quantity_from_text
from optpipe.stats.percentiles import PERCENTS

_FORM = re.compile(r"\s*p(\d+(?:\.\d+)?)\s*(?:=|<=|≤)\s*(.+)")


@dataclass(frozen=True, slots=True)
class Slo:
    """A percentile of latency and its limit."""

    percent: float
    limit_ns: float

    def __str__(self) -> str:
        return f"{format_percentile_name(self.percent)} ≤ {format_quantity(self.limit_ns, Dimension.TIME)}"

    def is_met_by(self, measurement: Measurement) -> bool:
        """Whether the percentile's upper bound is inside the limit: what the interval cannot show is not met."""
        found = self.read(measurement)
        return found is not None and found.bounds[1] <= self.limit_ns

    def explain_not_judged(self, measurement: Measurement) -> str | None:
        """Why nothing is known of the limit: the percentile was withheld, and no lower one is beyond; None where it is."""
        latency = measurement.latency_ns
        if latency is None or latency.percentile(self.percent) is not None:
            return None
        lower = (latency.percentile(each) for each in PERCENTS if each < self.percent)
        if any(each.bounds[0] > self.limit_ns for each in lower if each is not None):
            return None
        name = format_percentile_name(self.percent)
        return f"{name} is not reported: {latency.withheld.get(name, 'not computed')}"

    def read(self, measurement: Measurement) -> Estimate | None:
        """The percentile in ns; None where it could not be measured."""
        return None if measurement.latency_ns is None else measurement.latency_ns.percentile(self.percent)


def slo_from_text(text: str) -> Slo:
    """Reads `--slo`. Raises BadInputError for anything but pNN=TIME with a unit, of a percentile that summaries have."""
    form = _FORM.fullmatch(text)
    percent = float(form[1]) if form else 0.0
    if form is None or (percent not in PERCENTS and not 99 < percent < 100):
        raise BadInputError(f"--slo {text}: expected pNN=TIME, such as --slo p99=15ms (p50, p90, p95, p99 or higher)")
    try:
        limit_ns = quantity_from_text(form[2], Dimension.TIME)
    except ValueError as error:
        raise BadInputError(f"--slo {text}: {error}") from error
    if limit_ns == 0:
        raise BadInputError(f"--slo {text}: the limit must be greater than zero, such as --slo p99=15ms")
    return Slo(percent, limit_ns)


def has_figures(measurement: Measurement) -> bool:
    """Whether there are figures at all, valid or not: a batch that ran out of memory has none."""
    return measurement.latency_ns is not None


def is_credible_violation(measurement: Measurement) -> bool:
    """Whether it may be believed that a limit was not kept: a queue that only grows is INVALID, and shows just that."""
    return {each.code for each in measurement.reasons if each.invalidates} <= {"falling-behind"}
