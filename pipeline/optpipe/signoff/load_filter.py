"""Which measurements a criterion of a policy is about: batch size, scenario with its load, mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.core.measurement import Mode, Scenario
from optpipe.core.quantity import Dimension, quantity

SCENARIOS = tuple(map(str, Scenario))
MODES = tuple(map(str, Mode))
NARROWING = ("batch_size", "scenario", "mode", "streams", "rate")
"""Keys that say which measurements a criterion is about."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which measurements a criterion is about; None means every one."""

    batch_size: int | None = None
    scenario: str | None = None
    mode: str | None = None
    streams: int | None = None
    rate_per_s: float | None = None
    """Server: queries per second that are due."""

    def slug(self) -> str:
        """`.b8.single-stream`, `.b1.server.500qps`; empty for every measurement."""
        batch = None if self.batch_size is None else f"b{self.batch_size}"
        streams = None if self.streams is None else f"{self.streams}x"
        rate = None if self.rate_per_s is None else f"{self.rate_per_s:g}qps"
        return "".join(f".{part}" for part in (batch, self.scenario, streams, rate, self.mode) if part)

    def __bool__(self) -> bool:
        """Whether it narrows anything."""
        return self != Where()


def where_from_table(table: Mapping[str, Any], place: str) -> Where:
    """Reads the narrowing keys of a section's table; ValueError says what is wrong at `place`."""
    counts = {key: table.get(key) for key in ("batch_size", "streams")}
    for key, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"{place}: {key} = {count!r} must be a whole number from 1")
    for key, choices in (("scenario", SCENARIOS), ("mode", MODES)):
        if key in table and table[key] not in choices:
            raise ValueError(f"{place}: {key} = {table[key]!r} must be one of {', '.join(choices)}")
    scenario = table.get("scenario")
    for wanted, key, example in (("server", "rate", '"500 queries/s"'), ("multi-stream", "streams", "4")):
        if scenario == wanted and key not in table:
            raise ValueError(
                f"{place}: scenario {wanted} says nothing without its load; add for example {key} = {example}"
            )
        if key in table and scenario != wanted and not (key == "streams" and scenario == "offline"):
            raise ValueError(f'{place}: {key} belongs to scenario = "{wanted}"')
    return Where(counts["batch_size"], scenario, table.get("mode"), counts["streams"], _rate(table, place))


def _rate(table: Mapping[str, Any], place: str) -> float | None:
    if "rate" not in table:
        return None
    try:
        rate = quantity(table["rate"], Dimension.QUERIES)
    except ValueError as error:
        raise ValueError(f"{place}: rate = {error}") from error
    if rate == 0:
        raise ValueError(f'{place}: rate = "{table["rate"]}" is no load')
    return rate
