"""Copies the evidence for a verdict on a build into a folder, and verifies it while copying.

The folder also gets the raw files of the model's other builds for the report's comparison, newest first, as far as there is
room; the report counts the rest.
"""

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optpipe import __version__
from optpipe.backends.registry import BACKENDS
from optpipe.core.bench_defaults import MAX_CV
from optpipe.core.entries import ArtifactInfo, ModelInfo, VerificationInfo
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.files import Files
from optpipe.core.measurement import COMPARISON_FILE, MEASUREMENTS_FILE, read_measurements
from optpipe.core.metrics.registry import METRICS, PLUGINS
from optpipe.core.metrics.sampled import PLUGIN_SCORES
from optpipe.core.records import (
    json_from_record,
    read_versioned,
    record_from_files,
    record_from_json,
)
from optpipe.core.suggestions import suggest_names
from optpipe.core.verdict import VerdictRecord
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.recompute import read_evaluation
from optpipe.measure.turns import TurnsRecord
from optpipe.models.artifacts.builds_by_name import find_builds
from optpipe.models.artifacts.decisions import find_decision
from optpipe.models.artifacts.engine_files import hash_engine
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.artifacts.lookup import require_one_model
from optpipe.models.artifacts.missing_builds import make_unbuilt_error
from optpipe.models.artifacts.network_facts import describe_network
from optpipe.preprocess.proof import PreprocessRecord, is_proof_for
from optpipe.signoff.build_evidence import is_of_other_file
from optpipe.signoff.candidates import count_candidates
from optpipe.signoff.dossier import RUN_SUFFIXES, DossierRequest, hash_verifier, split_runs
from optpipe.signoff.evidence import JUDGED_RUNS
from optpipe.signoff.judge import require_waivable
from optpipe.signoff.policy import Policy
from optpipe.signoff.previous import find_previous
from optpipe.trace.report import MAX_TRACE_ROWS, count_rows
from optpipe.workspace.entry import (
    MANIFEST,
    Entry,
    Run,
    drop_folders,
    get_utc_time,
    read_manifest,
    require_unchanged,
    runs_from_files,
    strip_folders,
)
from optpipe.workspace.file_names import (
    BUILDS,
    OUTPUT_ERRORS,
    POLICY,
    PREPROCESSING,
    REQUEST,
    ROWS,
    TURNS,
    VERDICT,
)
from optpipe.workspace.files import write_bytes, write_json
from optpipe.workspace.runs import REMOVED, list_runs
from optpipe.workspace.seal import count_baselines, find_approved_baseline
from optpipe.workspace.store import NOTES, Store

LARGEST_TABLE_BYTES = 1024 * 1024
"""Limit for tables of a profile or parity run; its record and a proof's rows are always copied."""
LARGEST_TABLE_ROWS = MAX_TRACE_ROWS // 8
"""Limit for tables of a profile, so that two stages of four tables fit."""
LARGEST_OTHERS_BYTES = 1536 * 1024
"""Limit for all raw files of builds that are not judged."""


@dataclass(frozen=True, slots=True)
class SignoffRequest:
    model: str
    policy: Policy
    artifact: str | None = None
    waivers: Mapping[str, str] = field(default_factory=dict)
    since: str | None = None
    """Time in UTC; bench runs that started earlier are not judged."""
    min_seconds: float = 0.6
    """Minimum seconds of a process that measures missing evidence; the policy's percentiles may take longer."""
    max_cv: float = MAX_CV
    exported: str | None = None
    """The stored model that MODEL means by an ID; None if it was named."""
    scores: frozenset[str] = frozenset()
    """Names of the scores that a Python program will evaluate for this sign-off."""


def register_policy(policy: Policy, store: Store) -> str:
    """When a sign-off first used `policy` in this workspace: now, or the time in the workspace's note of it.

    Raises BadInputError if the note is damaged, or of a later time than now.
    """
    note, now = (
        store.workspace / NOTES / f"policy-{policy.sha256[:12]}.json",
        get_utc_time("milliseconds"),
    )
    if not note.is_file():
        write_json(note, {"policy": policy.sha256, "first_used_utc": now})
    first = record_from_json(note.read_bytes(), dict[str, str], note).get("first_used_utc", "")
    if first > now or not first:
        raise BadInputError(
            f"{note}: the policy was first used at {first!r}, but it is {now}: correct the clock"
        )
    return first


def find_baseline(entry: Entry[ArtifactInfo], store: Store) -> tuple[Files | None, str | None]:
    """The approved baseline of the model of `entry`, if there is one; and `describe_network` of the model, if it is stored."""
    exported = next(
        (model for model in store.list_entries(ModelInfo) if model.id == entry.manifest.parents[0]),
        None,
    )
    network = describe_network(exported) if exported else None
    content = exported.info.content if exported else ""
    return find_approved_baseline(store.workspace, entry.info.model, network, content), network


def collect_evidence(
    wanted: SignoffRequest,
    store: Store,
    folder: Path,
    *,
    drawn_with: Mapping[str, str] | None = None,
) -> Path:
    """Fills the empty `folder` with the evidence for `wanted`."""
    entry = find_judged_artifact(wanted, store)
    store.verify_entry(entry)
    baseline, network = find_baseline(entry, store)
    approved = None if baseline is None else read_versioned(baseline, REQUEST, DossierRequest)
    other_file = _copy_runs(entry, approved.artifact if approved else None, store, folder)
    checked = [
        verification
        for verification in store.list_entries(VerificationInfo)
        if entry.id in verification.manifest.parents
    ]
    steps = {criterion.steps for criterion in wanted.policy.criteria} - {None}
    checked.sort(
        key=lambda verification: verification.info.steps in steps
    )  # the newest, or the newest trajectory that the policy limits
    _copy_builds({entry.id, *(verification.id for verification in checked[-1:])}, store, folder)
    if baseline is not None and approved is not None:
        for run in split_runs(runs_from_files(baseline, "runs"), approved.since)[0]:
            if run.kind == "bench" and approved.artifact in run.manifest.parents:
                _copy_run(
                    run,
                    folder / "baseline" / "runs" / run.name,
                    {approved.artifact},
                    0,
                    whole=False,
                )
    (folder / POLICY).write_bytes(wanted.policy.source)
    mine = [
        run for run in runs_from_files(Files(folder), "runs") if entry.id in run.manifest.parents
    ]
    removed = (
        run for run in runs_from_files(Files(store.workspace), REMOVED) if run.kind in JUDGED_RUNS
    )
    about = dict.fromkeys(JUDGED_RUNS, entry.id) | {"preprocess": entry.manifest.parents[0]}
    benched = [run.manifest.started_utc for run in mine if run.kind == "bench"]
    policy_utc = register_policy(wanted.policy, store)
    first = (wanted.since, policy_utc if wanted.policy.preregistered else None)
    request = DossierRequest(
        model=entry.info.model,
        artifact=entry.id,
        waivers=dict(wanted.waivers),
        baseline=record_from_files(baseline, VERDICT, VerdictRecord).dossier_name
        if baseline
        else None,
        baseline_artifact=approved.artifact if approved else None,
        optpipe=__version__,
        created_utc=get_utc_time(),
        drawn_with=drawn_with or {},
        measurements={
            run.name: run.info.measurements or 0 for run in mine if run.kind in ("bench", "turns")
        },
        removed=tuple(run.name for run in removed if about[run.kind] in run.manifest.parents),
        baselines=count_baselines(baseline.folder, min(benched, default=None)) if baseline else 1,
        verifications=max(1, len(checked)),
        candidates=count_candidates(
            entry, mine, first, store, baseline=approved.artifact if approved else None
        ),
        other_file=other_file,
        network=network,
        baseline_network=approved.network if approved else None,
        since=wanted.since,
        policy_utc=policy_utc,
        verifier=hash_verifier(),
        previous=find_previous(entry, store),
    )
    write_bytes(folder / REQUEST, json_from_record(request))
    return folder


def require_metrics(policy: Policy) -> None:
    """Raises MissingError for a limit of a metric that only a plug-in which is not installed can measure."""
    names = [
        criterion.needs_plugin
        for criterion in policy.criteria
        if criterion.needs_plugin is not None
    ]
    for name in names:
        hint = suggest_names(name, PLUGINS, otherwise=METRICS.explain_missing(name))
        raise MissingError(f"the policy limits {name}, a metric that is not installed; {hint}")


def require_scores(policy: Policy, store: Store, own: frozenset[str] = frozenset()) -> None:
    """Raises MissingError for a limit of a score that neither a plug-in nor the program brings (`own`), and that no evaluation in the
    workspace has."""
    names = {criterion.sampled_score for criterion in policy.criteria} - {
        None,
        *PLUGIN_SCORES,
        *own,
    }
    if not names:
        return
    stored = {
        name
        for run in list_runs(store.workspace, "evaluate")
        for name in read_evaluation(run).sampled
    }
    for name in sorted(str(score) for score in names - stored):
        way_out = f"{METRICS.explain_missing(name)}, or evaluate in Python with scores=[...]"
        hint = suggest_names(name, {*PLUGIN_SCORES, *stored}, otherwise=way_out)
        raise MissingError(f"the policy limits {name}, a score that nothing here computes; {hint}")


def require_valid_request(wanted: SignoffRequest, store: Store) -> None:
    """Raises BadInputError if MODEL is an artifact's ID, the policy is for another model, or a waiver names no criterion."""
    _require_model(wanted.model, store)
    if wanted.policy.model and wanted.policy.model != wanted.model:
        problem = f"the policy is for {wanted.policy.model!r}, not {wanted.model!r}"
        raise BadInputError(f"{problem}; change `model` in the policy or the MODEL argument")
    require_metrics(wanted.policy)
    require_scores(wanted.policy, store, wanted.scores)
    require_waivable(wanted.waivers, wanted.policy)
    _require_options(wanted.policy, wanted.policy.build.get("backend"))


def _require_model(text: str, store: Store) -> None:
    """Raises BadInputError if `text` is an artifact's ID and not a model."""
    build = next(
        (
            build
            for build in store.list_entries(ArtifactInfo)
            if len(text) >= 4 and build.matches_id(text)
        ),
        None,
    )
    if build is not None and not find_builds(text, store):
        sign_off = Call("signoff", build.info.model, artifact=build.id, policy="FILE")
        raise BadInputError(
            f"{text} is an artifact of {build.info.model}, not a MODEL; run `" + sign_off + "`"
        )


def _require_options(policy: Policy, name: str | None) -> None:
    """Raises BadInputError for an option that the backend `name` has on no device, because it would never be measured."""
    backend = BACKENDS.get(name or "")
    if backend is None:
        return
    known = sorted(
        {name for device in backend.devices() for name in backend.runtime_options(device)}
    )
    if unknown := [name for name in policy.options if name not in known]:
        problem = f"the policy's [build.options]: {backend.name} has no option {unknown[0]!r}"
        raise BadInputError(f"{problem}; options are {', '.join(known)}")


def find_judged_artifact(wanted: SignoffRequest, store: Store) -> Entry[ArtifactInfo]:
    """Raises BadInputError if no build, or several, match. An artifact's ID selects it whether or not its source has changed."""
    if wanted.exported is None:
        built = find_builds(wanted.model, store, any_content=wanted.artifact is not None)
    else:
        built = [
            build
            for build in store.list_entries(ArtifactInfo)
            if wanted.exported in build.manifest.parents
        ]
    if not built:
        _require_model(wanted.model, store)
        raise make_unbuilt_error(wanted.model, store)
    named = {**wanted.policy.build, **({"artifact": wanted.artifact} if wanted.artifact else {})}
    fitting = [
        build
        for build in built
        if all(
            build.matches_id(value) if key == "artifact" else str(getattr(build.info, key)) == value
            for key, value in named.items()
        )
    ]
    if wanted.artifact is None and wanted.exported is None:
        require_one_model(wanted.model, fitting, store)
    newest = {build.info.label: build for build in fitting}
    if not newest:
        have = ", ".join(
            sorted({f"{build.info.backend} {build.info.precision} ({build.id})" for build in built})
        )
        asked = ", ".join(f"{key} {value}" for key, value in named.items())
        raise BadInputError(f"no build of {wanted.model} matches {asked}; available: {have}")
    if len(newest) > 1:
        have = ", ".join(
            f"{build.info.backend} {build.info.precision} ({build.id})" for build in newest.values()
        )
        decided = find_decision(store.workspace, {build.id for build in newest.values()})
        chosen = (
            "; " + Argument("precision", "auto") + f" chose {decided[0].describe()}"
            if decided
            else ""
        )
        problem = f"{len(newest)} builds of {wanted.model} match: {have}"
        by_id = Call("signoff", wanted.model, artifact="ID", policy="FILE")
        raise BadInputError(
            problem,
            remedy="choose one in the policy's [build], or by its ID: `" + by_id + "`" + chosen,
        )
    (build,) = newest.values()
    _require_options(wanted.policy, build.info.backend)
    return build


def _copy_runs(
    entry: Entry[ArtifactInfo], baseline: str | None, store: Store, folder: Path
) -> tuple[str, ...]:
    """Copies all runs about the judged build, and other builds' runs, newest first, as far as there is room.

    Returns the bench runs of another file under the build's id, which are not copied.
    """
    build, other_file = judged_build_from_entry(entry), []
    model = {
        stored.id for stored in store.list_entries() if stored.info.get("model") == entry.info.model
    }
    room = LARGEST_OTHERS_BYTES
    for run in reversed(list_runs(store.workspace)):
        about = run.kind in JUDGED_RUNS and is_run_about(run, entry)
        if about and run.kind == "bench" and is_of_other_file(run, build):
            other_file.append(run.name)
        elif about:
            judged = {entry.id, baseline} if COMPARISON_FILE in run.manifest.files else {entry.id}
            room = _copy_run(run, folder / "runs" / run.name, judged, room)
        elif run.kind == "bench" and model & set(run.manifest.parents) and run.size_bytes <= room:
            room = _copy_run(run, folder / "runs" / run.name, {entry.id}, room)
    return tuple(reversed(other_file))


def is_run_about(run: Run, entry: Entry[ArtifactInfo]) -> bool:
    """A parity proof is about every build of its model; one that does not name the model's hash is about none."""
    if run.kind != "preprocess":
        return entry.id in run.manifest.parents
    record = record_from_files(run.files, PREPROCESSING, PreprocessRecord)
    return record.model_sha256 is not None and is_proof_for(record, judged_build_from_entry(entry))


def _copy_run(
    run: Run, target: Path, judged: Set[str | None], room: int, *, whole: bool = True
) -> int:
    """Copies the files of a run that fit; returns the room that is left for raw files of builds not in `judged`."""
    require_unchanged(run, whole=whole)
    sizes = {path: file.size_bytes for path, file in run.manifest.files.items()}
    left_out = set()
    if run.kind in ("profile", "preprocess"):
        kept_always = {path for path in sizes if path.endswith(".json") or path == ROWS}
        left_out = {
            path
            for path, size in sizes.items()
            if size > LARGEST_TABLE_BYTES
            or Path(path).suffix not in RUN_SUFFIXES
            or (run.kind == "profile" and count_rows(run, path) > LARGEST_TABLE_ROWS)
        } - kept_always
    for measurement in read_measurements(run.files) if run.kind == "bench" else ():
        files = [name for name in (measurement.samples_file, measurement.machine_file) if name]
        needed = 0 if measurement.subject.artifact in judged else sum(sizes[path] for path in files)
        if needed <= room:
            room -= needed
        else:
            left_out |= set(files)
    for path in {path for path in sizes if path not in left_out and (whole or run.files.has(path))}:
        content = run.files.read(path)
        if hashlib.sha256(content).hexdigest() != run.manifest.files[path].sha256:
            raise BadInputError(
                f"run {run.name} changed while it was copied ({path}); sign off again"
            )
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    command = drop_folders(run.manifest.command)
    write_bytes(target / MANIFEST, json_from_record(replace(run.manifest, command=command)))
    return room


def _copy_builds(wanted: set[str], store: Store, folder: Path) -> None:
    """Copies the manifests of `wanted`, of all measured builds, and of all their ancestors.

    A build whose file has changed since it was measured is left out, because it would contradict its measurements.
    """
    entries = {entry.id: entry for entry in store.list_entries()}
    files = {build.id: hash_engine(build) for build in store.list_entries(ArtifactInfo)}
    paths = folder.glob(f"runs/*/{MEASUREMENTS_FILE}")
    measured = [
        measurement.subject
        for path in paths
        for measurement in read_measurements(Files(path.parent))
    ]
    for path in folder.glob(f"runs/*/{TURNS}"):
        record = read_versioned(Files(path.parent), TURNS, TurnsRecord)
        measured += [record.over, record.judged]
    wanted |= {subject.artifact for subject in measured}
    wanted -= {
        subject.artifact
        for subject in measured
        if subject.sha256 not in (None, files.get(subject.artifact))
    }
    copied: dict[str, Entry[Any]] = {}
    while wanted := (wanted & set(entries)) - set(copied):
        copied |= {name: entries[name] for name in wanted}
        wanted = {parent for name in wanted for parent in entries[name].manifest.parents}
    for entry in copied.values():
        target = folder / BUILDS / entry.path.name
        write_bytes(
            target / MANIFEST, json_from_record(strip_folders(read_manifest(Files(entry.path))))
        )
        if OUTPUT_ERRORS in entry.manifest.files:
            write_bytes(target / OUTPUT_ERRORS, entry.files.read(OUTPUT_ERRORS))
