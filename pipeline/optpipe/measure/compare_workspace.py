"""Compares what a workspace measured: runs, artifacts, their accuracy, and a baseline."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.core.comparison import Comparison
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.measurement import read_measurements
from optpipe.core.metrics.scores import TOP1
from optpipe.core.quantity import Estimate
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument, Call
from optpipe.evaluate.recompute import observe_accuracy
from optpipe.measure.compare import compare_measurements
from optpipe.measure.comparison_rows import BuildFacts
from optpipe.measure.figures import list_artifact_measurements, measurements_from_run
from optpipe.measure.groups import RecordedMeasurement
from optpipe.measure.int8_notes import check_int8_accuracy, find_int8_causes
from optpipe.measure.search import Slo
from optpipe.models.artifacts.builds_by_name import find_builds, find_by_id
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.artifacts.lookup import require_one_model
from optpipe.models.artifacts.missing_builds import explain_other_content
from optpipe.models.artifacts.network_facts import describe_network
from optpipe.workspace.entry import MANIFEST, Entry, Manifest, Run, load_run, runs_from_files
from optpipe.workspace.runs import RUNS, list_runs
from optpipe.workspace.seal import find_approved_baseline
from optpipe.workspace.store import Store


def find_bench_runs(workspace: Path, names: Sequence[str] = ()) -> tuple[Run, ...]:
    """The bench runs `names` (ids, unambiguous prefixes, or folders), or all.

    Raises BadInputError if one is missing, or if there are none.
    """
    present = list_runs(workspace, "bench")
    if not names and not present:
        raise _nothing_measured(workspace)
    return tuple(_find_run(name, present, workspace) for name in names) if names else present


def _nothing_measured(workspace: Path) -> BadInputError:
    first = "; first run " + Call("build", "MODEL") + ", then " + Call("bench", "MODEL")
    return BadInputError(f"no measurements in {workspace} yet" + first)


def _find_measured_model(text: str, store: Store) -> str | None:
    """The measured model that `text` means as MODEL; None if it names a run, or if nothing of it was measured."""
    runs = list_runs(store.workspace, "bench")
    if (Path(text) / MANIFEST).is_file() or any(run.name.startswith(text) for run in runs):
        return None
    measured = {
        measurement.subject.model for run in runs for measurement in read_measurements(run.files)
    }
    builds = find_by_id(text, store) or find_builds(text, store, any_content=True)
    named = {build.info.model for build in builds} | {text}
    return next(iter(named & measured), None)


def _keep_meant(
    text: str, model: str, measured: Sequence[RecordedMeasurement], store: Store
) -> tuple[RecordedMeasurement, ...]:
    """Without builds of the name `model` that `text`, a name, file, or ID, does not mean, such as those of an earlier source.

    Raises BadInputError with the IDs if a name means several measured models.
    """
    builds = {recorded.measurement.subject.artifact for recorded in measured}
    by_id = find_by_id(text, store)
    meant = by_id or find_builds(text, store)
    if not by_id:
        require_one_model(text, [build for build in meant if build.id in builds], store)
    called = {build.id for build in store.list_entries(ArtifactInfo) if build.info.model == model}
    others = called - {build.id for build in meant}
    return tuple(
        recorded for recorded in measured if recorded.measurement.subject.artifact not in others
    )


def _find_run(name: str, present: Sequence[Run], workspace: Path) -> Run:
    if (Path(name) / MANIFEST).is_file():
        run = load_run(Path(name))
        if run.kind != "bench":
            raise BadInputError(f"{name} is a {run.kind} run; compare requires bench runs")
        return run
    matches = [run for run in present if run.name == name] or [
        run for run in present if run.name.startswith(name)
    ]
    if not present:
        raise _nothing_measured(workspace)
    known = ", ".join(run.name for run in (matches or present)[-5:])
    if not matches:
        models = sorted(
            {
                str(measurement.subject.model)
                for run in present
                for measurement in read_measurements(run.files)
            }
        )
        raise BadInputError(
            f"no bench run in {workspace} has the name {name!r}, and nothing measured is of such a model",
            remedy=f"give one of the runs ({known}) or models ({', '.join(models)}), or measure it: "
            + Call("bench", "MODEL"),
        )
    if len(matches) > 1:
        raise BadInputError(
            f"{name!r} matches {len(matches)} bench runs in {workspace}",
            remedy=f"give one of them: {known}",
        )
    return matches[0]


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
    """Compares measurements; returns them and their runs too. `baseline` is a run, a workspace, or `approved` for the dossier of `model`.

    A single name that is a measured model and no run acts as `model`. A name, file, or ID selects the builds that `bench` would.
    """
    asked = model or (names[0] if len(names) == 1 else "")
    if asked and (meant := _find_measured_model(asked, store)) is not None:
        model, names = meant, () if tuple(names) == (asked,) else names
    held_against, against = _find_baseline(store, baseline, model)
    runs = find_bench_runs(store.workspace, names)
    if held_against is not None:
        runs = tuple(run for run in runs if run.name != held_against)
        if not runs:
            problem = f"the only run is the baseline {held_against}"
            raise BadInputError(
                f"{problem}; measure something to compare: " + Call("bench", "MODEL")
            )
    measured = tuple(recorded for run in runs for recorded in measurements_from_run(run))
    if model is not None:
        measured = _keep_model(measured, model, store)
    if model is not None and not names:
        measured = _keep_meant(asked, model, measured, store)
        if not measured:
            raise BadInputError(
                f"no measurements of {asked}{explain_other_content(asked, store)}",
                remedy="build and measure it: " + Call("build", asked),
            )
    if length is not None:
        measured = _keep_length(measured, length)
    if not measured:
        raise _nothing_measured(store.workspace)
    known = collect_build_facts(store.list_entries(ArtifactInfo), list_runs(store.workspace))
    comparison = compare_measurements(
        measured, baseline=held_against, against=against, known=known, slo=slo, across=across
    )
    return (
        replace(comparison, warnings=(*comparison.warnings, *_list_namesakes(measured, store))),
        measured,
        runs,
    )


def _keep_model(
    measured: Sequence[RecordedMeasurement], model: str, store: Store
) -> tuple[RecordedMeasurement, ...]:
    have = sorted({str(recorded.measurement.subject.model) for recorded in measured})
    kept = tuple(recorded for recorded in measured if recorded.measurement.subject.model == model)
    if have and not kept:
        raise BadInputError(
            f"no measurements of {model} in {store.workspace}; measured models: {', '.join(have)}"
        )
    return kept


def _keep_length(
    measured: Sequence[RecordedMeasurement], length: int
) -> tuple[RecordedMeasurement, ...]:
    kept = tuple(recorded for recorded in measured if recorded.measurement.load.length == length)
    if not kept:
        lengths = {recorded.measurement.load.length for recorded in measured}
        have = ", ".join(map(str, sorted(filter(None, lengths)))) or "none"
        raise BadInputError(f"no measurements at length {length}; measured lengths: {have}")
    return kept


def _list_namesakes(measured: Sequence[RecordedMeasurement], store: Store) -> Iterator[str]:
    """Models of which several networks were measured, as far as the store has them: a row is the newest build alone."""
    builds = {recorded.measurement.subject.artifact for recorded in measured}
    exported = {entry.id: entry for entry in store.list_entries(ModelInfo)}
    stored = [build for build in store.list_entries(ArtifactInfo) if build.id in builds]
    known = ((build.info.model, (build.manifest.parents[0], build.id)) for build in stored)
    for model, pairs in group_pairs(pair for pair in known if pair[1][0] in exported).items():
        if len(origins := {origin for origin, _ in pairs}) < 2:
            continue
        networks = {origin: describe_network(exported[origin]) for origin in origins}
        newest = {
            network: artifact
            for origin, artifact in pairs
            if (network := networks[origin]) is not None
        }
        if len(newest) > 1:
            listed = "; ".join(f"{network} ({artifact})" for network, artifact in newest.items())
            yield f"{len(newest)} networks are called {model}, and each row shows the newest: {listed}; name another's file to compare it"


def _find_baseline(
    store: Store, name: str | None, model: str | None
) -> tuple[str | None, tuple[RecordedMeasurement, ...]]:
    if name is None:
        return None, ()
    if (Path(name) / RUNS).is_dir():
        return name, tuple(
            recorded
            for run in find_bench_runs(Path(name))
            for recorded in measurements_from_run(run)
        )
    if name != "approved":
        run = find_bench_runs(store.workspace, [name])[0]
        return run.name, measurements_from_run(run)
    if model is None:
        raise BadInputError(
            Argument("baseline", "approved") + " needs one model: add " + Argument("model", "MODEL")
        )
    if (files := find_approved_baseline(store.workspace, model)) is None:
        problem = f"no approved baseline for {model}"
        raise BadInputError(f"{problem}; approve one with " + Call("signoff approve", "DOSSIER"))
    return f"approved {model}", tuple(
        list_artifact_measurements(runs_from_files(files, "runs"), 0.95, None)
    )


def collect_build_facts(
    artifacts: Iterable[Entry[ArtifactInfo]],
    runs: Sequence[Run],
    exported: Mapping[str, Manifest] | None = None,
    *,
    confidence: float = 0.95,
    drop_limit: float | None = None,
) -> dict[str, BuildFacts]:
    """What is known of builds besides their measurements.

    `confidence` is that of accuracies and their drops, `drop_limit` the drop as a share that a policy allows.
    """
    facts = {}
    for entry in artifacts:
        build = judged_build_from_entry(entry, exported)
        top1 = observe_accuracy(runs, build, confidence).get(TOP1.name)
        accuracy = check_int8_accuracy(runs, build, confidence, drop_limit)
        facts[entry.id] = BuildFacts(
            size_bytes=build.size_bytes,
            build_s=entry.manifest.seconds,
            top1=None if top1 is None else Estimate(float(top1.value), top1.low, top1.high),
            causes=find_int8_causes(entry.info),
            accuracy=accuracy.message if accuracy else None,
        )
    return facts
