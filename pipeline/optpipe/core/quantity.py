"""Quantities with units, as in policies and options: `15 ms`, `2000 images/s`, `1%`, `0.5pt`, `2GiB`.

A quantity is a float in the base unit of its dimension; other units exist only in text.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import SCORE_NAMES
from optpipe.core.wording import Argument

_SI_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_snr(snr_db: float) -> str:
    """`63 dB`, or the reason for the value -1e30, which stands for infinity in records."""
    return (
        f"{snr_db:.0f} dB"
        if snr_db > -1e29
        else "-inf dB (NaN or Inf in the outputs, or other sizes)"
    )


def format_duration(ns: float) -> str:
    """`1.23 ms` for 1_234_567."""
    return _format_scaled(ns, _SI_TIME) or ("0 ns" if ns == 0 else f"{_format_significant(ns)} ns")


def format_bytes(size_bytes: float) -> str:
    """`49.2 MiB` for 51_603_628."""
    for scale, unit in _BINARY:
        if abs(size_bytes) >= scale:
            return f"{_format_significant(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(count: float) -> str:
    """`4.09 G` for 4_089_184_256."""
    return _format_scaled(count, _SI) or f"{count:g}"


def _format_scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """The value in the largest unit that it reaches; empty if it reaches none."""
    reached = (
        (scale, unit) for scale, unit in scales if abs(_round_to_significant(value)) >= scale
    )
    return next((f"{_format_significant(value / scale)} {unit}" for scale, unit in reached), "")


def _format_significant(value: float) -> str:
    digits = max(0, 2 - len(str(int(abs(_round_to_significant(value))))) + 1)
    return f"{value:.{digits}f}"


def _round_to_significant(value: float) -> float:
    """Three significant digits, so that 999.6 ns are shown as 1.00 µs, and 9.996 as 10.0."""
    return float(f"{value:.3g}")


_SIZES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_RATES = {"images/s": 1.0, "samples/s": 1.0}
_EFFICIENCIES = {"images/s/W": 1.0, "samples/s/W": 1.0}
_ENERGIES = {"J/image": 1.0, "mJ/image": 1e-3, "J/sample": 1.0, "mJ/sample": 1e-3}
_POINTS = {"points": 1.0, "point": 1.0, "pt": 1.0, **dict.fromkeys(SCORE_NAMES, 1.0)}


class Dimension(StrEnum):
    """Kind of a quantity; the value is its base unit."""

    noun: str
    example: str
    units: Mapping[str, float]
    """Factors to the base unit."""

    def __new__(cls, unit: str, noun: str, example: str, units: Mapping[str, float]) -> Self:
        self = str.__new__(cls, unit)
        self._value_, self.noun, self.example, self.units = unit, noun, example, units
        return self

    TIME = "ns", "a time", "15 ms", {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
    RATE = "images/s", "a rate", "2000 images/s", _RATES
    SAMPLE_RATE = "samples/s", "a rate", "2000 samples/s", _RATES
    QUERIES = "queries/s", "a query rate", "500 queries/s", {"queries/s": 1.0}
    SHARE = "fraction", "a share", "99.5%", {"%": 0.01}
    POINTS = "points", "a number of percentage points", "1.0 points", _POINTS
    SIZE = "bytes", "a size", "512 MiB", _SIZES
    ENERGY = "J/image", "an energy per image", "50 mJ/image", _ENERGIES
    SAMPLE_ENERGY = "J/sample", "an energy per sample", "50 mJ/sample", _ENERGIES
    POWER = "W", "a power", "300 W", {"W": 1.0, "mW": 1e-3, "kW": 1e3}
    EFFICIENCY = "images/s/W", "a rate per watt", "20 images/s/W", _EFFICIENCIES
    SAMPLE_EFFICIENCY = "samples/s/W", "a rate per watt", "20 samples/s/W", _EFFICIENCIES
    DECIBEL = "dB", "a ratio in decibels", "40 dB", {"dB": 1.0}
    FACTOR = "times", "a factor", "1.2 times", {"times": 1.0, "x": 1.0, "": 1.0}
    NUMBER = "1", "a number", "0.999", {"": 1.0}
    """No unit, as for values of an output and a cosine."""


_OF_SAMPLES = {
    Dimension.RATE: Dimension.SAMPLE_RATE,
    Dimension.ENERGY: Dimension.SAMPLE_ENERGY,
    Dimension.EFFICIENCY: Dimension.SAMPLE_EFFICIENCY,
}
"""Dimensions for models whose inputs are not images."""

NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"  # \d would match digits of every script
_QUANTITY = re.compile(rf"^\s*({NUMBER})\s*(\S*)\s*$")


def quantity_from_text(text: object, dimension: Dimension) -> float:
    """Value of `text` in the base unit of `dimension`. Raises ValueError that shows the form."""
    example = f'for example "{dimension.example}"'
    if isinstance(text, int | float) and not isinstance(text, bool):
        if dimension in (Dimension.NUMBER, Dimension.FACTOR) and 0 <= text < math.inf:
            return float(text)
        raise ValueError(f"{text} has no unit; {example}")
    match = _QUANTITY.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not {dimension.noun}; {example}")
    number, unit = float(match[1]), match[2]
    if not unit and "" not in dimension.units:
        raise ValueError(f'"{text}" has no unit; {example}')
    if unit not in dimension.units:
        known = ", ".join(dimension.units)
        raise ValueError(
            f'"{text}": {unit} is not a unit of {dimension.noun} (known: {known}); {example}'
        )
    if number < 0 or number * dimension.units[unit] == float("inf"):
        raise ValueError(f'"{text}" is not a valid limit: it must be finite and non-negative')
    return number * dimension.units[unit]


_SHORT = {Dimension.SHARE: "%", Dimension.POINTS: "pt"}
"""Units whose bare number may mean the fraction or the hundredfold."""


def read_quantity(text: str, flag: str, *dimensions: Dimension) -> tuple[float, Dimension]:
    """Reads the quantity of an option, in the base unit of the first of `dimensions` that has its unit.

    Raises BadInputError for anything else; for a number without a unit it lists the possible meanings.
    """
    match = _QUANTITY.match(text)
    if match is not None and not match[2]:
        number, units = (
            float(match[1]),
            [_SHORT.get(dimension) or next(iter(dimension.units)) for dimension in dimensions],
        )
        if "pt" in units and "%" in units:  # the percent of a score is its point
            units.remove("%")
        readings = [f"{number:g}{unit}" for unit in units]
        readings += (
            [f"{100 * number:g}{units[0]}"]
            if len(units) == 1 and units[0] in _SHORT.values()
            else []
        )
        raise BadInputError(
            f"the number has no unit; write {' or '.join(readings)}", argument=Argument(flag, text)
        )
    dimension = next(
        (
            dimension
            for dimension in dimensions
            if match is not None and match[2] in dimension.units
        ),
        dimensions[0],
    )
    try:
        return quantity_from_text(text, dimension), dimension
    except ValueError as error:
        reason = str(error).removeprefix(f'"{text}"').removeprefix(repr(text)).lstrip(": ")
        raise BadInputError(reason, argument=Argument(flag, text)) from error


def share_from_text(text: str, flag: str) -> float:
    """Reads a share above 0: `2.5%` is 0.025."""
    value, _ = read_quantity(text, flag, Dimension.SHARE)
    if value == 0:
        raise BadInputError("must be more than 0%", argument=Argument(flag, text))
    return value


def share_to_text(value: float) -> str:
    return f"{100 * value:.12g}%"


def drop_from_text(text: str, flag: str) -> float:
    """Reads the maximum drop of a score, `0.5pt` or `1%`, as percentage points."""
    points, dimension = read_quantity(text, flag, Dimension.POINTS, Dimension.SHARE)
    points *= 100 if dimension is Dimension.SHARE else 1
    if points > 100 or score_from_text(text):
        raise BadInputError(
            "expected 0 to 100 percentage points, such as 1pt", argument=Argument(flag, text)
        )
    return points


def score_from_text(text: object) -> str | None:
    """`AP` for `"0.5 AP"`; None for `"0.5 points"`."""
    match = _QUANTITY.match(text) if isinstance(text, str) else None
    return match[2] if match is not None and match[2] in SCORE_NAMES else None


def choose_dimension(dimension: Dimension, sample: str) -> Dimension:
    """`dimension`, or its counterpart if rates and energies count samples."""
    return dimension if sample == "image" else _OF_SAMPLES.get(dimension, dimension)


def format_quantity(value: float, dimension: Dimension) -> str:
    """A value as text with its unit, such as 15 ms or 3 GiB; NaN and infinity in words."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if dimension is Dimension.TIME:
        return format_duration(value)
    if dimension is Dimension.SIZE:
        return format_bytes(value)
    if dimension is Dimension.SHARE:
        return f"{_format_digits(100 * value, 4)}%"
    if dimension is Dimension.POINTS:
        return f"{_format_digits(value, 3)} point{'' if value == 1 else 's'}"
    if dimension in (Dimension.ENERGY, Dimension.SAMPLE_ENERGY):
        scaled, prefix = (1e3 * value, "m") if abs(value) < 1 else (value, "")
        return f"{_format_digits(scaled, 4)} {prefix}{dimension}"
    if dimension is Dimension.NUMBER:
        return f"{value:.6g}"
    return (
        f"{value:,.0f} {dimension}" if value >= 100 else f"{_format_digits(value, 3)} {dimension}"
    )


def format_interval(low: float, high: float, dimension: Dimension, shown: str = "") -> str:
    """`[1.41 ms, 1.60 ms]`; without the unit if both bounds have that of the value `shown`."""
    number = r"[-+]?[\d.,]+(?:e[-+]\d+)?"
    texts = [format_quantity(bound, dimension) for bound in (low, high)]
    if len({re.sub(number, "", text, count=1).removesuffix("s") for text in (*texts, shown)}) == 1:
        texts = [match[0] for text in texts if (match := re.match(number, text))]
    return f"[{', '.join(texts)}]"


def _format_digits(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with an interval; both bounds are None if the data cannot support one."""

    value: float
    low: float | None = None
    high: float | None = None
    note: str | None = None
    """How it was estimated, or why there is no interval."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both bounds; None without them, so that such an estimate decides nothing.

        >>> Estimate(2.0, 1.5, 2.5).interval, Estimate(2.0).interval
        ((1.5, 2.5), None)
        """
        return None if self.low is None or self.high is None else (self.low, self.high)

    def is_at_most(self, limit: float) -> bool:
        """Whether the whole interval is within `limit`; false without an interval."""
        return self.high is not None and self.high <= limit

    def is_above(self, limit: float) -> bool:
        """Whether the whole interval is beyond `limit`; false without an interval."""
        return self.low is not None and self.low > limit

    def invert(self) -> "Estimate | None":
        """One over the value, its bounds swapped; None for a value that is not positive."""
        if not self.value > 0:  # also NaN
            return None
        if self.low is None or self.high is None or self.low <= 0:
            return Estimate(1 / self.value, note=self.note)
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low, self.note)

    def scale(self, factor: float) -> "Estimate":
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Estimate(factor * self.value, low, high, self.note)
