"""Checks that a dossier has its sealed bytes, follows from its raw files, and does not contradict itself.

A changed record contradicts others: an id is the hash of its recipe, a recipe names its parents by their ids, and a run
measured the file that a build's record describes. Facts that only one record states (the size of an engine, the SNR of
outputs, both without files in the dossier) are listed as such.

"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.build.verify import find_impossible_errors, recompute_outputs
from optpipe.core.entries import ArtifactInfo, ModelInfo, RecoveredInfo, VerificationInfo
from optpipe.core.errors import BadInputError, ExitStatus, GateError, escape, first_line
from optpipe.core.files import Files
from optpipe.core.measurement import COMPARISON_FILE, MEASUREMENTS_FILE, Subject, read_measurements
from optpipe.core.metrics.sections import LOADING, MORE_METRICS, PEAK_MEMORY
from optpipe.core.records import (
    compare_recomputed,
    document_from_json,
    find_disagreements,
    group_pairs,
    list_read_errors,
    plain_from_record,
    read_versioned,
    record_from_files,
)
from optpipe.core.verdict import Verdict, VerdictRecord, require_reason
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.recompute import read_evaluation, read_predictions
from optpipe.evaluate.samples import count_copies, find_foreign_samples
from optpipe.evaluate.tasks.bounds import Asked, measure_answers, require_bounded
from optpipe.measure.invariants import find_impossible, find_impossible_turns
from optpipe.measure.turns import SIDES, TurnsRecord
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.preprocess.proof import find_impossible_images, read_rows
from optpipe.signoff.build_evidence import BuildEvidence
from optpipe.signoff.copies import find_copies
from optpipe.signoff.dossier import BUILD_KINDS, RUN_SUFFIXES, Dossier, DossierRequest, read_dossier
from optpipe.signoff.evidence import DOCUMENTS, JUDGED_RUNS, RECOMPUTE
from optpipe.signoff.judge import judge_dossier
from optpipe.signoff.loosened import describe_loosened
from optpipe.signoff.record_rules import find_contradicting_records
from optpipe.signoff.reports import COMPARISON, HTML, REPORTS, explain_no_drawing, render_dossier
from optpipe.trace.report import MAX_TRACE_ROWS, count_trace_rows, has_tables, read_profile
from optpipe.workspace.entry import MANIFEST, Entry, Run, compute_entry_id, get_utc_time
from optpipe.workspace.file_names import (
    BUILDS,
    EVALUATION,
    OUTPUT_ERRORS,
    POLICY,
    PREDICTIONS,
    PREPROCESSING,
    PROFILE,
    REQUEST,
    ROWS,
    TURNS,
    VERDICT,
)
from optpipe.workspace.seal import (
    TIMESTAMP,
    UNSEALED,
    check_approval,
    check_signature,
    find_seal_problems,
)
from optpipe.workspace.timestamp import Timestamp, check_timestamp

_OWN = {REQUEST, POLICY, VERDICT, *REPORTS, *UNSEALED}
CLOCKS_APART = timedelta(minutes=1)
"""Largest difference between the clocks of two machines."""


@dataclass(frozen=True, slots=True)
class VerifiedDossier:
    """A dossier with the results of its verification; take its content from here instead of opening files again."""

    files: Files
    problems: tuple[str, ...]
    as_sealed: bool
    """True if every byte and the signature are right, so that `problems` are only about content."""
    signature: str
    content: Dossier | None = None
    verdict: VerdictRecord | None = None
    """The recomputed verdict; None if the folder is too damaged, or its raw data contradict themselves."""
    evidence: BuildEvidence | None = None
    unbacked: tuple[str, ...] = ()
    """Statements without a raw file in the dossier."""
    not_compared: tuple[str, ...] = ()
    """Differences from another version of optpipe, and reports that cannot be rendered here."""

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def intact(self) -> bool:
        return not self.problems

    @property
    def exit_status(self) -> ExitStatus:
        """BAD_INPUT for changed bytes, FAIL for figures that do not follow from the raw files, otherwise that of the verdict.

        A PASS becomes INCONCLUSIVE if another version wrote something differently, because that may be a forgery.
        """
        if self.problems or self.content is None or self.verdict is None:
            return ExitStatus.FAIL if self.content and self.as_sealed else ExitStatus.BAD_INPUT
        differs = self.not_compared and self.content.request.optpipe != __version__
        passed = self.verdict.verdict is Verdict.PASS
        return ExitStatus.INCONCLUSIVE if differs and passed else self.verdict.verdict.exit_status

    def list_sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]

    def require_intact(self) -> tuple[Dossier, VerdictRecord, BuildEvidence]:
        """Raises BadInputError if the dossier failed verification."""
        if self.problems or self.content is None or self.verdict is None or self.evidence is None:
            problem = f"{self.folder} failed verification ({self.problems[0]})"
            raise BadInputError(f"{problem}; " + Call("verify") + " lists all problems")
        return self.content, self.verdict, self.evidence


def require_pass(folder: Path, verdict: VerdictRecord, because: str | None, purpose: str) -> None:
    """Raises GateError for anything except an unqualified PASS without the reason `because`.

    Raises BadInputError for a `because` that is no reason.
    """
    if because is not None:
        require_reason(because, Argument("because"))
    if because is None and not verdict.is_unqualified_pass:
        state = (
            f"{len(verdict.waived)} criteria waived"
            if verdict.verdict is Verdict.PASS
            else verdict.verdict
        )
        raise GateError(
            f"{folder} is not an unqualified PASS ({state}); pass "
            + Argument("because", "TEXT")
            + f" to {purpose} anyway"
        )


def verify_dossier(
    folder: Path, allowed_signers: Path | None = None, timestamp_roots: Path | None = None
) -> VerifiedDossier:
    """Verifies the seal, the numbers, and the reports of a dossier. Raises BadInputError if `folder` is not a dossier."""
    verified = check_dossier(folder, allowed_signers, timestamp_roots)
    if verified.problems or None in (verified.content, verified.verdict, verified.evidence):
        return verified
    try:
        problems, not_compared = _compare_reports(*verified.require_intact())
    except list_read_errors() as error:
        return replace(verified, problems=(f"cannot be recomputed: {first_line(error)}",))
    return replace(
        verified, problems=tuple(problems), not_compared=(*verified.not_compared, *not_compared)
    )


def check_dossier(
    folder: Path, allowed_signers: Path | None = None, timestamp_roots: Path | None = None
) -> VerifiedDossier:
    """Verifies a dossier without its reports."""
    files = Files(folder, kept={})
    problems = find_seal_problems(files)
    problem, signature = check_signature(files, allowed_signers)
    doubt, approval = check_approval(files, allowed_signers)
    if approval and not doubt and signature == "not signed":
        problem = None  # the approval's signature covers the hash of the dossier
    stamp = check_timestamp(files, timestamp_roots)
    problems += filter(None, (problem, doubt, stamp.problem))
    signature = "; ".join(filter(None, (signature, approval, stamp.words)))
    if problems:
        return VerifiedDossier(files, tuple(problems), as_sealed=False, signature=signature)
    verified = VerifiedDossier(files, (), as_sealed=True, signature=signature)
    try:
        problems += _find_foreign_files(files)
        dossier = read_dossier(files)
        verified = replace(verified, content=dossier)
        contradictions = [*find_contradictions(dossier)]
        if impossible := [*find_impossible_data(dossier)]:  # nothing is computed from it
            return replace(verified, problems=(*problems, *impossible, *contradictions))
        verdict, evidence = judge_dossier(dossier)
        verified = replace(verified, verdict=verdict, evidence=evidence)
        stored, computed = (
            document_from_json(files.read(VERDICT), VERDICT),
            plain_from_record(verdict),
        )
        serious, other = _split_by_version(
            find_disagreements(stored, computed, VERDICT),
            [*find_disagreements(stored, computed, VERDICT, ()), *_find_unknown_keys(dossier)],
            dossier.request,
        )
        problems += [*serious, *contradictions, *_check_stamp(dossier, stamp)]
        problems += _compare_errors(dossier)
        for run in (*dossier.baseline_runs, *dossier.every_run):
            for recompute in RECOMPUTE.get(run.kind, ()):
                problems += compare_recomputed(recompute(run))
        unbacked = () if problems else tuple(list_unbacked(dossier, verdict))
    except list_read_errors() as error:
        return replace(verified, problems=(*problems, f"cannot be recomputed: {first_line(error)}"))
    return replace(verified, problems=tuple(problems), unbacked=unbacked, not_compared=tuple(other))


def _split_by_version(
    serious: Sequence[str], every: Sequence[str], request: DossierRequest
) -> tuple[list[str], list[str]]:
    """Splits differences into problems and those that the wording of another version may explain."""
    if request.optpipe == __version__:
        return [*every], []
    other = f"written by optpipe {request.optpipe}, this is {__version__}"
    return [*serious], [
        f"{difference} ({other})" for difference in every if difference not in serious
    ]


def _compare_reports(
    dossier: Dossier, verdict: VerdictRecord, evidence: BuildEvidence
) -> tuple[list[str], list[str]]:
    """Reports that differ from the raw files; and those of another version, or that cannot be rendered here."""
    request, files = dossier.request, dossier.files
    undrawn = explain_no_drawing(request.drawn_with)
    drawn = bool(request.drawn_with) and not undrawn
    texts = render_dossier(dossier, verdict, evidence, figures=drawn)
    computed = document_from_json(texts.pop(COMPARISON).encode(), COMPARISON)
    stored = document_from_json(files.read(COMPARISON), COMPARISON)
    changed = [
        f"{name}: differs from the report that the raw files give"
        for name, text in texts.items()
        if (name != HTML or not undrawn) and files.read(name) != text.encode()
    ]
    serious = find_disagreements(stored, computed, COMPARISON)
    every = [*find_disagreements(stored, computed, COMPARISON, ()), *changed]
    problems, other = _split_by_version(serious, every, request)
    return problems, [*undrawn, *other]


def _list_documents(dossier: Dossier) -> Iterator[tuple[Files, str, Any]]:
    """The folder, the name, and the record of each document: of the request, and of builds and runs."""
    yield dossier.files, REQUEST, dossier.request
    for entry in (*dossier.builds, *dossier.every_run, *dossier.baseline_runs):
        # versions before a field existed did not write it; removing an empty value is not a forgery
        plain = plain_from_record(entry.info)
        info = {
            key: value
            for key, value in plain.items()
            if key in entry.manifest.info or value not in ("", [], None)
        }
        yield entry.files, MANIFEST, replace(entry.manifest, info=info)
        for name, kind in DOCUMENTS.get(entry.kind, {}).items():
            if entry.files.has(name):
                yield entry.files, name, record_from_files(entry.files, name, kind)


def _find_unknown_keys(dossier: Dossier) -> Iterator[str]:
    """Keys of a document that its record does not read, and keys that it lacks."""
    for files, name, record in _list_documents(dossier):
        place = f"{files.prefix}{name}"
        stored = document_from_json(files.read(name), place)
        yield from find_disagreements(stored, plain_from_record(record), place, (), "optpipe reads")


def _find_foreign_files(files: Files) -> Iterator[str]:
    """Files that do not belong in a dossier, and invalid JSON: readers disagree about a bare NaN."""
    lower: dict[str, str] = {}
    for path in sorted(files.folder.rglob("*")):
        name = path.relative_to(files.folder).as_posix()
        if path.is_file() and not _is_part(name):
            yield f"{name}: not part of a dossier"
        if path.is_file() and not _has_plain_name(name):
            yield f"{escape(name)}: a path has printable ASCII characters without a backslash"
        if path.is_file() and (twin := lower.setdefault(name.lower(), name)) != name:
            yield f"{name}: differs from {twin} in the case of letters alone"
        if path.suffix == ".json":
            try:
                document_from_json(files.read(name), name)
            except BadInputError as error:
                yield str(error)


def _is_part(name: str) -> bool:
    """Whether the format defines a file of this path."""
    first, *others = name.split("/")
    if not others:
        return name in _OWN
    if first == BUILDS:
        return len(others) == 2 and others[1] in (MANIFEST, OUTPUT_ERRORS)
    if first == "baseline":
        first, *others = others
    return first == "runs" and len(others) >= 2 and Path(name).suffix in RUN_SUFFIXES


def _find_spaced_models(dossier: Dossier) -> Iterator[str]:
    """Documents that name a model with spaces at its ends, which look like the name without them."""
    for files, name, record in _list_documents(dossier):
        model = getattr(record, "model", None)
        if isinstance(model, str) and model != model.strip():
            yield f"{files.prefix}{name}: the model is called {model!r}"


def _has_plain_name(name: str) -> bool:
    return name.isascii() and name.isprintable() and "\\" not in name


def find_impossible_data(dossier: Dossier) -> Iterator[str]:
    """One line for each rule that raw data break. What contradicts itself is judged by no arithmetic.

    What the answers ask for is counted before any of them is read.
    """
    asked = reduce(Asked.join, map(_measure_run, dossier.every_run), Asked())
    require_bounded(asked, dossier.files.folder)
    for entry in dossier.builds:
        if _has_errors(entry):
            place = f"{BUILDS}/{entry.path.name}/{OUTPUT_ERRORS}"
            yield from (f"{place}: {problem}" for problem in find_impossible_errors(entry))
    for folder, runs in (("runs", dossier.every_run), ("baseline/runs", dossier.baseline_runs)):
        for run in runs:
            yield from (f"{folder}/{run.path.name}/{problem}" for problem in _find_impossible(run))
    rows = sum(count_trace_rows(run) for run in dossier.every_run if run.kind == "profile")
    if rows > MAX_TRACE_ROWS:
        yield f"its traces have {rows:,} rows together; at most {MAX_TRACE_ROWS:,} are judged"


def _measure_run(run: Run) -> Asked:
    """What the answers of a run ask for."""
    if run.kind == "evaluate" and run.files.has(PREDICTIONS):
        return measure_answers(read_predictions(run))
    if run.kind == "preprocess" and run.files.has(ROWS):
        return measure_answers(read_rows(run.files))
    return Asked()


def _compare_errors(dossier: Dossier) -> Iterator[str]:
    """Stated errors of outputs that do not follow from those of the samples."""
    for entry in filter(_has_errors, dossier.builds):
        place = f"{BUILDS}/{entry.path.name}/{OUTPUT_ERRORS}"
        stated = [*entry.info.outputs, *entry.info.trajectory]
        yield from compare_recomputed([(place, stated, [*recompute_outputs(entry)])])


def _has_errors(entry: Entry[Any]) -> bool:
    return isinstance(entry.info, VerificationInfo) and OUTPUT_ERRORS in entry.manifest.files


def find_contradictions(dossier: Dossier) -> Iterator[str]:
    """One line for each contradiction between two records, or inside one."""
    request = dossier.request
    stored = record_from_files(dossier.files, REQUEST, dict)
    written = {*stored, "candidates", "previous"}  # older dossiers do not have them
    if absent := {member.name for member in fields(DossierRequest)} - written:
        yield f"{REQUEST}: has no key {', '.join(sorted(absent))}"
    yield from _find_spaced_models(dossier)
    yield from find_contradicting_records(dossier)
    builds = {build.id: build for build in dossier.builds}
    for entry in builds.values():
        yield from _check_entry(entry, builds)
    # an approved file may have had the id of the artifact
    others = {name: build for name, build in builds.items() if name != request.artifact}
    baseline = {request.baseline_artifact} - {None}
    for folder, runs, known, needed in (
        ("runs", dossier.every_run, builds, {request.artifact}),
        ("baseline/runs", dossier.baseline_runs, others, baseline),
    ):
        for run in runs:
            paired = baseline if COMPARISON_FILE in run.manifest.files else set()
            place = f"{folder}/{run.path.name}"
            yield from _check_run(run, place, known, needed | paired)
        yield from find_copies(runs, folder)
    measured = {
        run.name: len(read_measurements(run.files))
        for run in dossier.every_run
        if run.kind == "bench"
    }
    for run in dossier.every_run:
        if run.kind == "turns":
            rounds = read_versioned(run.files, TURNS, TurnsRecord).speedups
            measured[run.name] = len(rounds)
    about = {run.name for run in dossier.every_run if request.artifact in run.manifest.parents}
    counted = {name: count for name, count in measured.items() if name in about}
    yield from find_disagreements(
        dict(request.measurements), counted, f"{REQUEST}: measurements", (), "runs/ has"
    )
    yield from _check_dates(dossier)


def _check_dates(dossier: Dossier) -> Iterator[str]:
    """Finds ends before starts, and dates after that of the verdict."""
    created = dossier.request.created_utc
    times = {
        f"{REQUEST}: created": created,
        "now": get_utc_time(),
        "the policy": dossier.request.policy_utc or created,
    }
    yield from _check_order(times, "the policy", f"{REQUEST}: created")
    for entry in (*dossier.builds, *dossier.every_run, *dossier.baseline_runs):
        place = f"{entry.files.prefix}{MANIFEST}"
        started, finished = f"{place}: started", f"{place}: finished"
        times |= {started: entry.manifest.started_utc, finished: entry.manifest.finished_utc}
        yield from _check_order(times, started, finished, f"{REQUEST}: created", "now")
        for measurement in read_measurements(entry.files) if entry.kind == "bench" else ():
            measured = f"{entry.files.prefix}{MEASUREMENTS_FILE}: {measurement.id}: started"
            yield from _check_order(
                times | {measured: measurement.started_utc}, started, measured, finished
            )


def _check_stamp(dossier: Dossier, stamp: Timestamp) -> Iterator[str]:
    """Finds a dossier that was sealed before it was judged, or is to be sealed."""
    if stamp.time is not None:
        created, stamped = f"{REQUEST}: created", TIMESTAMP
        times = {
            created: dossier.request.created_utc,
            stamped: stamp.time.isoformat(),
            "now": get_utc_time(),
        }
        yield from _check_order(times, created, stamped, "now")


def _check_order(times: Mapping[str, str], *names: str) -> Iterator[str]:
    for earlier, later in pairwise(names):
        first, second = (datetime.fromisoformat(times[name]) for name in (earlier, later))
        if first > second + CLOCKS_APART:
            yield f"{earlier} {times[earlier]}, which is after {later} {times[later]}"


def _find_impossible(run: Run) -> Iterator[str]:
    """What contradicts itself in the raw files of a run, whatever it measured."""
    if run.kind == "bench":
        yield from find_impossible(run)
    if run.kind == "turns":
        turns = read_versioned(run.files, TURNS, TurnsRecord)
        sides = dict(zip(SIDES, (turns.over.device, turns.judged.device), strict=True))
        rounds, lasted_s = len(turns.speedups), run.manifest.seconds
        yield from find_impossible_turns(run.files, turns.load, sides, rounds, lasted_s)
    if run.kind == "evaluate":
        yield from find_foreign_samples(run)
    if run.kind == "preprocess":
        yield from find_impossible_images(run)


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
    if absent := {text for text in _list_texts(recipe) if text in builds} - {
        entry.id,
        *entry.manifest.parents,
    }:
        yield f"{place}: parents are {_join(entry.manifest.parents)}, but its recipe names {_join(absent)} too"
    if isinstance(info, ArtifactInfo | RecoveredInfo):
        for parent in (builds[parent] for parent in entry.manifest.parents if parent in builds):
            if isinstance(parent.info, ModelInfo) and parent.info.weights != info.weights:
                yield f"{place}: its weights are not those of {BUILDS}/{parent.path.name}"
    if isinstance(info, ArtifactInfo):
        stated = {"backend": info.backend, "precision": str(info.precision), "device": info.device}
        expected = {name: recipe.get(name, value) for name, value in stated.items()}
        yield from _compare(stated, expected, place, "its recipe")
        share = info.precision_proof.share
        for name, value in (*share.macs.items(), *share.layers.items()):
            if not 0 <= value <= 1:
                yield f"{place}: the share of {name} is {value:g}, which is not from 0 to 1"
        if any(part.count < 1 for part in share.unknown):
            yield f"{place}: a number of products of unknown cost is below 1"
    if kind == ModelInfo.KIND:
        asked = recipe.get("model", {}).get("weights", {})
        if ("random" in asked) != (info.weights.source == "random") and "default" not in asked:
            yield f"{place}: weights are {info.weights.source!r}, but its recipe says {asked}"


def _list_texts(value: object) -> Iterator[str]:
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    yield from (
        [value]
        if isinstance(value, str)
        else (text for part in inner for text in _list_texts(part))
    )


def _compare(
    stated: Mapping[str, object], expected: Mapping[str, object], place: str, whose: str
) -> Iterator[str]:
    for name, value in stated.items():
        if value != expected[name]:
            yield f"{place}: {name} is {value!r}, but {whose} says {expected[name]!r}"


def _check_run(
    run: Run, place: str, builds: Mapping[str, Entry[Any]], needed: Set[str | None]
) -> Iterator[str]:
    """`needed` are the artifacts whose raw files must exist."""
    if run.name != run.path.name or not run.name.startswith(f"{run.kind}-"):
        yield f"{place}/{MANIFEST}: describes {run.kind} run {run.name}"
    known = JUDGED_RUNS if place.startswith("runs/") else ("bench",)
    if run.kind not in known:
        yield f"{place}: a run of the kind {escape(run.kind)!r} is no part of it; known: {', '.join(known)}"
    parents = set(run.manifest.parents)
    if run.kind == "bench":
        measured = read_measurements(run.files)
        for measurement in measured:
            where = f"{place}/{MEASUREMENTS_FILE}: {measurement.id}"
            yield from _check_subject(measurement.subject, builds, where)
            yield from _check_settings(measurement.subject, where)
            files = (
                (measurement.samples_file, measurement.machine_file)
                if measurement.subject.artifact in needed
                else ()
            )
            yield from (
                f"{where}: {name} is missing" for name in files if name and not run.files.has(name)
            )
        if run.info.measurements != len(measured):
            yield f"{place}: the run made {run.info.measurements} measurements, {MEASUREMENTS_FILE} has {len(measured)}"
        subjects = {measurement.subject.artifact for measurement in measured}
        if not subjects <= parents or (subjects != parents and not run.interrupted):
            yield f"{place}/{MANIFEST}: parents are {_join(parents)}, but {_join(subjects)} were measured"
    if run.kind == "turns":
        turns = read_versioned(run.files, TURNS, TurnsRecord)
        models: set[str | None] = set()
        for subject in (turns.over, turns.judged):
            yield from _check_subject(subject, builds, f"{place}/{TURNS}")
            yield from _check_settings(subject, f"{place}/{TURNS}")
            models |= (
                set(builds[subject.artifact].manifest.parents[:1])
                if subject.artifact in builds
                else {None}
            )
        if len(models) != 1 or None in models:
            yield f"{place}/{TURNS}: compares builds that are not known to be of one model"
        if parents != {turns.over.artifact, turns.judged.artifact}:
            yield f"{place}/{MANIFEST}: parents are {_join(parents)}, but others took turns"
        if run.info.measurements != len(turns.speedups):
            yield f"{place}: the run had {run.info.measurements} rounds, {TURNS} has {len(turns.speedups)}"
    if run.kind == "evaluate":
        evaluation = read_evaluation(run)
        for row in evaluation.results:
            build = builds.get(row.artifact or "")
            if build is not None and build.info.weights != evaluation.weights:
                yield f"{place}/{EVALUATION}: its weights are not those of {BUILDS}/{build.path.name}"
            if not 0 <= row.calibrated_on <= row.samples:
                yield f"{place}/{EVALUATION}: calibrated on {row.calibrated_on} of {row.samples} samples"
            if row.artifact is not None and row.artifact not in parents:
                yield f"{place}/{MANIFEST}: parents are {_join(parents)}, but {row.artifact} was evaluated"
        if run.info.trained != evaluation.weights.trained:
            yield f"{place}/{MANIFEST}: trained is {run.info.trained}, but {EVALUATION} says {evaluation.weights.trained}"


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _check_subject(subject: Subject, builds: Mapping[str, Entry[Any]], place: str) -> Iterator[str]:
    build = builds.get(subject.artifact)
    if build is None:
        return
    info, name = build.info, f"{BUILDS}/{build.path.name}"
    kind, _, _ = subject.device.partition(
        ":"
    )  # an artifact is built for `cuda` and measured on `cuda:0`
    stated: dict[str, object] = {
        "backend": subject.backend,
        "precision": str(subject.precision),
        "device": kind,
        "packages": subject.packages,
    }
    expected: dict[str, object] = {
        "packages": info.packages,
        "backend": info.backend,
        "precision": str(info.precision),
        "device": info.device,
    }
    if subject.sha256 is not None:
        stated["sha256"], expected["sha256"] = subject.sha256, hash_engine(build)
    weights = info.weights.sha256 if info.weights.trained else info.weights.source
    for key, mine, theirs in (
        ("model", subject.model, info.model),
        ("weights", subject.weights, weights),
    ):
        if mine is not None:
            stated[key], expected[key] = mine, theirs
    yield from _compare(stated, expected, place, name)


def _check_settings(subject: Subject, place: str) -> Iterator[str]:
    """What a subject states twice: its threads among its options, and CUDA graphs of a device."""
    if (subject.cuda_graph is not None) and subject.device == "cpu":
        yield f"{place}: a CPU has no CUDA graphs"
    if subject.threads is not None and subject.options.get("threads") != subject.threads:
        yield f"{place}: {subject.threads} threads, and its options say otherwise"


def list_unbacked(dossier: Dossier, verdict: VerdictRecord) -> Iterator[str]:
    """Statements of the dossier without a raw file, one line for each record."""
    sources = group_pairs(
        (criterion.source, criterion.name)
        for criterion in verdict.criteria
        if criterion.source.startswith(f"{BUILDS}/")
    )
    for source, names in sources.items():
        yield f"{', '.join(names)}: stated by {source}"
    if looser := describe_loosened(verdict.loosened):
        yield f"{looser}: stated by {POLICY}, runs/*/{MEASUREMENTS_FILE}"
    kinds = {run.kind for run in dossier.every_run}
    if "bench" in kinds:
        unproven = tuple(f"{section}." for section in (PEAK_MEMORY, LOADING, MORE_METRICS))
        seen = [
            criterion.name for criterion in verdict.criteria if criterion.name.startswith(unproven)
        ]
        seen += [
            "output checks",
            "inputs",
            "peak memory of the host",
            "load times",
            "reasons that only the worker could see",
        ]
        yield f"{', '.join(seen)}: stated by runs/*/{MEASUREMENTS_FILE}"
        stated = "when the policy was first used, how many processes were started, and which runs were removed"
        yield f"{stated}: stated by {REQUEST}, runs/*/{MANIFEST}"
    for run in dossier.every_run:
        if run.kind == "evaluate":
            evaluation = read_evaluation(run)
            for name, rule in evaluation.sampled.items():
                yield f"what each sample adds to {name}: stated by {run.path.name}, scored by {rule.source}"
            snr = (
                "SNR of the evaluated outputs, "
                if any(row.snr_db is not None for row in evaluation.results)
                else ""
            )
            yield f"{snr}name and hash of the data set {evaluation.dataset.name!r}: stated by runs/{run.name}/{EVALUATION}"
            if copies := count_copies(run):
                yield f"{copies:,} of {evaluation.dataset.count:,} samples are copies of others: runs/{run.name}/{PREDICTIONS}"
        if run.kind == "profile":
            yield from _list_unbacked_stages(run)
    if "preprocess" in kinds:
        yield f"pictures, and differences of steps and images: stated by runs/*/{PREPROCESSING}"
    yield f"hardware, driver, and package versions: stated by runs/*/{MANIFEST}, baseline/runs/*/{MANIFEST}"
    yield f"times, sizes, and other facts of the builds: stated by {BUILDS}/*/{MANIFEST}"
    if absent := {parent for entry in dossier.builds for parent in entry.manifest.parents} - set(
        dossier.manifests
    ):
        yield f"{_join(absent)}, from which builds were made: no record"


def _list_unbacked_stages(run: Run) -> Iterator[str]:
    profile = read_profile(run)
    place = f"runs/{run.name}/{PROFILE}"
    yield f"facts, costs of layers, and counters of the profiled stages: stated by {place}"
    if profile.program is not None or profile.against is not None:
        yield f"the recorded program, and the comparison with another profile: stated by {place}"
    if large := [stage.subject.name for stage in profile.stages if not has_tables(run, stage)]:
        yield f"tables, findings, and shares of {', '.join(large)}: stated by {place}, without their traces"
