"""Verdicts, how they combine, and the record of one on a build: `verdict.json`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import log, log1p
from typing import Protocol

from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.quantity import Dimension


class Verdict(StrEnum):
    """PASS and FAIL are proven; everything else is INCONCLUSIVE."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_status(self) -> ExitStatus:
        return ExitStatus.DONE if self is Verdict.PASS else ExitStatus[self.name]


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Any FAIL fails; no verdict at all is INCONCLUSIVE."""
    seen = set(verdicts) or {Verdict.INCONCLUSIVE}
    return next(
        verdict for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if verdict in seen
    )


_FILLERS = "\u115f\u1160\u3164\uffa0"
"""Hangul fillers, which Unicode counts as letters and no font shows."""


def is_reason(text: str) -> bool:
    """Whether `text` tells a reader something: one printable line with at least one visible letter."""
    return text.isprintable() and any(char.isalpha() and char not in _FILLERS for char in text)


def require_reason(text: str, what: str) -> None:
    """Raises BadInputError if `text`, the reason for `what`, is not one (`is_reason`)."""
    if not is_reason(text):
        raise BadInputError(
            what + f" has no reason: {text!r}", remedy="give one line with at least one letter"
        )


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """A judged criterion. Figures are in the base unit `unit`; environment criteria have names instead."""

    name: str
    verdict: Verdict
    reason: str
    limit: str = "required"
    """`at most 15.0 ms`"""
    remedy: str | None = None
    observed: float | str | None = None
    ci: tuple[float, float] | None = None
    """Confidence interval of `observed`; equal bounds if it is exact."""
    threshold: float | str | None = None
    unit: Dimension | None = None
    about: str = ""
    """Such as `batch 8, single-stream, compute`."""
    source: str = ""
    """Run or artifact that `observed` was computed from."""
    waived: str | None = None
    """Reason for waiving the criterion (`is_reason`); its verdict stays."""

    @property
    def counts(self) -> bool:
        """Whether it takes part in the overall verdict: it is not waived."""
        return self.waived is None


@dataclass(frozen=True, slots=True)
class Note:
    """Something to know about a build, with a remedy; decides nothing."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LoosenedLimit:
    """A limit of what counts as evidence that was looser than usual: of VALID measurements, of outputs, or the confidence."""

    name: str
    """`max_cv`, `minimum_snr_db`, `confidence`."""
    value: float
    usual: float
    message: str
    """`coefficient of variation up to 50% (usual: 2.5%)`"""


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
    verdict: Verdict
    dossier_name: str
    model: str
    artifact: JudgedArtifact
    policy: PolicyReference
    criteria: tuple[CriterionResult, ...]
    notes: tuple[Note, ...]
    baseline: str | None
    expires_if: tuple[str, ...]
    """Changes that void the verdict."""
    runs: tuple[str, ...]
    created_utc: str
    optpipe: str
    groups: tuple[MeasurementGroup, ...] = ()
    """Every try of each load: the figures of those that count, and reasons for those left out."""
    since: str | None = None
    """Time before which bench runs were left out on request; `runs_left_out` has them."""
    runs_left_out: tuple[str, ...] = ()
    loosened: tuple[LoosenedLimit, ...] = ()
    """Limits that were looser than usual; a verdict is never shown without them."""

    @property
    def waived(self) -> tuple[CriterionResult, ...]:
        return tuple(criterion for criterion in self.criteria if not criterion.counts)

    @property
    def is_unqualified_pass(self) -> bool:
        """PASS, and no criterion was waived."""
        return self.verdict is Verdict.PASS and not self.waived

    @property
    def counted(self) -> tuple[CriterionResult, ...]:
        return tuple(criterion for criterion in self.criteria if criterion.counts)


@dataclass(frozen=True, slots=True)
class PreviousFigure:
    """A figure of the sign-off before, in the base unit of its criterion."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PreviousSignoff:
    """What the newest earlier sign-off of the model, backend, precision, and device in the workspace said, as its dossier states it."""

    dossier_name: str
    verdict: Verdict
    created_utc: str
    figures: Mapping[str, PreviousFigure]
    """By criterion; those with an interval, or exact."""


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    dossier: str
    intact: bool
    """Whether every byte is as sealed and every number follows from the raw files."""
    as_sealed: bool
    """Whether every byte and the signature are right, so that all `problems` concern the content."""
    problems: tuple[str, ...]
    unbacked: tuple[str, ...]
    """Statements without a raw file in the dossier."""
    not_compared: tuple[str, ...]
    """Differences due to another version of optpipe, and reports that could not be rendered here."""
    verdict: Verdict | None
    recomputed: VerdictRecord | None
    """None if the dossier is not intact."""
    signature: str
    files: int
    size_bytes: int
    audit: tuple[CriterionResult, ...] = ()
    """Criteria that `--audit` measured again: PASS agrees with the dossier, FAIL differs."""
    audit_seed: int | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of `optpipe run`: `done`, `resumed`, `skipped` or `failed`, with the reason of the last two."""

    name: str
    status: str
    seconds: float = 0.0
    runs: tuple[str, ...] = ()
    reason: str | None = None


class Tail(Protocol):
    """Tail probabilities of a figure if the limit were the true value."""

    def compute_p_value_above(self, limit: float) -> float:
        """Probability of a figure at least this far above `limit`."""

    def compute_p_value_below(self, limit: float) -> float:
        """Probability of a figure at least this far below `limit`."""


@dataclass(frozen=True, slots=True)
class ScaledTail:
    """Tail of a figure in another unit: `factor` times the figure of `tail`; or of a loss whose ratio has that logarithm."""

    tail: Tail
    factor: float = 1.0
    of_logarithm: bool = False

    def compute_p_value_above(self, limit: float) -> float:
        return self.tail.compute_p_value_above(
            log1p(limit) if self.of_logarithm else limit / self.factor
        )

    def compute_p_value_below(self, limit: float) -> float:
        return self.tail.compute_p_value_below(
            log1p(limit) if self.of_logarithm else limit / self.factor
        )


@dataclass(frozen=True, slots=True)
class InverseTail:
    """Tail of one over a positive figure; `tail` is that of the figure."""

    tail: Tail

    def compute_p_value_above(self, limit: float) -> float:
        return self.tail.compute_p_value_below(1 / limit)

    def compute_p_value_below(self, limit: float) -> float:
        return self.tail.compute_p_value_above(1 / limit)


@dataclass(frozen=True, slots=True)
class RatioTail:
    """Tail of a positive ratio; `tail` is that of its logarithm."""

    tail: Tail

    def compute_p_value_above(self, limit: float) -> float:
        return self.tail.compute_p_value_above(log(limit))

    def compute_p_value_below(self, limit: float) -> float:
        return self.tail.compute_p_value_below(log(limit))


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a figure is missing or may not be judged, and the command or step that helps."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Observation:
    """An observed figure in the base unit of its dimension.

    `low` and `high` are None if it is exact, as `is_exact` says, or if its interval is withheld: such a figure decides nothing.
    """

    value: float | str
    low: float | None = None
    high: float | None = None
    blockers: tuple[Blocker, ...] = ()
    about: str = ""
    """Such as `batch 8, single-stream, compute`."""
    source: str = ""
    tail: Tail | None = None
    """None if the figure is exact, or only its interval is known."""
    to_narrow: str = ""
    to_fix: str = ""
    processes: int = 0
    """Processes that a time or rate is the mean of; 0 for other figures."""
    left_out: int = 0
    """Tries that were left out as INVALID."""
    left_out_gap: float = 0.0
    """Maximum distance of left-out processes from that mean, as the logarithm of a ratio."""
    repeated: float = 0.0
    """A change that all processes repeat while they are measured, as the logarithm of a ratio."""
    is_exact: bool = False
    """Counted, not sampled, such as the size of a file: it has no interval and needs none."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both bounds, equal ones of an exact figure; None if they are withheld."""
        if self.is_exact:
            return float(self.value), float(self.value)
        return None if self.low is None or self.high is None else (self.low, self.high)


RANDOM_WEIGHTS = Blocker(
    "the weights are random, or nobody asserts that they are trained, so accuracy and agreement are meaningless",
    "build with trained weights, or assert them: Model(..., trained=True)",
)
