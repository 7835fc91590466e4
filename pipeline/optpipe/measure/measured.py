"""A measurement with the place it was made in, and whether two places can be compared."""

from dataclasses import dataclass, field

from optpipe.core.environment import Environment
from optpipe.core.measurement import Measurement


@dataclass(frozen=True, slots=True)
class RecordedMeasurement:
    """A measurement with the run it is from and the environment it was made in."""

    measurement: Measurement
    run: str
    environment: Environment = field(default_factory=Environment)
    clock_mhz: float | None = None
    """Median clock of the GPU's multiprocessors while it was measured; None without one."""


def find_environment_differences(one: Environment, other: Environment) -> list[str]:
    """How two environments differ in what a timing depends on: GPU, driver, CPU; empty when they are the same."""
    pairs = {name: (one.get_fact(name), other.get_fact(name)) for name in ("gpu", "driver", "cpu")}
    return [f"{name}: {first} and {second}" for name, (first, second) in pairs.items() if first != second]


CLOCK_TOLERANCE = 0.05
"""Median clocks further apart than this make two timings incomparable."""


def explain_clock_difference(one: RecordedMeasurement, other: RecordedMeasurement) -> str | None:
    """Why the clocks of two measurements forbid comparing them, or None."""
    first, second = one.clock_mhz, other.clock_mhz
    if not first or not second or max(first, second) / min(first, second) <= 1 + CLOCK_TOLERANCE:
        return None
    return f"GPU clocks differ: {first:.0f} MHz and {second:.0f} MHz"
