"""Finds what `build --precision auto` decided last."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.decision import DECISION_FILE, Decision
from optpipe.core.records import read_record
from optpipe.workspace.entry import Run
from optpipe.workspace.runs import list_runs


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
