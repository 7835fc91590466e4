"""Collects everything that was measured in a workspace for comparison: runs, artifacts and their accuracy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import BaselineRecord, Comparison, read_measurements
from optpipe.core.plan import for_workspace
from optpipe.core.quantity import Estimate
from optpipe.evaluate.recompute import observe_accuracy
from optpipe.measure.compare import BuildFacts, compare_measurements
from optpipe.measure.figures import list_artifact_measurements, measurements_from_run
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.int8_notes import check_int8_accuracy, find_int8_causes
from optpipe.measure.search import Slo
from optpipe.models.artifacts.lookup import describe_network, find_builds, judged_build_from_entry
from optpipe.workspace.entry import MANIFEST, Entry, Manifest, Run, load_run, runs_from_files
from optpipe.workspace.runs import list_runs
from optpipe.workspace.seal import find_approved_baseline
from optpipe.workspace.store import Store


def find_bench_runs(workspace: Path, names: Sequence[str] = ()) -> tuple[Run, ...]:
    """The bench runs `names` (ids, unambiguous prefixes, or folders), or all.

    Raises BadInputError if one is missing, or if there are none.
    """
    present = list_runs(workspace, "bench")
    if not names:
        if not present:
            raise _nothing_measured(workspace)
        return present
    return tuple(_find_run(name, present, workspace) for name in names)


def _nothing_measured(workspace: Path) -> BadInputError:
    build, bench = for_workspace("optpipe build MODEL"), for_workspace("optpipe bench MODEL")
    return BadInputError(f"no measurements in {workspace} yet; first run {build}, then {bench}")


def _find_measured_model(text: str, store: Store) -> str | None:
    """The measured model that `text` means as MODEL; None if it names a run, or if nothing of it was measured."""
    runs = list_runs(store.workspace, "bench")
    if (Path(text) / MANIFEST).is_file() or any(run.name.startswith(text) for run in runs):
        return None
    measured = {one.subject.model for run in runs for one in read_measurements(run.files)}
    named = {each.info.model for each in find_builds(text, store, any_content=True)} | {text}
    return next(iter(named & measured), None)


def _find_run(name: str, present: Sequence[Run], workspace: Path) -> Run:
    if (Path(name) / MANIFEST).is_file():
        run = load_run(Path(name))
        if run.kind != "bench":
            raise BadInputError(f"{name} is a {run.kind} run; compare requires bench runs")
        return run
    found = [run for run in present if run.name == name] or [run for run in present if run.name.startswith(name)]
    if len(found) != 1:
        known = ", ".join(run.name for run in (found or present)[-5:]) or "none"
        raise BadInputError(f"{name!r} matches {len(found)} bench runs in {workspace}; available: {known}")
    return found[0]


def compare_workspace(
    store: Store,
    *,
    names: Sequence[str] = (),
    model: str | None = None,
    length: int | None = None,
    baseline: str | None = None,
    slo: Slo | None = None,
    across: bool = False,
) -> tuple[Comparison, tuple[RecordedMeasurement, ...], tuple[Run, ...]]:
    """Compares measurements; returns them and their runs too. `baseline` is a run, or `approved` for the dossier of `model`.

    A single name that is a measured model and no run acts as `model`; a file's name selects the builds of that file.
    """
    of_file: set[str] = set()
    if model is None and len(names) == 1 and (found := _find_measured_model(names[0], store)) is not None:
        if Path(names[0]).is_file():
            of_file = {each.id for each in find_builds(names[0], store)}
        model, names = found, ()
    held_against, against = _find_baseline(store, baseline, model)
    runs = find_bench_runs(store.workspace, names)
    if held_against is not None and held_against.kind == "run":
        runs = tuple(run for run in runs if run.name != held_against.name)
        if not runs:
            raise BadInputError(
                f"the only run is the baseline {held_against.name}; measure something to compare: {for_workspace('optpipe bench MODEL')}"
            )
    measured = tuple(one for run in runs for one in measurements_from_run(run))
    if model is not None:
        have = sorted({str(one.measurement.subject.model) for one in measured})
        measured = tuple(one for one in measured if one.measurement.subject.model == model)
        if have and not measured:
            raise BadInputError(f"no measurements of {model} in {store.workspace}; measured models: {', '.join(have)}")
    if any(one.measurement.subject.artifact in of_file for one in measured):
        measured = tuple(one for one in measured if one.measurement.subject.artifact in of_file)
    if length is not None:
        have = sorted({str(one.measurement.load.length) for one in measured if one.measurement.load.length})
        measured = tuple(one for one in measured if one.measurement.load.length == length)
        if not measured:
            raise BadInputError(f"no measurements at length {length}; measured lengths: {', '.join(have) or 'none'}")
    if not measured:
        raise _nothing_measured(store.workspace)
    known = collect_build_facts(store.list_entries(ArtifactInfo), list_runs(store.workspace))
    comparison = compare_measurements(
        measured, baseline=held_against, against=against, known=known, slo=slo, across=across
    )
    warnings = (*comparison.warnings, *_list_namesakes(measured, store))
    return replace(comparison, warnings=warnings), measured, runs


def _list_namesakes(measured: Sequence[RecordedMeasurement], store: Store) -> Iterator[str]:
    """Models of which several networks were measured, as far as the store has them: a row is the newest build alone."""
    builds = {one.measurement.subject.artifact for one in measured}
    exported = {each.id: each for each in store.list_entries(ModelInfo)}
    namesakes: dict[str, list[tuple[str, str]]] = {}
    for entry in store.list_entries(ArtifactInfo):
        if entry.id in builds and entry.manifest.parents[0] in exported:
            namesakes.setdefault(entry.info.model, []).append((entry.manifest.parents[0], entry.id))
    for model, pairs in namesakes.items():
        if len(origins := {origin for origin, _ in pairs}) < 2:
            continue
        networks = {origin: describe_network(exported[origin]) for origin in origins}
        found = {network: artifact for origin, artifact in pairs if (network := networks[origin]) is not None}
        if len(found) > 1:
            listed = "; ".join(f"{network} ({artifact})" for network, artifact in found.items())
            yield f"{len(found)} networks are called {model}, and each row is of the newest: {listed}; name one's file to compare it"


def _find_baseline(
    store: Store, name: str | None, model: str | None
) -> tuple[BaselineRecord | None, tuple[RecordedMeasurement, ...]]:
    if name is None:
        return None, ()
    if name != "approved":
        run = find_bench_runs(store.workspace, [name])[0]
        return BaselineRecord(run.name, "run"), measurements_from_run(run)
    if model is None:
        raise BadInputError("--baseline approved is of one model: add --model MODEL")
    if (files := find_approved_baseline(store.workspace, model)) is None:
        raise BadInputError(
            f"no approved baseline for {model}; approve one with {for_workspace('optpipe signoff approve DOSSIER')}"
        )
    measured = tuple(list_artifact_measurements(runs_from_files(files, "runs"), 0.95, None))
    return BaselineRecord(f"approved {model}", "approved"), measured


def collect_build_facts(
    artifacts: Iterable[Entry[ArtifactInfo]], runs: Sequence[Run], exported: Mapping[str, Manifest] | None = None
) -> dict[str, BuildFacts]:
    found = {}
    for entry in artifacts:
        build = judged_build_from_entry(entry, exported)
        top1 = observe_accuracy(runs, build, 0.95).get("top1")
        accuracy = check_int8_accuracy(runs, build)
        found[entry.id] = BuildFacts(
            size_bytes=build.size_bytes,
            build_s=entry.manifest.seconds,
            top1=None if top1 is None else Estimate(float(top1.value), top1.low, top1.high),
            causes=find_int8_causes(entry.info),
            accuracy=accuracy.message if accuracy else None,
        )
    return found
