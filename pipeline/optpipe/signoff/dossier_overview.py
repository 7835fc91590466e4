"""The comparison that a dossier's report shows: a function of the dossier's files alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.bench.recompute import measured_from_run
from optpipe.compare.compare import compared
from optpipe.compare.overview import Overview, known_builds
from optpipe.core.comparison import Comparison, Goal
from optpipe.core.hashing import file_sha256
from optpipe.core.measurement import MEASUREMENTS_FILE
from optpipe.measuring.measured import foreign
from optpipe.reporters.report import RawFile, StageBar
from optpipe.workspace.file_names import BUILDS, REQUEST
from optpipe.workspace.manifest import MANIFEST, Manifest, manifest_from_file
from optpipe.workspace.runs import (
    json_file,
    json_of_run,
    runs_in,
)


def overview_of_dossier(folder: Path) -> Overview:
    """The comparison of the builds whose raw files lie in a dossier, measured where the judged build last was.

    A function of the folder alone: a sign-off writes what it gives, and `optpipe verify` computes it again.
    """
    runs = runs_in(folder / "runs")
    bench = [run for run in runs if run.kind == "bench"]
    measured = tuple(one for run in bench for one in measured_from_run(run, whole=False))
    stated = sum(len(json_of_run(run, MEASUREMENTS_FILE).get("measurements", ())) for run in bench)
    request = json_file(folder / REQUEST)
    mine = [one for one in measured if one.measurement.subject.artifact == request["artifact"]]
    place = max(mine or measured, key=lambda one: one.measurement.started_utc or "").environment if measured else {}
    here = tuple(one for one in measured if not foreign(place, one.environment))
    if not here:
        reason = f"nothing was measured of {request['model']}; first: optpipe bench {request['model']}"
        nothing = Comparison((), dict.fromkeys(Goal), dict.fromkeys(Goal, reason), environment=place)
        return Overview(nothing, (), runs)
    comparison = compared(here, known=known_builds(manifests_in(folder), runs))
    notes = (
        (stated - len(measured), "not in this dossier: their raw samples are large, or they have none"),
        (len(measured) - len(here), "left out: they are from another machine"),
    )
    said = tuple(f"{count} measurement{'s are' if count > 1 else ' is'} {why}" for count, why in notes if count)
    return Overview(replace(comparison, warnings=(*comparison.warnings, *said)), here, runs)


def manifests_in(folder: Path) -> list[Manifest]:
    """The store's records of the builds in a dossier, and of what they were made from."""
    return [manifest_from_file(path) for path in sorted(folder.glob(f"{BUILDS}/*/{MANIFEST}"))]


def build_files(folder: Path) -> tuple[RawFile, ...]:
    """The files that `manifests_in` reads."""
    paths = sorted(folder.glob(f"{BUILDS}/*/{MANIFEST}"))
    return tuple(RawFile(path.relative_to(folder).as_posix(), file_sha256(path), path.stat().st_size) for path in paths)


def stage_bars(manifests: Sequence[Manifest]) -> tuple[StageBar, ...]:
    """How long each stage of each build among `manifests` took when it was made."""
    by_id = {manifest.id: manifest for manifest in manifests}
    bars = []
    for manifest in manifests:
        if manifest.kind == "artifact":
            alike = [each for each in manifests if each.kind == "artifact" and _built(each) == _built(manifest)]
            label = _built(manifest) + (f" {manifest.id[:8]}" if len(alike) > 1 else "")
            ancestry = [by_id[parent] for parent in manifest.parents if parent in by_id]
            bars += [StageBar(label, each.kind, each.seconds) for each in (*ancestry, manifest)]
    return tuple(bars)


def _built(manifest: Manifest) -> str:
    return f"{manifest.info['backend']} {manifest.info['precision']}"
