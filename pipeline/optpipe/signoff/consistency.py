"""Whether the records in a dossier agree with one another, and what they state that no raw file in it shows.

Who changes a record has to change every other one that follows from it: an id is the hash of its recipe, a recipe names
its parents by their ids, and what a run measured is the file that a build's record describes. What only one record
states (the size of an engine that is not here, the SNR of outputs that are not here) is named as such.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from optpipe.core.entries import ArtifactInfo, CalibrationInfo, GraphInfo, ModelInfo, ReferenceInfo, VerificationInfo
from optpipe.core.measurement import MEASUREMENTS_FILE, Subject, read_measurements
from optpipe.core.records import read_record
from optpipe.core.verdict import VerdictRecord
from optpipe.evaluate.recompute import read_evaluation
from optpipe.measure.validity import LIMITS
from optpipe.models.artifacts.engine import hash_engine
from optpipe.quantize.selection import SelectionInfo
from optpipe.quantize.sensitivity import MethodsInfo, SensitivityInfo
from optpipe.signoff.judge import DossierRequest
from optpipe.workspace.file_names import BUILDS, EVALUATION, POLICY, REQUEST, VERDICT
from optpipe.workspace.manifest import MANIFEST
from optpipe.workspace.runs import Run, load_runs
from optpipe.workspace.seal import SEAL, SIGNATURE, SUMS
from optpipe.workspace.store import Entry, compute_entry_id, entry_from_folder

REPORTS = HTML, MARKDOWN, JUNIT, COMPARISON = "report.html", "report.md", "junit.xml", "comparison.json"
_OWN = {REQUEST, POLICY, VERDICT, *REPORTS, SUMS, SEAL, SIGNATURE}
_FOLDERS = {BUILDS, "runs", "baseline"}
_KINDS = {
    kind.KIND: kind
    for kind in (
        ArtifactInfo, CalibrationInfo, GraphInfo, MethodsInfo, ModelInfo, ReferenceInfo, SelectionInfo, SensitivityInfo,
        VerificationInfo,
    )
}  # fmt: skip


def find_contradictions(folder: Path) -> Iterator[str]:
    """Where two records in a dossier contradict each other, or one contradicts itself, one line each.

    Raises BadInputError where a record is of another form.
    """
    yield from _find_foreign_files(folder)
    builds = {}
    for path in sorted((folder / BUILDS).glob("*/")):
        entry = entry_from_folder(path, _KINDS.get(path.name.rsplit("-", 1)[0]))
        builds[entry.id] = entry
    for entry in builds.values():
        yield from _check_entry(entry, builds)
    for run in load_runs(folder / "runs"):
        yield from _check_run(run, builds)
    judged = read_record(folder / REQUEST, DossierRequest).artifact
    others = {name: build for name, build in builds.items() if name != judged}  # an approved file may have had its id
    for run in load_runs(folder / "baseline" / "runs"):
        yield from _check_run(run, others)


def _find_foreign_files(folder: Path) -> Iterator[str]:
    """Files that do not belong in a dossier, and invalid JSON: a bare NaN is read by some and refused by others."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        record = name.split("/")
        known = name in _OWN if len(record) == 1 else record[0] in _FOLDERS
        if path.is_file() and (not known or (record[0] == BUILDS and (len(record) != 3 or path.name != MANIFEST))):
            yield f"{name}: not part of a dossier"
        if path.suffix == ".json":
            try:
                msgspec.json.decode(path.read_bytes())
            except msgspec.DecodeError as error:
                yield f"{name}: {error}"


def _check_entry(entry: Entry[Any], builds: Mapping[str, Entry[Any]]) -> Iterator[str]:
    kind, recipe, info = entry.manifest.kind, entry.manifest.recipe, entry.info
    place = f"{BUILDS}/{entry.path.name}/{MANIFEST}"
    if kind not in _KINDS:
        yield f"{place}: unknown kind {kind!r}"
        return
    computed = compute_entry_id(_KINDS[kind], recipe)
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
    if run.run_id != run.path.name or not run.run_id.startswith(f"{run.kind}-"):
        yield f"{place}/{MANIFEST}: describes {run.kind} run {run.run_id}"
    if run.kind == "bench":
        for one in read_measurements(run.files):
            yield from _check_subject(one.subject, builds, f"{place}/{MEASUREMENTS_FILE}: {one.id}")
    if run.kind == "evaluate":
        found = read_evaluation(run)
        for row in found.results:
            build = builds.get(row.artifact or "")
            if build is not None and build.info.weights != found.weights:
                yield f"{place}/{EVALUATION}: its weights are not those of {BUILDS}/{build.path.name}"
        if run.manifest.trained != found.weights.trained:
            yield f"{place}/{MANIFEST}: trained is {run.manifest.trained}, but {EVALUATION} says {found.weights.trained}"


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


def describe_looser_limits(folder: Path, artifact: str) -> str:
    """By how much more than usual a VALID measurement of the artifact may have scattered or drifted; empty where by no more."""
    runs = (run for run in load_runs(folder / "runs") if run.kind == "bench")
    limits = [one.limits for run in runs for one in read_measurements(run.files) if one.subject.artifact == artifact]
    largest = {name: max((each.get(name, usual) for each in limits), default=usual) for name, usual in LIMITS.items()}
    looser = [name for name, usual in LIMITS.items() if name.startswith("max_") and largest[name] > usual]
    said = ", ".join(f"{name} {largest[name]:g} instead of {LIMITS[name]:g}" for name in looser)
    return f"measurements count as VALID by looser limits than usual ({said})" if said else ""


def list_unbacked(folder: Path, verdict: VerdictRecord) -> Iterator[str]:
    """What the dossier states and no raw file in it shows, one line for each record that states it."""
    sources: dict[str, list[str]] = {}
    for one in verdict.criteria:
        if one.source.startswith(f"{BUILDS}/"):
            sources.setdefault(one.source, []).append(one.name)
    for source, names in sources.items():
        yield f"{', '.join(names)}: stated by {source}"
    for run in load_runs(folder / "runs"):
        if run.kind == "evaluate" and any(row.snr_db is not None for row in read_evaluation(run).results):
            yield f"SNR of the evaluated outputs: stated by runs/{run.run_id}/{EVALUATION}"
    if looser := describe_looser_limits(folder, verdict.artifact.id):
        yield f"{looser}: stated by runs/*/{MEASUREMENTS_FILE}"
    yield f"hardware, driver and package versions: stated by runs/*/{MANIFEST}, baseline/runs/*/{MANIFEST}"
    yield f"times, sizes and other facts of the builds: stated by {BUILDS}/*/{MANIFEST}"
