"""The comparison that a dossier's report shows: a function of the dossier's files alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.comparison import Comparison, Goal
from optpipe.core.entries import ArtifactInfo
from optpipe.core.environment import Environment
from optpipe.core.hashing import hash_file
from optpipe.core.measurement import read_measurements
from optpipe.measure.compare import compare_measurements
from optpipe.measure.groups import find_environment_differences
from optpipe.measure.overview import Overview, collect_build_facts
from optpipe.measure.recompute import measurements_from_run
from optpipe.models.artifacts.facts import judged_build_from_entry
from optpipe.report.report import RawFile, StageBar
from optpipe.signoff.judge import read_request
from optpipe.signoff.since import split_runs
from optpipe.workspace.file_names import BUILDS
from optpipe.workspace.manifest import MANIFEST
from optpipe.workspace.runs import load_runs
from optpipe.workspace.store import Entry, entry_from_folder


def overview_from_dossier(folder: Path) -> Overview:
    """The comparison of the builds whose raw files lie in a dossier, measured where the judged build last was.

    A function of the folder alone: a sign-off writes what it gives, and `optpipe verify` computes it again.
    """
    request = read_request(folder)
    every = load_runs(folder / "runs")
    runs, earlier = split_runs(every, request.since)
    bench = [run for run in runs if run.kind == "bench"]
    measured = tuple(one for run in bench for one in measurements_from_run(run, whole=False))
    stated = sum(len(read_measurements(run.files)) for run in bench)
    mine = [one for one in measured if one.measurement.subject.artifact == request.artifact]
    place = (
        max(mine or measured, key=lambda one: one.measurement.started_utc).environment if measured else Environment()
    )
    near = tuple(one for one in measured if not find_environment_differences(place, one.environment))
    builds = read_builds(folder)
    others = _find_namesakes(request.artifact, builds)
    here = tuple(one for one in near if one.measurement.subject.artifact not in others)
    if not here:
        reason = f"no measurements of {request.model}; first run optpipe bench {request.model}"
        nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, reason), environment=place)
        return Overview(nothing, (), every)
    comparison = compare_measurements(here, known=collect_build_facts(builds, runs))
    notes = (
        (stated - len(measured), "not in this dossier: raw samples too large or missing"),
        (len(measured) - len(near), "excluded: from another machine"),
        (len(near) - len(here), "excluded: of another build or model that is called the same"),
        (sum(len(read_measurements(run.files)) for run in earlier), "excluded: earlier than --since"),
    )
    said = tuple(f"{count} measurement{'s are' if count > 1 else ' is'} {why}" for count, why in notes if count)
    return Overview(replace(comparison, warnings=(*comparison.warnings, *said)), here, every)


def _find_namesakes(judged: str, builds: Sequence[Entry[ArtifactInfo]]) -> set[str]:
    """The builds that a table would show as the judged one, or as builds of its model, and that are none."""
    labels = {each.id: each.info.label for each in builds}
    models = {each.id: judged_build_from_entry(each).model_sha256 for each in builds}
    return {
        each
        for each in labels
        if each != judged and (labels[each] == labels.get(judged) or models[each] != models.get(judged))
    }


def read_builds(folder: Path) -> list[Entry[ArtifactInfo]]:
    """The store's records of the builds in a dossier."""
    return [entry_from_folder(path, ArtifactInfo) for path in sorted(folder.glob(f"{BUILDS}/{ArtifactInfo.KIND}-*/"))]


def list_build_files(folder: Path) -> tuple[RawFile, ...]:
    """The files that `read_builds` reads."""
    paths = sorted(folder.glob(f"{BUILDS}/*/{MANIFEST}"))
    return tuple(RawFile(path.relative_to(folder).as_posix(), hash_file(path), path.stat().st_size) for path in paths)


def stage_bars_from_dossier(folder: Path) -> tuple[StageBar, ...]:
    """How long each stage of each build in a dossier took when it was made."""
    every = [entry_from_folder(path) for path in sorted(folder.glob(f"{BUILDS}/*/"))]
    by_id = {entry.id: entry.manifest for entry in every}
    builds = read_builds(folder)
    counts = Counter(_describe_build(each) for each in builds)
    bars = []
    for build in builds:
        label = _describe_build(build) + (f" {build.id[:8]}" if counts[_describe_build(build)] > 1 else "")
        ancestry = [by_id[parent] for parent in build.manifest.parents if parent in by_id]
        bars += [StageBar(label, each.kind, each.seconds) for each in (*ancestry, build.manifest)]
    return tuple(bars)


def _describe_build(build: Entry[ArtifactInfo]) -> str:
    return f"{build.info.backend} {build.info.precision}"
