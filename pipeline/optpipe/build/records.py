"""The artifacts and omissions of a build, and the document of `optpipe build`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from optpipe.core.entries import (
    ArtifactInfo,
    Device,
    LintSummary,
    ModelInfo,
    SkippedLayer,
    VerificationInfo,
    WeightsRecord,
)
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import MixedPrecision, Precision, PrecisionProof
from optpipe.models.artifacts.decisions import CandidateAccuracy
from optpipe.models.artifacts.facts import hash_engine, measure_engine
from optpipe.workspace.entry import Entry


@dataclass(frozen=True, slots=True)
class StageTime:
    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True, slots=True)
class BuiltArtifact:
    entry: Entry[ArtifactInfo]
    verification: Entry[VerificationInfo] | None
    why_not: str | None
    kept: tuple[SkippedLayer, ...] = ()
    """Layers of an INT8 or FP8 graph that stay in floating point."""
    accuracy: CandidateAccuracy | None = None
    """Set for a candidate of `--precision auto` without a flaw."""

    @property
    def keeps_budget(self) -> bool:
        return self.accuracy is not None and self.accuracy.keeps is True

    @property
    def passed(self) -> bool:
        """Whether the precision is proven and the outputs, if they could be compared, are verified."""
        verified = self.verification is None or self.verification.info.passed is not False
        return self.entry.info.precision_proof.proven and verified


@dataclass(frozen=True, slots=True)
class Omission:
    backend: str
    precision: str
    reason: str
    status: ExitStatus


@dataclass(frozen=True, slots=True)
class ArtifactResult:
    id: str
    backend: str
    precision: Precision
    device: Device
    path: str
    sha256: str
    size_bytes: int
    build_seconds: float
    why_not: str | None
    precision_proof: PrecisionProof
    lint: LintSummary
    parity: VerificationInfo | None
    mixed: MixedPrecision | None = None
    kept: tuple[SkippedLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildResult:
    model: str
    source: str
    model_id: str
    weights: WeightsRecord
    requested_weights: str
    fallback_reason: str | None
    artifacts: tuple[ArtifactResult, ...]
    skipped: tuple[Omission, ...]
    failed: tuple[Omission, ...]
    stages: tuple[StageTime, ...]
    warnings: tuple[str, ...]
    exit_status: ExitStatus


@dataclass
class ModelBuild:
    model: Entry[ModelInfo]
    fallback_reason: str | None
    artifacts: list[BuiltArtifact] = field(default_factory=list)
    skipped: list[Omission] = field(default_factory=list)
    """Not available here or anywhere, and not named."""
    failed: list[Omission] = field(default_factory=list)
    stages: list[StageTime] = field(default_factory=list)

    @property
    def status(self) -> ExitStatus:
        """The most severe failure; a build without any artifact is never DONE."""
        statuses = [each.status for each in self.failed]
        if any(not each.passed for each in self.artifacts):
            statuses.append(ExitStatus.FAIL)
        if not self.artifacts and not statuses:
            statuses = [each.status for each in self.skipped]
        order = (ExitStatus.STAGE_FAILED, ExitStatus.MISSING, ExitStatus.BAD_INPUT, ExitStatus.FAIL)
        return next((status for status in order if status in statuses), ExitStatus.DONE)


def result_from_build(result: ModelBuild, requested_weights: str, warnings: Sequence[str]) -> BuildResult:
    info = result.model.info
    return BuildResult(
        model=info.name,
        source=info.source,
        model_id=result.model.id,
        weights=info.weights,
        requested_weights=requested_weights,
        fallback_reason=result.fallback_reason,
        artifacts=tuple(
            ArtifactResult(
                id=each.entry.id,
                backend=each.entry.info.backend,
                precision=each.entry.info.precision,
                device=each.entry.info.device,
                path=str(each.entry.file(each.entry.info.file)),
                sha256=hash_engine(each.entry),
                size_bytes=measure_engine(each.entry),
                build_seconds=each.entry.manifest.seconds,
                why_not=each.why_not,
                precision_proof=each.entry.info.precision_proof,
                lint=each.entry.info.lint,
                parity=each.verification.info if each.verification else None,
                mixed=each.entry.info.mixed,
                kept=each.kept,
            )
            for each in result.artifacts
        ),
        skipped=tuple(result.skipped),
        failed=tuple(result.failed),
        stages=tuple(result.stages),
        warnings=tuple(warnings),
        exit_status=result.status,
    )
