"""The records of a comparison of two profiles, which `against` makes."""

from dataclasses import dataclass
from enum import StrEnum


class Change(StrEnum):
    APPEARED = "appeared"
    VANISHED = "vanished"
    FUSED = "fused"
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Side:
    """Mean and standard deviation over iterations; the deviation is None for fewer than two."""

    count: float
    mean_ns: float
    deviation_ns: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    before: Side
    after: Side
    change_ns: float
    interval_ns: tuple[float, float] | None
    """Of the change, 95%; None if a side has fewer than three iterations."""
    change: Change


@dataclass(frozen=True, slots=True)
class StageDifference:
    """Two recordings of one stage, `per_iteration` or, if one of them repeats nothing, in total."""

    before: str
    after: str
    notes: tuple[str, ...]
    """What differs between the two: model, GPU, batch size, precision, number of iterations."""
    per_iteration: bool
    iterations: tuple[int, int]
    totals: tuple[Difference, ...]
    kinds: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    kernels: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    against: str
    stages: tuple[StageDifference, ...]
    unmatched: tuple[str, ...]
    """Stages that only one of the profiles has."""
