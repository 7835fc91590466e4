"""The three-valued verdict, how verdicts combine, and the record of one on a build: `verdict.json`."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from optpipe.core.errors import ExitStatus
from optpipe.core.measurement import MeasurementGroup
from optpipe.core.quantity import Dimension


class Verdict(StrEnum):
    """PASS and FAIL are proven; INCONCLUSIVE is everything the evidence cannot decide."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status a command ends with on this verdict."""
        return {
            Verdict.PASS: ExitStatus.DONE,
            Verdict.FAIL: ExitStatus.FAIL,
            Verdict.INCONCLUSIVE: ExitStatus.INCONCLUSIVE,
        }[self]


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on all of `verdicts` together: any FAIL fails, nothing at all is INCONCLUSIVE."""
    seen = set(verdicts)
    if Verdict.FAIL in seen:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in seen or not seen:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """A criterion with its verdict. Figures are in the base unit `unit`; of an environment criterion they are names."""

    name: str
    verdict: Verdict
    reason: str
    limit: str = "required"
    """`at most 15.0 ms`"""
    remedy: str | None = None
    observed: float | str | None = None
    ci: tuple[float, float] | None = None
    """Confidence interval of `observed`; both bounds are equal where it is exact."""
    threshold: float | str | None = None
    unit: Dimension | None = None
    about: str = ""
    """What was observed: `batch 8, single-stream, compute`."""
    source: str = ""
    """The run or artifact that `observed` was computed from."""
    waived: str | None = None
    """The reason given for waiving this criterion; its own verdict stays as it is."""


@dataclass(frozen=True, slots=True)
class Note:
    """One thing to know of a build, and what to do about it; it decides nothing."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class JudgedArtifact:
    id: str
    backend: str
    precision: str
    sha256: str | None
    size_bytes: int | None
    weights: str | None


@dataclass(frozen=True, slots=True)
class PolicyReference:
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """The verdict on an artifact, with everything that reports say about it."""

    verdict: Verdict
    dossier_name: str
    model: str
    artifact: JudgedArtifact
    policy: PolicyReference
    criteria: tuple[CriterionResult, ...]
    notes: tuple[Note, ...]
    baseline: str | None
    """Name of the approved dossier that regressions were tested against."""
    expires_if: tuple[str, ...]
    """What makes the verdict void."""
    runs: tuple[str, ...]
    """The bench runs that the judged measurements are from."""
    created_utc: str
    optpipe: str
    groups: tuple[MeasurementGroup, ...] = ()
    """Every try of each load: how many processes count, their figures, and what was left out and why."""
    since: str | None = None
    """The time before which bench runs were left out on request; they are in `runs_left_out`."""
    runs_left_out: tuple[str, ...] = ()

    @property
    def waived(self) -> tuple[CriterionResult, ...]:
        return tuple(one for one in self.criteria if one.waived)

    @property
    def counted(self) -> tuple[CriterionResult, ...]:
        return tuple(one for one in self.criteria if not one.waived)


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """What `optpipe verify` found in a dossier."""

    dossier: str
    intact: bool
    """Whether every byte is as sealed and every number follows from the raw files."""
    as_sealed: bool
    """Whether every byte and the signature are right, so that `problems` are all about what the files say."""
    problems: tuple[str, ...]
    unbacked: tuple[str, ...]
    """What the dossier states and no raw file in it shows."""
    not_compared: tuple[str, ...]
    """What another version of optpipe wrote differently, and reports that could not be rendered again here."""
    verdict: Verdict | None
    recomputed: VerdictRecord | None
    """None where the dossier is not intact."""
    signature: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What became of a step of `optpipe run`: `done`, `resumed`, `skipped` or `failed`, with the reason of the latter two."""

    name: str
    status: str
    seconds: float = 0.0
    runs: tuple[str, ...] = ()
    reason: str | None = None


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
        return self.tail.compute_p_value_above(limit / self.factor)

    def compute_p_value_below(self, limit: float) -> float:
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
