"""The artifacts and omissions of a build, and the documents of builds, decisions between them, and diagnoses of the machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log10
from statistics import median
from typing import TYPE_CHECKING

from optpipe.core.entries import (
    ArtifactInfo,
    Device,
    ModelInfo,
    RecoveryStep,
    SkippedLayer,
    VerificationInfo,
    WeightsRecord,
)
from optpipe.core.errors import ExitStatus
from optpipe.core.params import make_call
from optpipe.core.precision import CALIBRATED, MixedPrecision, Precision, PrecisionProof
from optpipe.core.quantity import format_bytes, format_duration, format_snr
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.tasks.box_agreement import PARITY_IOU, PARITY_SCORE
from optpipe.models.artifacts.decisions import (
    Candidate,
    CandidateAccuracy,
    Decision,
    Omission,
    Standing,
)
from optpipe.models.artifacts.engine_files import hash_engine, measure_engine
from optpipe.report.document import (
    Cell,
    Column,
    Document,
    Row,
    Sentence,
    Table,
    Tone,
    figure_column,
    figure_columns,
    format_drop,
    format_mixed,
    format_placement,
    make_document,
    make_table,
    name_score,
    warn_of_weights,
)
from optpipe.stats.paired import LOW_SNR_DB
from optpipe.workspace.entry import Entry

if TYPE_CHECKING:
    from optpipe.build.choose import ChoiceResult


SMALL_SHARE = 0.5
"""A share of the MACs in INT8 or FP8 below this is the first that a build says."""


@dataclass(frozen=True, slots=True)
class BuiltArtifact:
    entry: Entry[ArtifactInfo]
    verification: Entry[VerificationInfo] | None
    why_not: str | None
    kept: tuple[SkippedLayer, ...] = ()
    """Layers of an INT8 or FP8 graph that stay in floating point."""
    accuracy: CandidateAccuracy | None = None
    """Set for a candidate of `--precision auto` without a flaw."""
    required_share: float | None = None
    """`--require-share`; None if any share is accepted and stated."""

    @property
    def shortfall(self) -> str | None:
        """Why the precision is not what was asked for; None if it is."""
        info = self.entry.info
        return info.precision_proof.find_shortfall(info.precision, self.required_share)

    @property
    def keeps_budget(self) -> bool:
        return self.accuracy is not None and self.accuracy.keeps is True

    @property
    def passed(self) -> bool:
        """Whether the precision is what was asked for and the outputs, if they could be compared, are verified."""
        verified = self.verification is None or self.verification.info.passed is not False
        return self.shortfall is None and verified


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
    parity: VerificationInfo | None
    mixed: MixedPrecision | None = None
    kept: tuple[SkippedLayer, ...] = ()
    shortfall: str | None = None
    """Why the precision is not what was asked for, such as a share below `--require-share`."""
    ranges: str = ""
    """Of a model that comes quantized: which of its ranges and weights the build has bit for bit."""
    recovery: tuple[RecoveryStep, ...] = ()
    """The steps of `--recover`, the ranges first; empty without it."""


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
    replaced: list[Omission] = field(default_factory=list)
    """Precisions that were asked for and built in FP32 instead, with a warning."""

    def add(self, other: "ModelBuild") -> None:
        """Takes what came of another plan for the same model."""
        self.artifacts += other.artifacts
        self.skipped += other.skipped
        self.failed += other.failed
        self.replaced += other.replaced

    @property
    def status(self) -> ExitStatus:
        """The most severe failure; a build without any artifact is never DONE."""
        statuses = [omission.status for omission in self.failed]
        if any(not artifact.passed for artifact in self.artifacts):
            statuses.append(ExitStatus.FAIL)
        if not self.artifacts and not statuses:
            statuses = [omission.status for omission in self.skipped]
        order = (ExitStatus.STAGE_FAILED, ExitStatus.MISSING, ExitStatus.BAD_INPUT, ExitStatus.FAIL)
        return next((status for status in order if status in statuses), ExitStatus.DONE)


def result_from_build(
    result: ModelBuild, requested_weights: str, warnings: Sequence[str]
) -> BuildResult:
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
                id=build.entry.id,
                backend=build.entry.info.backend,
                precision=build.entry.info.precision,
                device=build.entry.info.device,
                path=str(build.entry.file(build.entry.info.file)),
                sha256=hash_engine(build.entry),
                size_bytes=measure_engine(build.entry),
                build_seconds=build.entry.manifest.seconds,
                why_not=build.why_not,
                precision_proof=build.entry.info.precision_proof,
                parity=build.verification.info if build.verification else None,
                mixed=build.entry.info.mixed,
                kept=build.kept,
                shortfall=build.shortfall,
                ranges=build.entry.info.ranges,
                recovery=build.entry.info.recovery,
            )
            for build in result.artifacts
        ),
        skipped=tuple(result.skipped),
        failed=tuple(result.failed),
        warnings=tuple(warnings),
        exit_status=result.status,
    )


def document_from_build(result: BuildResult) -> Document:
    weights = result.weights
    ready = [
        artifact.id for artifact in result.artifacts if artifact.parity and artifact.parity.passed
    ]
    return make_document(
        [
            *_name_small_shares(result.artifacts),
            Sentence(
                f"{result.model} from {result.source}, weights {weights.source} {weights.sha256[:12]}"
            ),
            _tabulate_artifacts(result.artifacts) if result.artifacts else None,
            *_tabulate_recovery(result.artifacts),
            *_describe_artifacts(result.artifacts),
            *_list_omissions(result.failed, result.skipped),
            *warn_of_weights(weights),
            Sentence(make_call("bench", *ready), Tone.STRONG, "next") if ready else None,
        ]
    )


def _tabulate_artifacts(artifacts: Sequence[ArtifactResult]) -> Table:
    columns: list[Column | str] = [
        "artifact",
        "backend",
        "precision",
        "MACs",
        "verified",
        "runs here",
    ]
    columns += figure_columns("size", "build")
    rows: list[Row] = [
        (
            artifact.id,
            f"{artifact.backend} ({artifact.device})",
            artifact.precision,
            _format_shares(artifact),
            _format_verification(artifact.parity),
            Cell("no", Tone.FAINT) if artifact.why_not else "yes",
            format_bytes(artifact.size_bytes),
            format_duration(artifact.build_seconds * 1e9),
        )
        for artifact in artifacts
    ]
    return make_table(columns, rows)


def _tabulate_recovery(artifacts: Sequence[ArtifactResult]) -> Iterator[Table]:
    """The steps of `--recover`, once for builds of one graph."""
    by_steps = group_pairs(
        (artifact.recovery, artifact.id) for artifact in artifacts if artifact.recovery
    )
    for steps, builds in by_steps.items():
        rows: list[Row] = [
            (
                step.name,
                step.did,
                "" if step.snr_db is None else format_snr(step.snr_db),
                _format_gain(step),
                ""
                if step.drop is None or step.drop_ci is None
                else format_drop(step.drop, step.drop_ci),
                format_duration(step.seconds * 1e9),
                Cell("kept", Tone.GOOD) if step.kept else Cell("left out", Tone.FAINT),
            )
            for step in steps
        ]
        columns: list[Column | str] = ["step", "did"]
        columns += figure_columns("SNR", "gain, dB", "drop, points", "time")
        yield make_table(
            [*columns, ""], rows, title=f"recovery of {', '.join(builds)}, on held-out samples"
        )


def _format_gain(step: RecoveryStep) -> str:
    if step.gain_db is None or step.gain_ci is None:
        return ""
    return f"{step.gain_db:+.2f} [{step.gain_ci[0]:+.2f}, {step.gain_ci[1]:+.2f}]"


def _format_shares(artifact: ArtifactResult) -> Cell:
    proof = artifact.precision_proof
    shares = sorted(proof.share.counted.items(), key=lambda item: -item[1])
    known = ", ".join(f"{share:.1%} {kind}" for kind, share in shares)
    return Cell(
        "; ".join(filter(None, (known, proof.share.describe_unknown()))),
        Tone.BAD if artifact.shortfall else Tone.PLAIN if proof.proven else Tone.DOUBTFUL,
    )


def _format_verification(parity: VerificationInfo | None) -> Cell:
    if parity is None:
        return Cell("not run", Tone.FAINT)
    if parity.passed is None:
        return Cell("nothing to compare", Tone.DOUBTFUL)
    text = "exact" if parity.snr_db is None else f"SNR {format_snr(parity.snr_db)}"
    if parity.box_agreement is not None:
        others = f", other outputs {text}" if parity.outputs else ""
        text = f"{parity.box_agreement:.1%} of the boxes agree{others}"
    if parity.top1_accuracy is not None:
        source = f"source {parity.source_top1_accuracy:.2%}, {parity.samples:,} samples"
        text += f", top-1 {parity.top1_accuracy:.2%} ({source})"
    elif parity.top1_agreement is not None:
        text += f", top-1 agreement {parity.top1_agreement:.1%}"
    for state in parity.trajectory:
        reached = (
            "exact"
            if state.snr_db is None
            else f"SNR {format_snr(state.snr_db)}"
            if state.finite
            else "not finite"
        )
        text += f"; {state.name} {reached}"
    if not parity.passed:
        return Cell(f"FAIL: {text}", Tone.BAD)
    low = parity.snr_db is not None and parity.snr_db < LOW_SNR_DB
    low |= parity.box_agreement is not None and parity.box_agreement < 1 - 10 ** (-LOW_SNR_DB / 20)
    return Cell(f"{text}, low", Tone.DOUBTFUL) if low else Cell(text, Tone.GOOD)


def _describe_artifacts(artifacts: Sequence[ArtifactResult]) -> Iterator[Sentence]:
    """The details that the table has no column for, grouped by kind."""
    blocked = {
        f"{artifact.backend}: " + artifact.why_not for artifact in artifacts if artifact.why_not
    }
    for text in sorted(blocked):
        yield Sentence(text, Tone.FAINT, "built, cannot run here")
    yield from _describe_verified([artifact.parity for artifact in artifacts if artifact.parity])
    for artifact in artifacts:
        yield from _explain_unverified(artifact)
    for artifact in artifacts:
        if not artifact.precision_proof.proven or artifact.shortfall:
            yield _describe_others(artifact)
    for artifact in artifacts:
        yield from _describe_unquantized(artifact)
    for artifact in artifacts:
        if artifact.ranges:
            yield Sentence(f"{artifact.id}: {artifact.ranges}", Tone.PLAIN, "ranges")
    for artifact in artifacts:
        yield from _describe_stored_weights(artifact)
    for artifact in artifacts:
        placement = artifact.precision_proof.placement
        if placement and placement.count:
            text = f"{artifact.id}: {format_placement(placement)}"
            yield Sentence(text, Tone.DOUBTFUL, "elsewhere")
    for artifact in artifacts:
        if artifact.mixed is not None:
            layers = Call("store show", artifact.id) + " lists the layers"
            text = f"{artifact.id}: {format_mixed(artifact.mixed)}; " + layers
            yield Sentence(text, Tone.STRONG, "mixed")


def _describe_verified(verified: Sequence[VerificationInfo]) -> Iterator[Sentence]:
    """The samples of verifications, and how rows were compared that a graph selects."""
    for data, samples in dict.fromkeys((parity.data, parity.samples) for parity in verified):
        yield Sentence(
            f"{samples:,} samples of {data}" if data else f"{samples:,} samples",
            Tone.PLAIN,
            "verified on",
        )
    for selected in dict.fromkeys(parity.selected for parity in verified if parity.selected):
        shown = [parity for parity in verified if parity.selected == selected]
        why = f"NonMaxSuppression or TopK selects the rows of {', '.join(selected)}, so their order may differ"
        if any(parity.box_agreement is not None for parity in shown):
            text = f"{why}: boxes are compared (score {PARITY_SCORE:g}, IoU {PARITY_IOU:g}), and no SNR is given"
            yield Sentence(text, Tone.PLAIN, "verified by boxes")
        elif any(parity.passed is False for parity in shown):
            way_out = (
                'a model card with task = "detection" and data with objects compare boxes instead'
            )
            yield Sentence(why, Tone.DOUBTFUL, "compared as sets of rows", (way_out,))


def _explain_unverified(artifact: ArtifactResult) -> Iterator[Sentence]:
    """Why an artifact did not pass its verification, and the way out."""
    parity = artifact.parity
    if parity is None or parity.passed is not False:
        return
    if low := [output for output in parity.outputs if output.finite]:
        least = -20 * log10(parity.tolerance_relative)
        figures = ", ".join(
            f"{output.name} {format_snr(output.snr_db)}"
            for output in low
            if output.snr_db is not None
        )
        text = f"{artifact.id}: an SNR of {least:.3g} dB is required of each output: {figures}"
        budget = Argument("budget", f"{max(LOW_SNR_DB, least):.3g}dB")
        way_out = Argument("min_snr") + " accepts less; " + budget
        way_out += " keeps the layers in float that cost the most"
        ways_out = (way_out,) if artifact.precision in CALIBRATED else ()
        yield Sentence(text, Tone.BAD, "not verified", ways_out)
    elif parity.outputs:
        way_out = Call("evaluate", "MODEL", layers="all")
        way_out += " names the first tensor that leaves the range"
        text = f"{artifact.id}: no output is finite and of the source's shape"
        yield Sentence(text, Tone.BAD, "not verified", (way_out,))


def _describe_unquantized(artifact: ArtifactResult) -> Iterator[Sentence]:
    """The layers inside subgraphs, which stay in floating point."""
    inner = [layer for layer in artifact.kept if layer.reason.startswith("inside ")]
    if inner and artifact.precision_proof.proven:
        others = f" and {len(inner) - 1} more" if len(inner) > 1 else ""
        text = f"{artifact.id}: {inner[0].layer}{others}, {inner[0].reason}"
        yield Sentence(text, Tone.DOUBTFUL, "not quantized")


def _describe_stored_weights(artifact: ArtifactResult) -> Iterator[Sentence]:
    for form in artifact.precision_proof.share.stored:
        layers = f"{form.count} layer{'' if form.count == 1 else 's'}"
        text = f"{artifact.id}: {form.form} in {layers}, computed in {form.type}"
        yield Sentence(text, Tone.PLAIN, "weights")


def _describe_others(artifact: ArtifactResult) -> Sentence:
    """The layers of a build in other types than its precision, and why they are."""
    proof = artifact.precision_proof
    reasons = {layer.layer: f", {layer.reason}" for layer in artifact.kept}
    unfit = f", {artifact.backend} has no {artifact.precision} kernel for it here"
    other = unfit if artifact.precision in CALIBRATED else ""
    names = "; ".join(
        f"{layer.name} ({layer.type}{reasons.get(layer.name, other)})" for layer in proof.others
    )
    more = proof.others_count - len(proof.others)
    rest = f" and {more} more" if more > 0 else ""
    if artifact.shortfall:
        text = f"{artifact.id}: {artifact.shortfall}; others: {names}{rest}"
        return Sentence(text, Tone.BAD, "not proven")
    share = proof.share.counted.get(artifact.precision, 0.0)
    if unknown := proof.share.describe_unknown():
        low, _ = proof.share.find_bounds(artifact.precision)
        text = (
            f"{artifact.id}: {unknown}; the share of {artifact.precision} is at least {low:.1%},"
            f" and {share:.1%} of the known MACs"
        )
        way_out = "a sign-off stays INCONCLUSIVE on it; export the model with standard operators in their place"
        return Sentence(text, Tone.DOUBTFUL, "unknown cost", (way_out,))
    text = f"{artifact.id}: {share:.1%} {artifact.precision}; in other types: {names}{rest}"
    way_out = f'a policy accepts this share if it states one: [precision] {artifact.precision} = "{int(100 * share)}%"'
    return Sentence(text, Tone.DOUBTFUL, "mixed types", (way_out,) if share >= 0.01 else ())


def _name_small_shares(artifacts: Sequence[ArtifactResult]) -> Iterator[Sentence]:
    """The type of most of a build's arithmetic, if that is not its precision."""
    for artifact in artifacts:
        shares = artifact.precision_proof.share.counted
        share = shares.get(artifact.precision, 0.0)
        unknown = artifact.precision_proof.share.unknown
        if artifact.precision not in CALIBRATED or share >= SMALL_SHARE or not shares or unknown:
            continue
        largest = max(artifact.precision_proof.others, key=lambda layer: layer.macs or 0)
        kind = max(shares, key=lambda name: shares[name])
        text = (
            f"{artifact.id} computes {share:.1%} of its MACs in {artifact.precision} and {shares[kind]:.1%} in {kind}"
            f" ({largest.op}): it is not an {artifact.precision.upper()} build in more than name"
        )
        yield Sentence(text, Tone.DOUBTFUL, "few layers")


def _list_omissions(failed: Sequence[Omission], left_out: Sequence[Omission]) -> Iterator[Sentence]:
    """Failures, then `fp16, int8 on tensorrt: why`, one line for each reason."""
    for omission in failed:
        yield Sentence(
            f"{omission.backend} {omission.precision} (exit status {omission.status:d}): "
            + omission.reason,
            Tone.BAD,
            "failed",
        )
    reasons = group_pairs(
        ((omission.backend, omission.reason), omission.precision) for omission in left_out
    )
    for (backend, reason), precisions in reasons.items():
        what = " on ".join(part for part in (", ".join(filter(None, precisions)), backend) if part)
        yield Sentence(f"{what}: " + reason, Tone.FAINT, "not built")


_TONES = {Standing.CHOSEN: Tone.GOOD, Standing.FAILED: Tone.BAD, Standing.NOT_PROVEN: Tone.BAD}


JOINT = "intervals hold at 95%: drops for all builds together, ratios for all that are compared at a batch size"


def document_from_choice(result: "ChoiceResult") -> Document:
    decision = result.decision
    budget = f"an SNR of at least {decision.budget}"
    if not decision.budget.endswith("dB"):
        budget = f"a drop in {name_score(decision.score)} of at most {decision.budget}"
    return make_document(
        [
            Sentence(f"{decision.model}: builds with {budget}, judged on {decision.judged_on}"),
            _tabulate_candidates(decision),
            Sentence(JOINT, Tone.FAINT),
            *_answer_choice(decision),
            *_list_omissions(decision.failed, decision.left_out),
            *warn_of_weights(result.build.weights),
            Sentence(str(result.run_dir), Tone.FAINT, "run"),
        ]
    )


def _tabulate_candidates(decision: Decision) -> Table:
    sizes = decision.batch_sizes
    columns: list[Column | str] = [
        "artifact",
        "backend",
        "precision",
        figure_column("SNR" if decision.budget.endswith("dB") else "drop, points"),
        *(figure_column(f"batch {size}") for size in sizes),
        Column("outcome", rank=2),
    ]
    rows: list[Row] = [
        (
            candidate.artifact,
            f"{candidate.backend} ({candidate.device})",
            candidate.precision,
            _format_accuracy(candidate.accuracy),
            *(_format_time(candidate, size) for size in sizes),
            Cell(
                f"{candidate.standing}: " + candidate.reason,
                _TONES.get(candidate.standing, Tone.PLAIN),
            ),
        )
        for candidate in decision.candidates
    ]
    return make_table(columns, rows)


def _format_accuracy(accuracy: CandidateAccuracy | None) -> str:
    if accuracy is None:
        return ""
    if accuracy.drop is not None and accuracy.drop_ci is not None:
        return format_drop(accuracy.drop, accuracy.drop_ci)
    if accuracy.keeps is None:
        return "not known"
    return "equal" if accuracy.snr_db is None else format_snr(accuracy.snr_db)


def _format_time(candidate: Candidate, size: int) -> str:
    time = next((time for time in candidate.times if time.batch_size == size), None)
    return "" if time is None else format_duration(median(time.final_ns or time.race_ns))


def _answer_choice(decision: Decision) -> Iterator[Sentence]:
    labels = {candidate.artifact: candidate.label for candidate in decision.candidates}
    for size, winner in decision.winners.items():
        equal = [
            f"{candidate.label}, artifact {candidate.artifact}"
            for candidate in decision.candidates
            if any(time.batch_size == size and time.is_equal for time in candidate.times)
        ]
        ties = f"; equally fast within the error: {'; '.join(equal)}" if equal else ""
        yield Sentence(f"batch {size}: {labels[winner]}, artifact {winner}{ties}", Tone.GOOD)
    if decision.winners:
        return
    judged, nearest = [candidate.standing for candidate in decision.candidates], decision.nearest
    if Standing.FAILED in judged or nearest is None:
        yield Sentence("no build could be measured", Tone.BAD)
        return
    text = f"FAIL  no build stays within {decision.budget}"
    if Standing.NOT_SHOWN in judged:
        wider = "more labeled data or a wider " + Argument("budget") + " would decide"
        text = f"no build is proven to stay within {decision.budget}: " + wider
    yield Sentence(
        text + f"; the nearest is {nearest.label} with {_format_accuracy(nearest.accuracy)}",
        Tone.BAD,
    )
