"""A figure with its confidence interval."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value between two bounds; both bounds are None where the data cannot support an interval."""

    value: float
    low: float | None = None
    high: float | None = None
    note: str | None = None
    """How it was estimated, or why there is no interval."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds; those of a figure without an interval are the value."""
        return (self.value if self.low is None else self.low), (self.value if self.high is None else self.high)

    def scale(self, factor: float) -> "Estimate":
        """Value and bounds times a positive `factor`."""
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Estimate(factor * self.value, low, high, self.note)
