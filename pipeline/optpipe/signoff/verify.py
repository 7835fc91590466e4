"""Whether a dossier is as it was sealed, follows from its own raw files, and does not contradict itself.

Who changes a record has to change every other one that follows from it: an id is the hash of its recipe, a recipe names
its parents by their ids, and what a run measured is the file that a build's record describes. What only one record
states (the size of an engine that is not here, the SNR of outputs that are not here) is named as such.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from optpipe import __version__
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError, GateError, first_line
from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE, Subject, read_measurements
from optpipe.core.records import compare_recomputed, find_disagreements, list_read_errors, record_from_files
from optpipe.core.verdict import Verdict, VerdictRecord
from optpipe.evaluate.recompute import read_evaluation
from optpipe.measure.validity import LIMITS
from optpipe.models.artifacts.engine import hash_engine
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.dossier import BUILD_KINDS, Dossier, read_dossier
from optpipe.signoff.evidence import recompute_run
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.reports import COMPARISON, HTML, REPORTS, explain_no_drawing, render_dossier
from optpipe.workspace.entry import MANIFEST, Entry, Run, compute_entry_id
from optpipe.workspace.file_names import BUILDS, EVALUATION, POLICY, REQUEST, VERDICT
from optpipe.workspace.seal import SEAL, SIGNATURE, SUMS, find_seal_problems, find_signature_problem

_OWN = {REQUEST, POLICY, VERDICT, *REPORTS, SUMS, SEAL, SIGNATURE}
_FOLDERS = {BUILDS, "runs", "baseline"}


@dataclass(frozen=True, slots=True)
class VerifiedDossier:
    """A dossier with what verifying it found; who needs its content takes it from here, and opens no file again."""

    files: Files
    problems: tuple[str, ...]
    as_sealed: bool
    """Whether every byte and the signature are right, so that `problems` are all about what the files say."""
    content: Dossier | None = None
    verdict: VerdictRecord | None = None
    """The verdict as recomputed; None where the folder is not intact enough to compute it."""
    evidence: BuildEvidence | None = None
    """What `verdict` was judged on, recomputed from the raw files."""
    unbacked: tuple[str, ...] = ()
    """What is stated and no raw file in the dossier shows."""
    not_compared: tuple[str, ...] = ()
    """Reports that could not be rendered again here, and why."""

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def intact(self) -> bool:
        """Whether every byte is as sealed and every number follows from the raw files."""
        return not self.problems

    @property
    def signed(self) -> bool:
        return self.files.has(SIGNATURE)

    def list_sizes(self) -> list[int]:
        """The sizes of its files in bytes."""
        return [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]

    def require_intact(self) -> tuple[Dossier, VerdictRecord, BuildEvidence]:
        """What is in the dossier, its verdict and its evidence. Raises BadInputError where it failed verification."""
        if self.problems or self.content is None or self.verdict is None or self.evidence is None:
            raise BadInputError(
                f"{self.folder} failed verification ({self.problems[0]}); optpipe verify lists all problems"
            )
        return self.content, self.verdict, self.evidence


def require_pass(folder: Path, verdict: VerdictRecord, because: str | None, purpose: str) -> None:
    """Raises GateError for anything but an unqualified PASS without the reason `because`."""
    if because is None and (verdict.verdict is not Verdict.PASS or verdict.waived):
        waived = f"{len(verdict.waived)} criteria waived"
        state = waived if verdict.verdict is Verdict.PASS else verdict.verdict
        raise GateError(f"{folder} is not an unqualified PASS ({state}); pass --because TEXT to {purpose} anyway")


def verify_dossier(folder: Path, allowed_signers: Path | None = None) -> VerifiedDossier:
    """Verifies a dossier: its seal, its numbers, and that its reports are what the recomputed verdict gives.

    Raises BadInputError where `folder` is not a dossier.
    """
    found = check_dossier(folder, allowed_signers)
    if found.content is None or found.verdict is None or found.problems:
        return found
    try:
        problems, not_compared = _compare_reports(found.content, found.verdict)
    except list_read_errors() as error:
        problems, not_compared = [f"cannot be recomputed: {first_line(error)}"], []
    return replace(found, problems=tuple(problems), not_compared=tuple(not_compared))


def check_dossier(folder: Path, allowed_signers: Path | None = None) -> VerifiedDossier:
    """Verifies a dossier as `verify_dossier` does, without its reports."""
    files = Files(folder, kept={})
    problems = find_seal_problems(files)
    signature = find_signature_problem(files, allowed_signers)
    problems += [signature] if signature else []
    if problems:
        return VerifiedDossier(files, tuple(problems), as_sealed=False)
    found = VerifiedDossier(files, (), as_sealed=True)
    try:
        problems += _find_foreign_files(files)
        dossier = read_dossier(files)
        judged = judge_dossier(dossier)
        found = replace(found, content=dossier, verdict=judged.record, evidence=judged.evidence)
        stored = record_from_files(files, VERDICT, VerdictRecord)
        problems += compare_recomputed([(VERDICT, stored, judged.record)])
        problems += find_contradictions(dossier)
        for run in (*dossier.baseline_runs, *dossier.every_run):
            problems += compare_recomputed(recompute_run(run))
        unbacked = () if problems else tuple(list_unbacked(dossier, judged.record))
    except list_read_errors() as error:
        return replace(found, problems=(*problems, f"cannot be recomputed: {first_line(error)}"))
    return replace(found, problems=tuple(problems), unbacked=unbacked)


def _compare_reports(dossier: Dossier, verdict: VerdictRecord) -> tuple[list[str], list[str]]:
    """The reports that differ from what the raw files give, and those that cannot be rendered again here."""
    request, files = dossier.request, dossier.files
    if request.optpipe != __version__:
        return [], [f"{', '.join(REPORTS)}: written by optpipe {request.optpipe}; this is {__version__}"]
    not_compared = explain_no_drawing(request.drawn_with)
    texts = render_dossier(dossier, verdict, figures=bool(request.drawn_with) and not not_compared)
    computed, stored = (msgspec.json.decode(each) for each in (texts.pop(COMPARISON), files.read(COMPARISON)))
    problems = find_disagreements(stored, computed, COMPARISON)
    for name, text in texts.items():
        if (name != HTML or not not_compared) and files.read(name) != text.encode():
            problems.append(f"{name}: differs from the report that the raw files give")
    return problems, not_compared


def find_contradictions(dossier: Dossier) -> Iterator[str]:
    """Where two records in a dossier contradict each other, or one contradicts itself, one line each."""
    builds = {each.id: each for each in dossier.builds}
    for entry in builds.values():
        yield from _check_entry(entry, builds)
    for run in dossier.every_run:
        yield from _check_run(run, builds)
    judged = dossier.request.artifact
    others = {name: build for name, build in builds.items() if name != judged}  # an approved file may have had its id
    for run in dossier.baseline_runs:
        yield from _check_run(run, others)


def _find_foreign_files(files: Files) -> Iterator[str]:
    """Files that do not belong in a dossier, and invalid JSON: a bare NaN is read by some and refused by others."""
    for path in sorted(files.folder.rglob("*")):
        name = path.relative_to(files.folder).as_posix()
        record = name.split("/")
        known = name in _OWN if len(record) == 1 else record[0] in _FOLDERS
        if path.is_file() and (not known or (record[0] == BUILDS and (len(record) != 3 or path.name != MANIFEST))):
            yield f"{name}: not part of a dossier"
        if path.suffix == ".json":
            try:
                msgspec.json.decode(files.read(name))
            except msgspec.DecodeError as error:
                yield f"{name}: {error}"


def _check_entry(entry: Entry[Any], builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    kind, recipe, info = entry.kind, entry.recipe, entry.info
    place = f"{BUILDS}/{entry.path.name}/{MANIFEST}"
    if kind not in BUILD_KINDS:
        yield f"{place}: unknown kind {kind!r}"
        return
    computed = compute_entry_id(BUILD_KINDS[kind], recipe)
    if entry.id != computed:
        yield f"{place}: id is {entry.id}, but its recipe gives {computed}"
    if entry.path.name != f"{kind}-{entry.id}":
        yield f"{place}: describes {kind}-{entry.id}"
    if isinstance(info, ArtifactInfo):
        stated = {"backend": info.backend, "precision": str(info.precision), "device": info.device}
        yield from _compare(
            stated, {name: recipe.get(name, value) for name, value in stated.items()}, place, "its recipe"
        )
        for parent in (builds[one] for one in entry.manifest.parents if one in builds):
            if isinstance(parent.info, ModelInfo) and parent.info.weights != info.weights:
                yield f"{place}: its weights are not those of {BUILDS}/{parent.path.name}"
    if isinstance(info, ModelInfo):
        asked = recipe.get("model", {}).get("weights", {})
        if ("random" in asked) != (info.weights.source == "random") and "default" not in asked:
            yield f"{place}: weights are {info.weights.source!r}, but its recipe says {asked}"


def _compare(stated: Mapping[str, object], expected: Mapping[str, object], place: str, whose: str) -> Iterator[str]:
    for name, value in stated.items():
        if value != expected[name]:
            yield f"{place}: {name} is {value!r}, but {whose} says {expected[name]!r}"


def _check_run(run: Run, builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    place = f"runs/{run.path.name}"
    if run.name != run.path.name or not run.name.startswith(f"{run.kind}-"):
        yield f"{place}/{MANIFEST}: describes {run.kind} run {run.name}"
    if run.kind == "bench":
        for one in read_measurements(run.files):
            yield from _check_subject(one.subject, builds, f"{place}/{MEASUREMENTS_FILE}: {one.id}")
    if run.kind == "evaluate":
        found = read_evaluation(run)
        for row in found.results:
            build = builds.get(row.artifact or "")
            if build is not None and build.info.weights != found.weights:
                yield f"{place}/{EVALUATION}: its weights are not those of {BUILDS}/{build.path.name}"
        if run.info.trained != found.weights.trained:
            yield f"{place}/{MANIFEST}: trained is {run.info.trained}, but {EVALUATION} says {found.weights.trained}"


def _check_subject(subject: Subject, builds: Mapping[str, Entry[Any]], place: str) -> Iterator[str]:
    build = builds.get(subject.artifact)
    if build is None:
        return
    info, name = build.info, f"{BUILDS}/{build.path.name}"
    kind, _, _ = subject.device.partition(":")  # an artifact is built for `cuda` and measured on `cuda:0`
    stated = {"backend": subject.backend, "precision": str(subject.precision), "device": kind}
    expected: dict[str, object] = {"backend": info.backend, "precision": str(info.precision), "device": info.device}
    if subject.sha256 is not None:
        stated["sha256"], expected["sha256"] = subject.sha256, hash_engine(build)
    yield from _compare(stated, expected, place, name)


def describe_looser_limits(dossier: Dossier) -> str:
    """By how much more than usual a VALID measurement of the judged artifact may have scattered or drifted; empty where by no more."""
    artifact = dossier.request.artifact
    runs = (run for run in dossier.every_run if run.kind == "bench")
    limits = [one.limits for run in runs for one in read_measurements(run.files) if one.subject.artifact == artifact]
    largest = {name: max((each.get(name, usual) for each in limits), default=usual) for name, usual in LIMITS.items()}
    looser = [name for name, usual in LIMITS.items() if name.startswith("max_") and largest[name] > usual]
    said = ", ".join(f"{name} {largest[name]:g} instead of {LIMITS[name]:g}" for name in looser)
    return f"measurements count as VALID by looser limits than usual ({said})" if said else ""


def list_unbacked(dossier: Dossier, verdict: VerdictRecord) -> Iterator[str]:
    """What the dossier states and no raw file in it shows, one line for each record that states it."""
    sources: dict[str, list[str]] = {}
    for one in verdict.criteria:
        if one.source.startswith(f"{BUILDS}/"):
            sources.setdefault(one.source, []).append(one.name)
    for source, names in sources.items():
        yield f"{', '.join(names)}: stated by {source}"
    for run in dossier.every_run:
        if run.kind == "evaluate" and any(row.snr_db is not None for row in read_evaluation(run).results):
            yield f"SNR of the evaluated outputs: stated by runs/{run.name}/{EVALUATION}"
    if looser := describe_looser_limits(dossier):
        yield f"{looser}: stated by runs/*/{MEASUREMENTS_FILE}"
    yield f"hardware, driver and package versions: stated by runs/*/{MANIFEST}, baseline/runs/*/{MANIFEST}"
    yield f"times, sizes and other facts of the builds: stated by {BUILDS}/*/{MANIFEST}"
