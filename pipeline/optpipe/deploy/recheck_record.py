"""What `optpipe signoff recheck` found."""

from dataclasses import dataclass

from optpipe.core.bench_record import Change
from optpipe.core.verdict import Verdict


@dataclass(frozen=True, slots=True)
class OutputChange:
    """One output in the new environment against the old one's."""

    name: str
    values: int
    changed: int
    """Values that are not equal to the last bit."""
    first_changed: tuple[int, ...] | None
    """Index of the first; None where all are equal, or the old values are not here."""
    relative_error: float
    """‖new − old‖ / ‖old‖; without the old environment, of the new outputs against the source model's."""
    predictions_changed: int | None
    """Samples with another class; None for a model that does not classify."""


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A package or a part of the machine that is not what it was."""

    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class LatencyChange:
    """New over old: above 1 is slower."""

    metric: str
    load: str
    ratio: float
    ci: tuple[float, float]
    confidence: float
    change: Change
    how: str
    """`interleaved, 10 rounds`, or which processes were compared."""
    rounds_to_settle: int | None = None
    """About how many rounds of this scatter would exclude the slow-down or show one; None where processes were not interleaved."""


@dataclass(frozen=True, slots=True)
class RecheckRecord:
    """The JSON document of `optpipe signoff recheck`."""

    dossier: str
    artifact: str
    verdict: Verdict
    reasons: tuple[str, ...]
    versions: tuple[VersionChange, ...]
    outputs: tuple[OutputChange, ...]
    outputs_how: str
    latency: LatencyChange
    precision: str
    max_slowdown: float
    warnings: tuple[str, ...] = ()
