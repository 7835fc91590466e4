"""Everything measured in a workspace, ready to be compared: runs, artifacts and their accuracy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.advice import advised
from optpipe.core.comparison import Comparison, Goal, Interval
from optpipe.core.evidence import Measured, foreign
from optpipe.core.hashing import file_sha256
from optpipe.core.manifest import MANIFEST, Manifest, manifest_from_file
from optpipe.core.measurement import MEASUREMENTS_FILE
from optpipe.core.report import RawFile, StageBar
from optpipe.core.runs import Run, json_of_run, list_runs, load_run, runs_in
from optpipe.core.store import Store
from optpipe.errors import BadInputError
from optpipe.measuring.slo import Slo
from optpipe.stages.collect import BUILDS
from optpipe.stages.compare import Baseline, Known, compared
from optpipe.stages.dossier import approved
from optpipe.stages.int8_notes import accuracy_note, causes
from optpipe.stages.judge import REQUEST, build_of, json_file, measured_in
from optpipe.stages.recompute import measured_from_run
from optpipe.stages.task_evidence import accuracy_figures


@dataclass(frozen=True, slots=True)
class Overview:
    """A comparison with the runs behind it."""

    comparison: Comparison
    measured: tuple[Measured, ...]
    runs: tuple[Run, ...]


def bench_runs(workspace: Path, names: Sequence[str] = ()) -> tuple[Run, ...]:
    """The bench runs called `names` (ids, unambiguous beginnings, or folders), or all of them.

    Raises BadInputError where one does not exist, or where there is none at all, naming the command that makes one.
    """
    present = list_runs(workspace, "bench")
    if not names:
        if not present:
            raise _nothing_measured(workspace)
        return present
    return tuple(_named(name, present, workspace) for name in names)


def _nothing_measured(workspace: Path) -> BadInputError:
    build, bench = advised("build MODEL", workspace), advised("bench MODEL", workspace)
    return BadInputError(f"nothing was measured in {workspace} yet; first: {build}, then {bench}")


def _is_model(name: str, workspace: Path) -> bool:
    """Whether a model of that name was measured, and no run is called so."""
    runs = list_runs(workspace, "bench")
    if (Path(name) / MANIFEST).is_file() or any(run.run_id.startswith(name) for run in runs):
        return False
    return any(one.get("model") == name for run in runs for one in json_of_run(run, MEASUREMENTS_FILE)["measurements"])


def _named(name: str, present: Sequence[Run], workspace: Path) -> Run:
    if (Path(name) / MANIFEST).is_file():
        run = load_run(Path(name))
        if run.kind != "bench":
            message = f"{name} is a {run.kind} run; compare takes bench runs"
            raise BadInputError(message)
        return run
    found = [run for run in present if run.run_id == name] or [run for run in present if run.run_id.startswith(name)]
    if len(found) != 1:
        known = ", ".join(run.run_id for run in (found or present)[-5:]) or "none"
        message = f"{name!r} fits {len(found)} bench runs in {workspace}; there {'are' if found else 'is'}: {known}"
        raise BadInputError(message)
    return found[0]


def overview(
    store: Store,
    *,
    names: Sequence[str] = (),
    model: str | None = None,
    baseline: str | None = None,
    slo: Slo | None = None,
    across: bool = False,
) -> Overview:
    """Compares what was measured. `baseline` is a run, or `approved` for the approved dossier of `model`.

    One name that is a measured model's, and no run's, is `model`.
    """
    if model is None and len(names) == 1 and _is_model(names[0], store.workspace):
        model, names = names[0], ()
    held_against = _baseline(store, baseline, model)
    runs = bench_runs(store.workspace, names)
    if held_against is not None and held_against.kind == "run":
        runs = tuple(run for run in runs if run.run_id != held_against.name)
        if not runs:
            message = (
                f"there is no run but the baseline {held_against.name}; "
                f"measure what is to be compared: {advised('bench MODEL', store.workspace)}"
            )
            raise BadInputError(message)
    measured = tuple(one for run in runs for one in measured_from_run(run))
    if model is not None:
        have = sorted({str(one.measurement.subject.model) for one in measured})
        measured = tuple(one for one in measured if one.measurement.subject.model == model)
        if have and not measured:
            message = f"nothing was measured of {model} in {store.workspace}; there is {', '.join(have)}"
            raise BadInputError(message)
    if not measured:
        raise _nothing_measured(store.workspace)
    known = known_builds((entry.manifest for entry in store.entries()), list_runs(store.workspace))
    comparison = compared(measured, baseline=held_against, known=known, slo=slo, across=across)
    return Overview(comparison, measured, runs)


def _baseline(store: Store, name: str | None, model: str | None) -> Baseline | None:
    if name is None:
        return None
    if name != "approved":
        run = bench_runs(store.workspace, [name])[0]
        return Baseline(run.run_id, "run", measured_from_run(run))
    folder = None if model is None else approved(store.workspace, model)
    if folder is None:
        which = model or "which model? say --model"
        message = f"no approved baseline of {which}; store one with {advised('approve DOSSIER', store.workspace)}"
        raise BadInputError(message)
    measured = tuple(measured_in(runs_in(folder / "runs"), 0.95, None))
    return Baseline(f"approved {model}", "approved", measured)


def known_builds(manifests: Iterable[Manifest], runs: Sequence[Run]) -> dict[str, Known]:
    """Size, build time and accuracy of every artifact among `manifests`, by id."""
    found = {}
    for manifest in manifests:
        if manifest.kind == "artifact":
            build = build_of(manifest)
            top1 = accuracy_figures(runs, build, 0.95).get("top1")
            accuracy = accuracy_note(runs, build)
            found[manifest.id] = Known(
                size_bytes=build.size_bytes,
                build_s=manifest.seconds,
                top1=None if top1 is None else Interval(float(top1.value), top1.low, top1.high),
                causes=causes(manifest.info),
                accuracy=accuracy.message if accuracy else None,
            )
    return found


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
