"""Finds what `build --precision auto` decided last."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path

from optpipe.core.entries import Device
from optpipe.core.precision import Precision
from optpipe.core.records import read_record
from optpipe.stats.ratio import Change, Ratio
from optpipe.workspace.entry import Run
from optpipe.workspace.runs import list_runs

DECISION_FILE = "decision.json"


class Standing(StrEnum):
    """What became of a candidate."""

    CHOSEN = "chosen"
    """The winner at one batch size or more."""
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"
    """Against the winner at one batch size at least, which is more precise or simpler, or was faster before the final rounds."""
    OVER_BUDGET = "over budget"
    NOT_SHOWN = "not shown to keep the budget"
    """The interval of its accuracy drop lies across the budget."""
    NOT_PROVEN = "not proven"
    """Too few MACs in its precision, or outputs beyond its tolerance."""
    FAILED = "failed"
    """It gave no time at any batch size."""


@dataclass(frozen=True, slots=True)
class CandidateTimes:
    """The p50 latency of a candidate at one batch size, one value for each process, in the order of the rounds."""

    batch_size: int
    race_ns: tuple[float, ...]
    """Of the race, which drops what lags behind."""
    final_ns: tuple[float, ...]
    """Of the rounds after the race, in which the fastest few are compared anew; empty where it was dropped before."""
    ratio: Ratio | None = None
    """Times of the final rounds over the winner's; None for the winner and for what was dropped before."""
    slowdown: float | None = None
    """Time over the winner's, from all rounds that both were in; None for the winner."""
    race_ratio: Ratio | None = None
    """Of what was dropped before the final rounds, times over the winner's in the race; its interval is by their scatter."""

    @property
    def is_equal(self) -> bool:
        """Whether it is not told from the winner, which is another."""
        return self.ratio is not None and self.ratio.change is Change.NO_DIFFERENCE


@dataclass(frozen=True, slots=True)
class CandidateAccuracy:
    """How far a candidate's outputs are from the source model's."""

    keeps: bool | None
    """Whether the drop is within the budget; None if its interval contains the limit."""
    drop: float | None = None
    """Of accuracy, as a fraction; None where there are no labels."""
    drop_ci: tuple[float, float] | None = None
    snr_db: float | None = None
    """None where outputs are equal to the bit."""
    calibrated_share: float = 0.0
    """Of the samples, those that it was calibrated on: they may hide some of the drop."""

    @property
    def cost(self) -> float:
        """Smaller is better: the drop, or where there is none the negative SNR."""
        if self.drop is not None:
            return self.drop
        return -inf if self.snr_db is None else -self.snr_db


@dataclass(frozen=True, slots=True)
class Candidate:
    """One build."""

    artifact: str
    """Its id."""
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
        """`onnxruntime fp16 (cuda)`."""
        return f"{self.backend} {self.precision} ({self.device})"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not built."""

    backend: str
    """Empty where it is a precision on all of them."""
    precision: str
    """Empty where it is a backend in all of them."""
    reason: str
    failed: bool
    """Whether its build was tried."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The content of `decision.json`."""

    model: str
    model_id: str
    budget: str
    """The most that a build may cost: `0.5 points`, `30 dB`."""
    judged_on: str
    """`800 images of validation`."""
    batch_sizes: tuple[int, ...]
    winners: Mapping[int, str]
    """Ids by batch size; empty where nothing keeps the budget."""
    candidates: tuple[Candidate, ...]
    """Winners first, then by time; then those that were not timed."""
    left_out: tuple[LeftOut, ...]
    seed: int
    """Of the order of the processes."""
    score: str = ""
    """The score that drops: `top1`, `AP`; empty if the budget is an SNR."""
    schema_version: int = 1

    @property
    def nearest(self) -> Candidate | None:
        """What came nearest to the budget; None where no build could be judged."""
        judged = [each for each in self.candidates if each.accuracy is not None]
        return min(judged, key=lambda each: each.accuracy.cost if each.accuracy else inf, default=None)


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A decision and the run that it lies in."""

    run_id: str
    decision: Decision

    @property
    def winners(self) -> tuple[str, ...]:
        """The ids of all winners, once each."""
        return tuple(dict.fromkeys(self.decision.winners.values()))

    def describe(self, only: str | None = None) -> str:
        """`onnxruntime fp32 (cpu) (1a2b3c4d5e6f) at batch 1, 8`, for each winner or `only` one."""
        labels = {each.artifact: each.label for each in self.decision.candidates}
        sizes = {
            winner: ", ".join(str(size) for size, one in self.decision.winners.items() if one == winner)
            for winner in self.winners
            if only in (None, winner)
        }
        if not sizes:
            return f"no build keeps {self.decision.budget}"
        said = "; ".join(f"{labels[winner]} ({winner}) at batch {at}" for winner, at in sizes.items())
        return f"{said}, the fastest within {self.decision.budget}"


def read_decision(run: Run) -> StoredDecision:
    """The decision of a run of `build --precision auto`."""
    return StoredDecision(run.name, read_record(run.path / DECISION_FILE, Decision))


def find_decision(workspace: Path, artifacts: Container[str]) -> StoredDecision | None:
    """The newest decision that has a winner among `artifacts`; None where there is none."""
    found = map(read_decision, reversed(list_runs(workspace, "choose")))
    return next((one for one in found if any(winner in artifacts for winner in one.winners)), None)
