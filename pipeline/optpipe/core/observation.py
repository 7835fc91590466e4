"""What evidence shows for a criterion: a figure with its interval, or why there is none."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a figure may not be judged, and what to do about it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One observed figure in the base unit of its dimension; `low` and `high` equal `value` where it is exact."""

    value: float | str
    low: float | None = None
    high: float | None = None
    blockers: tuple[Blocker, ...] = ()
    about: str = ""
    """What was observed, for people: `batch 8, single-stream, compute`."""
    source: str = ""
    """The run or artifact it was computed from."""


@dataclass(frozen=True, slots=True)
class Missing:
    """No evidence: what is missing, and the command that measures it."""

    reason: str
    remedy: str


RANDOM_WEIGHTS = Blocker(
    "the weights are random, so accuracy and agreement are meaningless", "build with trained weights"
)
