"""What a lower precision may cost, what it does cost, and the layers that stay in floating point or FP32 for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from optpipe.core.errors import BadInputError
from optpipe.core.quantity import Dimension, drop_from_text, read_quantity

EXACT_DB = 200.0
"""Stands for outputs equal to the bit; its negative for outputs with NaN or infinity."""


@dataclass(frozen=True, slots=True)
class PrecisionCost:
    """What a lower precision does to the outputs."""

    snr_db: float | None
    """The smallest of the outputs, within ±EXACT_DB; None where one has not the size that it has in FP32, as boxes that were found."""
    drop: float | None = None
    """Of the task's score, or of agreement where labels are missing; None where none can be measured."""
    drop_ci: tuple[float, float] | None = None

    @property
    def finite(self) -> bool:
        """Whether the outputs are free of NaN and infinity."""
        return self.snr_db is None or self.snr_db > -EXACT_DB


def make_cost_order(costs: Iterable[PrecisionCost]) -> Callable[[PrecisionCost], float]:
    """A key that sorts `costs`, the costliest first: their SNR or, where one has none, their drop."""
    if all(each.snr_db is not None for each in costs):
        return lambda cost: cost.snr_db or 0.0
    return lambda cost: -(cost.drop or 0.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a lower precision may cost: a drop of the task's score in percentage points, or a floor of the outputs' SNR in dB."""

    limit: float
    unit: Literal["points", "dB"]

    def __str__(self) -> str:
        unit = "point" if self.unit == "points" and self.limit == 1 else self.unit
        return f"{self.limit:g} {unit}"

    def allows(self, cost: PrecisionCost) -> bool:
        """Whether `cost` is within the budget; outputs with NaN or infinity never are."""
        if self.unit == "dB":
            return cost.snr_db is not None and cost.finite and cost.snr_db >= self.limit
        return cost.finite and cost.drop is not None and 100 * cost.drop <= self.limit + 1e-9


def budget_from_text(text: str, flag: str) -> Budget:
    """Reads `0.5pt`, `0.5%` or `30dB`. Raises BadInputError for anything else."""
    limit, dimension = read_quantity(text, flag, Dimension.POINTS, Dimension.SHARE, Dimension.DECIBEL)
    if dimension is Dimension.DECIBEL:
        if not 0 < limit <= EXACT_DB:
            raise BadInputError(f"{flag} {text}: expected an SNR above 0 dB and up to {EXACT_DB:g} dB, such as 30dB")
        return Budget(limit, "dB")
    return Budget(drop_from_text(text, flag), "points")


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer that a mixed build keeps out of its precision, with its MACs, and why."""

    layer: str
    op: str
    macs: int
    reason: str


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A build within a budget: what it costs on the samples it was searched on, and the layers kept for it."""

    budget: Budget
    metric: str
    """The task's score that a drop is of, `agreement` where labels are missing, or `snr`."""
    samples: int
    cost: PrecisionCost
    kept: tuple[KeptLayer, ...]
    """In the order of their cost, those that the budget asked for; then those that cannot be converted at all."""
    total_macs: int
    """Of the whole network at the profile's `opt` shapes."""

    @property
    def kept_share(self) -> float:
        """The share of all MACs in the layers kept."""
        return sum(each.macs for each in self.kept) / max(self.total_macs, 1)
