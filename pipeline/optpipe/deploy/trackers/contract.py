"""What a tracker gets of a dossier, and what it has to do with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.verdict import CriterionResult, VerdictRecord


@dataclass(frozen=True, slots=True)
class Export:
    """A sealed dossier, as a tracker gets it."""

    folder: Path
    verdict: VerdictRecord
    seal: str
    """SHA-256 over the hashes of all its files."""
    output: Path | None = None
    """File or folder that the user named; None for the tracker's own place."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Every number of the verdict by name, in base units: of a criterion, and with `.low` and `.high` of its interval."""
        figures: dict[str, float] = {}
        for criterion in self.numbers:
            assert isinstance(criterion.observed, float)
            figures[criterion.name] = criterion.observed
            if criterion.ci is not None:
                figures |= {
                    f"{criterion.name}.low": criterion.ci[0],
                    f"{criterion.name}.high": criterion.ci[1],
                }
        return figures

    @property
    def numbers(self) -> tuple[CriterionResult, ...]:
        """The criteria with a number."""
        return tuple(
            criterion
            for criterion in self.verdict.criteria
            if isinstance(criterion.observed, float)
        )

    @property
    def parameters(self) -> Mapping[str, str]:
        """What was judged, by what."""
        record = self.verdict
        return {
            "model": record.model,
            "backend": record.artifact.backend,
            "precision": record.artifact.precision,
            "artifact": record.artifact.id,
            "engine_sha256": record.artifact.sha256 or "",
            "policy": record.policy.name,
            "policy_sha256": record.policy.sha256,
            "optpipe": record.optpipe,
        }

    @property
    def tags(self) -> Mapping[str, str]:
        """The verdict, each criterion's, and what identifies the dossier."""
        record = self.verdict
        return {
            "optpipe.verdict": str(record.verdict),
            "optpipe.dossier": record.dossier_name,
            "optpipe.dossier_sha256": self.seal,
            **{
                f"optpipe.{criterion.name}": str(criterion.verdict) for criterion in record.criteria
            },
            **{
                f"optpipe.{criterion.name}.waived": str(criterion.waived)
                for criterion in record.waived
            },
        }


class Tracker:
    """One tracker. A plug-in is a subclass, registered in the group `optpipe.trackers` under its `name`."""

    name: str
    needs: str = ""
    """The module that it imports; its absence is reported before anything is measured."""
    install: str = ""
    """The command that installs it."""

    def send(self, export: Export) -> str:
        """Sends the dossier; returns where it is, in a few words. Any exception means that it was not sent."""
        raise NotImplementedError
