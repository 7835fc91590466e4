"""Decisions of `build --precision auto`."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path

from optpipe.core.entries import Device
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import Precision
from optpipe.core.records import group_pairs, read_record
from optpipe.stats.ratio import Change, Ratio
from optpipe.workspace.entry import Run
from optpipe.workspace.runs import list_runs

DECISION_FILE = "decision.json"


class Standing(StrEnum):
    CHOSEN = "chosen"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"
    """The winner is more precise or simpler, at one batch size at least."""
    DROPPED = "dropped"
    """Behind in the first rounds at one batch size at least, and not compared in the final ones."""
    OVER_BUDGET = "over budget"
    NOT_SHOWN = "not shown to keep the budget"
    """The interval of its accuracy drop contains the budget."""
    NOT_PROVEN = "not proven"
    """Too few MACs in its precision, or outputs beyond its tolerance."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CandidateTimes:
    """p50 latency of a candidate at one batch size: one value per process, in the order of the rounds."""

    batch_size: int
    race_ns: tuple[float, ...]
    final_ns: tuple[float, ...]
    """Times of the final rounds between the fastest few; empty if it was dropped before."""
    ratio: Ratio | None = None
    """Times of the final rounds over the winner's; None for the winner and for dropped candidates."""
    slowdown: float | None = None
    """Time over the winner's, from all common rounds; None for the winner."""

    @property
    def is_equal(self) -> bool:
        """Whether another candidate is the winner, without a shown difference."""
        return self.ratio is not None and self.ratio.change is Change.NO_DIFFERENCE


@dataclass(frozen=True, slots=True)
class CandidateAccuracy:
    keeps: bool | None
    """Whether the drop is within the budget; None if its interval contains the limit."""
    drop: float | None = None
    """Drop of accuracy as a fraction; None without labels."""
    drop_ci: tuple[float, float] | None = None
    snr_db: float | None = None
    calibrated_share: float = 0.0
    """Share of the samples that it was calibrated on, which may hide some of the drop."""

    @property
    def cost(self) -> float:
        if self.drop is not None:
            return self.drop
        return -inf if self.snr_db is None else -self.snr_db


@dataclass(frozen=True, slots=True)
class Candidate:
    artifact: str
    backend: str
    precision: Precision
    device: Device
    standing: Standing
    reason: str
    """Why it was not chosen; for a winner, by how much it leads."""
    accuracy: CandidateAccuracy | None = None
    times: tuple[CandidateTimes, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.backend} {self.precision} ({self.device})"


@dataclass(frozen=True, slots=True)
class Omission:
    """A build that failed or was not tried."""

    backend: str
    """Empty if a precision is left out on all backends."""
    precision: str
    """Empty if a backend is left out in all precisions."""
    reason: str
    status: ExitStatus = ExitStatus.MISSING


@dataclass(frozen=True, slots=True)
class Decision:
    model: str
    model_id: str
    budget: str
    """`0.5 points`, `30 dB`."""
    judged_on: str
    """`800 images of validation`."""
    batch_sizes: tuple[int, ...]
    winners: Mapping[int, str]
    """Ids by batch size; empty if no build is within the budget."""
    candidates: tuple[Candidate, ...]
    """Winners first, then by time, then those that were not timed."""
    left_out: tuple[Omission, ...]
    seed: int
    """Seed of the order of processes."""
    score: str = ""
    failed: tuple[Omission, ...] = ()
    schema_version: int = 1

    @property
    def nearest(self) -> Candidate | None:
        """The candidate closest to the budget; None if no build could be judged."""
        judged = [candidate for candidate in self.candidates if candidate.accuracy is not None]
        return min(
            judged,
            key=lambda candidate: candidate.accuracy.cost if candidate.accuracy else inf,
            default=None,
        )

    def describe(self, only: str | None = None) -> str:
        """`onnxruntime fp32 (cpu) (1a2b3c4d5e6f) at batch 1, 8`, for each winner or `only` one."""
        labels = {candidate.artifact: candidate.label for candidate in self.candidates}
        sizes = group_pairs(
            (name, str(size)) for size, name in self.winners.items() if only in (None, name)
        )
        if not sizes:
            return f"no build stays within {self.budget}"
        said = "; ".join(
            f"{labels[winner]} ({winner}) at batch {', '.join(at)}" for winner, at in sizes.items()
        )
        return f"{said}, the fastest within {self.budget}"


def read_decision(run: Run) -> Decision:
    return read_record(run.path / DECISION_FILE, Decision)


def find_decision(workspace: Path, artifacts: Container[str]) -> tuple[Decision, str] | None:
    """The newest decision with a winner among `artifacts`, and the name of its run."""
    for run in reversed(list_runs(workspace, "choose")):
        decision = read_decision(run)
        if any(winner in artifacts for winner in decision.winners.values()):
            return decision, run.name
    return None
