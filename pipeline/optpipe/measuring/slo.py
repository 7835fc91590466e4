"""A latency limit as users write it: `p99=15ms`."""

import re
from dataclasses import dataclass

from optpipe.core.measurement import Measurement, Validity, percentile_name
from optpipe.errors import BadInputError

_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
_FORM = re.compile(r"p(\d+(?:\.\d+)?)\s*(?:=|<=)\s*(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """A percentile of latency and its limit."""

    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"{percentile_name(self.percent)}={self.limit_ms:g}ms"

    def met(self, measurement: Measurement) -> bool:
        """Whether the percentile's upper bound is inside the limit: what the interval cannot show is not met."""
        found = self.value(measurement)
        return found is not None and found[1] <= self.limit_ms

    def value(self, measurement: Measurement) -> tuple[float, float] | None:
        """The percentile and its upper bound in ms; None where it could not be measured."""
        found = None if measurement.latency is None else measurement.latency.percentile(self.percent)
        return None if found is None else (found.value, found.ci[1])


def slo_from_text(text: str) -> Slo:
    """Reads `--slo`. Raises BadInputError for anything but pNN=TIME with a unit."""
    form = _FORM.fullmatch(text.strip())
    if form is None or not 0 < float(form[1]) < 100 or float(form[2]) == 0:
        message = f"--slo {text}: give a percentile and a time with its unit, such as p99=15ms"
        raise BadInputError(message)
    return Slo(float(form[1]), float(form[2]) * _UNITS_MS[form[3]])


def ran(measurement: Measurement) -> bool:
    """Whether there are figures at all, valid or not: a batch that ran out of memory has none."""
    return measurement.latency is not None


def valid(measurement: Measurement) -> bool:
    """Whether its figures may be believed."""
    return measurement.verdict is Validity.VALID
