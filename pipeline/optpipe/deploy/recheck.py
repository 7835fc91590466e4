"""`optpipe signoff recheck`: runs a dossier's artifact and requests again, here or in another environment.

With another interpreter the two alternate in fresh processes (`measure.pair`), and outputs are compared to the last bit.
Without one, the new processes are compared with the dossier's, and the outputs with the errors that the dossier recorded.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING

import optpipe
from optpipe.backends.registry import BACKENDS
from optpipe.core.card import Task
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.measurement import PROCESSES, LoadSpec, PairMetric
from optpipe.core.records import line_from_record
from optpipe.core.verdict import Verdict
from optpipe.deploy.records import LatencyChange, OutputChange, RecheckPlan, RecheckRecord
from optpipe.deploy.server import ask_python, find_python
from optpipe.deploy.session_process import FrameProcess
from optpipe.deploy.signed_build import SignedBuild
from optpipe.measure.figures import measurements_from_run
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    find_environment_differences,
    find_run_scatter,
    group_processes,
)
from optpipe.measure.measure import BenchPlan, TrialSubject, prepare_subject
from optpipe.measure.pair import (
    MAX_ROUND_FACTOR,
    PAIR_CONFIDENCE,
    compare_environments,
    read_pair_figure,
    require_enough_rounds,
)
from optpipe.measure.process import WorkerPool
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.export.exported import reference_from_file
from optpipe.models.inputs.rows import join_batches, rows_from_outputs, split_batches
from optpipe.stats.means import MIN_VALUES, Scatter, mean_from_values, subtract_across_runs, widen_for_unseen_speed
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, compute_output_error
from optpipe.stats.ratio import Change, count_rounds_to_settle
from optpipe.workspace.file_names import REFERENCE
from optpipe.workspace.runs import list_runs
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    import numpy as np

NEEDED = ("numpy", "msgspec", "typing_extensions")
"""Packages of the worker other than the runtime."""
RUNTIMES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt-cu13", "tensorrt-rtx-cu13", "torch")
"""Packages that decide outputs and latency, under all names of their distributions."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    program: str
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    """Versions of the installed packages that decide outputs and latency."""


_PROBE = """
import importlib.util, json, sys
from importlib import metadata
needed, asked = map(json.loads, sys.argv[1:])
found = {}
for name in asked:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"missing": [each for each in needed if importlib.util.find_spec(each) is None], "versions":
  {"python": "%d.%d.%d" % sys.version_info[:3], **found}}))
"""


def open_interpreter(path: Path | None, packages: Sequence[str], scratch: Path) -> Interpreter:
    """Raises BadInputError if `path` is not an environment, MissingError with the command if the worker lacks a package."""
    program = sys.executable if path is None else str(find_python(path, "--python"))
    source = scratch / "source"
    source.mkdir(exist_ok=True)
    if not (
        source / "optpipe"
    ).exists():  # link only optpipe: site-packages would bring this environment's runtime along
        (source / "optpipe").symlink_to(Path(optpipe.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    inherited = [kept["PYTHONPATH"]] if path is None and "PYTHONPATH" in kept else []
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(source), *inherited])}
    facts = ask_python(Path(program), _PROBE, environment, "--python", NEEDED, list(packages))
    if facts["missing"]:
        names = " ".join(each.replace("_", "-") for each in NEEDED)
        raise MissingError(
            f"--python {path} lacks {', '.join(facts['missing'])}, which the worker needs: uv pip install -p {path} {names}"
        )
    return Interpreter(program, environment, facts["versions"])


def outputs_of_interpreter(
    interpreter: Interpreter, build: SignedBuild, inputs: "Mapping[str, np.ndarray]", options: Mapping[str, object]
) -> "dict[str, np.ndarray]":
    """The outputs by name, (samples, ...). Raises StageError with the interpreter's reason."""
    words = ("artifact", str(build.artifact.path), line_from_record(options).decode())
    outputs, runs = build.card.outputs, []
    try:
        with FrameProcess(*words, program=interpreter.program, environment=interpreter.environment) as process:
            process.receive()
            for batch, count in split_batches(build.card, inputs):
                process.send({"more": False}, batch)
                runs.append(rows_from_outputs(outputs, process.receive()[1], count))
    except StageError as error:
        raise StageError(f"the artifact does not run in this environment: {error}") from error
    return {each.name: join_batches(each.name, [run[each.name] for run in runs]) for each in outputs}


def list_output_changes(
    old: "Mapping[str, np.ndarray]", new: "Mapping[str, np.ndarray]", *, classifies: bool
) -> Iterator[OutputChange]:
    """Compares every output to the last bit, and a classifier's predictions."""
    import numpy as np

    for at, (name, before) in enumerate(old.items()):
        after = new[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            yield OutputChange(name, before.size, before.size, None, float("inf"), None)
            continue
        bits = [each.view(np.uint8).reshape(*each.shape, -1) for each in (before, after)]
        changed = (bits[0] != bits[1]).any(axis=-1)
        first = tuple(int(each[0]) for each in np.nonzero(changed)) if changed.any() else None
        predictions = None
        if classifies and at == 0:
            best = [each.reshape(len(each), -1).argmax(axis=1) for each in (before, after)]
            predictions = int((best[0] != best[1]).sum())
        error = compute_output_error(name, before, after)
        yield OutputChange(name, before.size, int(changed.sum()), first, error.relative, predictions)


def recheck(build: SignedBuild, plan: RecheckPlan, store: Store, listener: Listener) -> RecheckRecord:
    """Raises BadInputError without usable measurements, MissingError if it cannot run here, StageError if a process fails."""
    info = build.artifact.info
    require_enough_rounds(plan.rounds)
    if (blocker := BACKENDS[info.backend].find_run_blocker(info)) is not None:
        raise MissingError(f"artifact {build.artifact.id} cannot be measured here: {blocker}")
    groups = [group for group in group_processes(build.measured) if group.load.rate_per_s is None]
    if not groups:
        raise BadInputError(f"{build.folder} has no measurement of a closed loop; measure one, sign off, then recheck")
    # a comparison needs MIN_VALUES processes; of several loads the newest
    group = max(reversed(groups), key=lambda each: min(each.count_processes(), MIN_VALUES))
    if plan.python is None and group.compute_mean("p50") is None:
        shown, count = group.count_showing("p50"), group.count_processes()
        raise BadInputError(
            f"{build.folder}: {shown} of {count} VALID processes of {group.load} show a p50; "
            f"{MIN_VALUES} are needed to compare with\n"
            "pass --python with the old environment to measure the two in turn, or measure more processes and sign off again"
        )
    with store.scratch("recheck") as scratch:
        old_place = group.newest.environment
        names = sorted({*old_place.packages, *RUNTIMES})
        here = open_interpreter(None, names, scratch)
        new = open_interpreter(plan.python, names, scratch) if plan.python else here
        old_versions = dict(old_place.packages) | {"python": old_place.python}
        if plan.python:
            changes = _list_version_changes(old_versions, here.versions, BACKENDS[info.backend].package)
            for name, (then, now) in changes.items():
                listener.warn(f"the old side is not the dossier's environment: {name} {now}, the dossier has {then}")
            old_versions = dict(here.versions)
        with listener.step("outputs"):
            outputs, outputs_how = _compare_outputs(build, here if plan.python else None, new, group)
        latency = _compare_latency(build, group, plan, (here, new), store, scratch, listener)
    versions = _list_version_changes(
        old_versions, new.versions, BACKENDS[info.backend].package, outer=plan.python is None
    )
    verdict, reasons = judge_recheck(outputs, latency, TOLERATED_RELATIVE_ERROR[info.precision], plan.max_slowdown)
    return RecheckRecord(
        dossier=build.reference.name,
        artifact=build.artifact.id,
        verdict=verdict,
        reasons=reasons,
        versions=versions,
        outputs=outputs,
        outputs_how=outputs_how,
        latency=latency,
        precision=f"{info.precision}, as built: {info.precision_proof.reason or 'verified in the network'}; "
        "which kernels a runtime picks for it is shown by optpipe profile",
        max_slowdown=plan.max_slowdown,
    )


def judge_recheck(
    outputs: Sequence[OutputChange], latency: LatencyChange, tolerance: float, max_slowdown: float
) -> tuple[Verdict, tuple[str, ...]]:
    """FAIL for outputs beyond the tolerance, other predictions, or a proven slowdown; PASS if all are excluded."""
    failed, open_points, seen = [], [], []
    for each in outputs:
        if each.relative_error > tolerance:
            failed.append(f"output '{each.name}': relative error {each.relative_error:.2g} exceeds {tolerance:g}")
        if each.predictions_changed:
            failed.append(f"output '{each.name}': {each.predictions_changed} predictions changed")
        if each.changed:
            at = f", the first at {list(each.first_changed)}" if each.first_changed else ""
            seen.append(f"output '{each.name}': {each.changed:,} of {each.values:,} values changed{at}")
    text = f"{latency.metric} is {latency.ratio:.3f} times the old ({latency.format_interval()})"
    if latency.change is Change.SLOWER:
        failed.append(f"slower: {text}")
    elif latency.ci is None or latency.ci[1] > 1 + max_slowdown:
        advice = "pass --python with the old environment, to measure the two in turn"
        if latency.rounds_to_settle is not None:
            advice = f"at this scatter about {latency.rounds_to_settle:,} rounds settle it (--rounds)"
        open_points.append(f"{text}: a slowdown of {max_slowdown:.0%} is not excluded; {advice}")
    else:
        seen.append(text)
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if open_points else Verdict.PASS
    return verdict, (*failed, *open_points, *seen)


def _list_version_changes(
    old: Mapping[str, str], new: Mapping[str, str], runtime: str, *, outer: bool = False
) -> dict[str, tuple[str, str]]:
    """Packages whose versions differ; `outer` includes those that one side lacks, which the runtime's always are."""
    of_runtime = {name for name in RUNTIMES if name.removesuffix("-gpu") == runtime.removesuffix("-gpu")}
    names = set(old) | set(new) if outer else (set(old) & set(new)) | of_runtime
    changed = (name for name in sorted(names) if old.get(name) != new.get(name))
    return {name: (old.get(name, "none"), new.get(name, "none")) for name in changed}


def _compare_outputs(
    build: SignedBuild, old: Interpreter | None, new: Interpreter, group: ProcessGroup
) -> tuple[tuple[OutputChange, ...], str]:
    """Compares with the `old` interpreter to the last bit; without one, equal errors mean equal outputs."""
    known, options = reference_from_file(build.samples.file(REFERENCE)), group.newest.measurement.subject.options
    found = outputs_of_interpreter(new, build, known.inputs, options)
    if old is not None:
        classifies = build.card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION)
        before = outputs_of_interpreter(old, build, known.inputs, options)
        changes = tuple(list_output_changes(before, found, classifies=classifies))
        return changes, "to the last bit, both environments here"
    if build.verification is None or build.verification.info.by_boxes:
        raise BadInputError(
            f"{build.folder} has no verification of the artifact's outputs; pass --python with the old environment"
        )
    recorded, listed = {each.name: each for each in build.verification.info.outputs}, []
    for name, array in found.items():
        now = compute_output_error(name, known.outputs[name][: len(array)], array)
        changed = 0 if now == recorded.get(name) else array.size
        listed.append(OutputChange(name, array.size, changed, None, now.relative, None))
    return tuple(listed), "by the errors that the dossier's verification recorded"


def _compare_latency(
    build: SignedBuild,
    group: ProcessGroup,
    plan: RecheckPlan,
    sides: tuple[Interpreter, Interpreter],
    store: Store,
    scratch: Path,
    listener: Listener,
) -> LatencyChange:
    load = replace(
        group.load, min_seconds=plan.min_time, max_seconds=max(10.0, plan.min_time), percentile=50.0, cache_probes=0
    )
    with _open_pool(sides[0], scratch / "old") as old_pool, _open_pool(sides[1], scratch / "new") as new_pool:
        new = _prepare(build, group, load, store, new_pool, scratch)
        if plan.python is None:
            new.expect(PROCESSES)
            scatter = find_run_scatter(group_processes(_list_measured(build, group, store)), "p50")
            return _compare_with_dossier(new, group, scatter, load, listener)
        old = replace(new, pool=old_pool)
        for subject in (old, new):
            subject.expect(plan.rounds)
        said = f"{load}, {plan.rounds} rounds or up to {MAX_ROUND_FACTOR} times as many"
        with listener.step(said, plan.rounds) as step:
            ratio = compare_environments(old, new, load, plan.rounds, randbits(32), step.advance)
    how = f"{ratio.rounds} rounds of two processes in turn"
    needed = count_rounds_to_settle(ratio, plan.max_slowdown)
    return LatencyChange("p50", str(load), ratio.value, ratio.ci, ratio.confidence, ratio.change, how, needed)


def _list_measured(build: SignedBuild, group: ProcessGroup, store: Store) -> Iterator[RecordedMeasurement]:
    """Measurements of the dossier and of this workspace on one machine: several runs show how runs differ."""
    yield from build.measured
    known = {one.run for one in build.measured}
    for run in list_runs(store.workspace, "bench"):
        alike = not find_environment_differences(run.manifest.environment, group.newest.environment)
        if alike and run.name not in known:
            yield from measurements_from_run(run, whole=False)


def _open_pool(interpreter: Interpreter, folder: Path) -> WorkerPool:
    return WorkerPool(folder, python=interpreter.program, environment=interpreter.environment)


def _prepare(
    build: SignedBuild, group: ProcessGroup, load: LoadSpec, store: Store, pool: WorkerPool, scratch: Path
) -> TrialSubject:
    model = store.find(build.artifact.manifest.parents[0], ModelInfo)
    artifact = StoredArtifact(build.artifact, build.card, model, build.samples)
    found = prepare_subject(artifact, BenchPlan(load), store, pool, scratch / "inputs", scratch / "run", load.length)
    arguments = {**found.session.arguments, "workspace": str(store.workspace.absolute())}
    return replace(found, session=replace(found.session, arguments=arguments)).with_options(
        group.newest.measurement.subject.options
    )


def _compare_with_dossier(
    side: TrialSubject, group: ProcessGroup, scatter: Scatter | None, load: LoadSpec, listener: Listener
) -> LatencyChange:
    """Welch's interval of the ratio, widened by `scatter` between runs: the processes do not alternate."""
    values: list[float] = []
    with listener.step(f"{load}, {PROCESSES} processes", total=PROCESSES) as step:
        for number in range(PROCESSES):
            with side.open() as worker:
                found = side.measure(worker, load, f"n{number:03}")
            values.append(read_pair_figure(found, PairMetric.P50))
            step.advance()
    means = mean_from_values(values), group.compute_mean("p50")
    assert means[0] is not None
    assert means[1] is not None
    runs = (1, len(group.list_values("p50")))
    how = f"{PROCESSES} processes now, {group.count_processes()} in the dossier: not interleaved"
    change = subtract_across_runs(means[0].take_logarithm(), means[1].take_logarithm(), runs, scatter)
    if change is None:
        how += "; not judged: neither the dossier nor this workspace has a build that was measured in two runs"
        ratio = means[0].value / means[1].value
        return LatencyChange("p50", str(load), ratio, None, PAIR_CONFIDENCE, Change.NO_DIFFERENCE, how)
    low, high = (exp(each) for each in change.interval(PAIR_CONFIDENCE))
    (low, high), _ = widen_for_unseen_speed(
        exp(change.value), (low, high), min(PROCESSES, group.count_processes()), PAIR_CONFIDENCE
    )
    shown = Change.SLOWER if low > 1 else Change.FASTER if high < 1 else Change.NO_DIFFERENCE
    return LatencyChange("p50", str(load), exp(change.value), (low, high), PAIR_CONFIDENCE, shown, how)
