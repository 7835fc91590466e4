"""What evidence shows for a criterion: a figure with its interval, or why there is none."""

from dataclasses import dataclass
from typing import Protocol


class Tail(Protocol):
    """How improbable a figure is, were a limit the truth."""

    def compute_p_value_above(self, limit: float) -> float:
        """The probability of a figure this far above `limit` or farther."""

    def compute_p_value_below(self, limit: float) -> float:
        """The probability of a figure this far below `limit` or farther."""


@dataclass(frozen=True, slots=True)
class ScaledTail:
    """That of a figure in another unit: `factor` times the figure of `tail`."""

    tail: Tail
    factor: float

    def compute_p_value_above(self, limit: float) -> float:
        """As of `tail`."""
        return self.tail.compute_p_value_above(limit / self.factor)

    def compute_p_value_below(self, limit: float) -> float:
        """As of `tail`."""
        return self.tail.compute_p_value_below(limit / self.factor)


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a figure may not be judged, and what to do about it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed figure in the base unit of its dimension; `low` and `high` are None where it is exact: a count, or a fact."""

    value: float | str
    low: float | None = None
    high: float | None = None
    blockers: tuple[Blocker, ...] = ()
    about: str = ""
    """What was observed, for people: `batch 8, single-stream, compute`."""
    source: str = ""
    """The run or artifact it was computed from."""
    tail: Tail | None = None
    """None where the figure is exact, or nothing but its interval is known."""
    to_narrow: str = ""
    """What to do where the interval straddles a limit."""
    to_fix: str = ""
    """What to do where the figure breaks a limit."""
    processes: int = 0
    """How many processes a time or rate is the mean of; 0 for other figures."""
    left_out_gap: float = 0.0
    """How far processes that were left out for their own samples lie from that mean at most: the logarithm of a ratio."""


@dataclass(frozen=True, slots=True)
class Missing:
    """No evidence: what is missing, and the command that measures it."""

    reason: str
    remedy: str


RANDOM_WEIGHTS = Blocker(
    "the weights are random, so accuracy and agreement are meaningless", "build with trained weights"
)
