"""Which measurements a criterion of a policy is about: batch size, scenario with its load, mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.core.measurement import Mode, Scenario
from optpipe.core.quantity import Dimension, quantity_from_text

SCENARIOS = tuple(map(str, Scenario))
MODES = tuple(map(str, Mode))
FILTER_KEYS = ("batch_size", "scenario", "mode", "streams", "rate")
"""Keys that say which measurements a criterion is about."""


@dataclass(frozen=True, slots=True)
class LoadFilter:
    """Which measurements a criterion is about; None means every one."""

    batch_size: int | None = None
    scenario: str | None = None
    mode: str | None = None
    streams: int | None = None
    rate_per_s: float | None = None
    """Server: queries per second that are due."""

    def to_slug(self) -> str:
        """`.b8.single-stream`, `.b1.server.500qps`; empty for every measurement."""
        batch = None if self.batch_size is None else f"b{self.batch_size}"
        streams = None if self.streams is None else f"{self.streams}x"
        rate = None if self.rate_per_s is None else f"{self.rate_per_s:g}qps"
        return "".join(f".{part}" for part in (batch, self.scenario, streams, rate, self.mode) if part)

    def __bool__(self) -> bool:
        """Whether it narrows anything."""
        return self != LoadFilter()


def load_filter_from_table(table: Mapping[str, Any], place: str) -> LoadFilter:
    """Reads the narrowing keys of a section's table; ValueError says what is wrong at `place`."""
    counts = {key: table.get(key) for key in ("batch_size", "streams")}
    for key, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"{place}: {key} = {count!r} must be a positive integer")
    for key, choices in (("scenario", SCENARIOS), ("mode", MODES)):
        if key in table and table[key] not in choices:
            raise ValueError(f"{place}: {key} = {table[key]!r} must be one of {', '.join(choices)}")
    scenario = table.get("scenario")
    for wanted, key, example in (("server", "rate", '"500 queries/s"'), ("multi-stream", "streams", "4")):
        if scenario == wanted and key not in table:
            raise ValueError(f"{place}: scenario '{wanted}' requires {key}; for example {key} = {example}")
        if key in table and scenario != wanted and not (key == "streams" and scenario == "offline"):
            raise ValueError(f'{place}: {key} requires scenario = "{wanted}"')
    return LoadFilter(counts["batch_size"], scenario, table.get("mode"), counts["streams"], _read_rate(table, place))


def _read_rate(table: Mapping[str, Any], place: str) -> float | None:
    if "rate" not in table:
        return None
    try:
        rate = quantity_from_text(table["rate"], Dimension.QUERIES)
    except ValueError as error:
        raise ValueError(f"{place}: rate = {error}") from error
    if rate == 0:
        raise ValueError(f'{place}: invalid rate "{table["rate"]}"')
    return rate
