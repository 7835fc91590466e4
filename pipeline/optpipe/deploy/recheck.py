"""`optpipe signoff recheck`: runs a dossier's artifact and requests in this environment and in another one.

The two alternate in fresh processes (`measure.pair`), and outputs are compared to the last bit.
"""

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits

import numpy as np

import optpipe
from optpipe.backends.registry import BACKENDS, list_runtime_packages
from optpipe.core.card import Task
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.load import LoadSpec
from optpipe.core.records import line_from_record
from optpipe.core.verdict import Verdict
from optpipe.core.wording import Argument
from optpipe.deploy.records import OutputChange, RecheckRecord, format_ratio
from optpipe.deploy.server import ask_python, find_python
from optpipe.deploy.session_process import FrameProcess
from optpipe.deploy.signed_build import SignedBuild
from optpipe.measure.groups import ProcessGroup, group_processes
from optpipe.measure.measure import BenchPlan, TrialSubject, prepare_subject
from optpipe.measure.pair import compare_environments, require_enough_rounds
from optpipe.measure.process import WorkerPool
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.export.exported import reference_from_file
from optpipe.models.inputs.rows import join_batches, rows_from_outputs, split_batches
from optpipe.stats.means import MIN_VALUES
from optpipe.stats.paired import TOLERATED_RELATIVE_ERROR, compute_output_error
from optpipe.stats.ratio import Change, Ratio, count_rounds_to_settle
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows
from optpipe.workspace.file_names import REFERENCE
from optpipe.workspace.store import Store

NEEDED = ("numpy", "msgspec", "typing_extensions")
"""Packages of the worker other than the runtime; with selected rows also SciPy, which orders them."""
MIN_SECONDS, MAX_SECONDS = 0.5, 10.0
"""Each process measures the load for so long."""


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


def open_interpreter(
    path: Path | None, packages: Sequence[str], scratch: Path, needed: Sequence[str] = NEEDED
) -> Interpreter:
    """Raises BadInputError if `path` is not an environment, MissingError with the command if the worker lacks a package."""
    program = str(find_python(path, "python")) if path is not None else sys.executable
    source = scratch / "source"
    source.mkdir(exist_ok=True)
    # link only optpipe: site-packages would bring this environment's runtime along
    if not (source / "optpipe").exists():
        (source / "optpipe").symlink_to(Path(optpipe.__file__).parent)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONHOME", "VIRTUAL_ENV")
    }
    inherited = [kept["PYTHONPATH"]] if path is None and "PYTHONPATH" in kept else []
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(source), *inherited])}
    facts = ask_python(Path(program), _PROBE, environment, "python", needed, list(packages))
    if facts["missing"]:
        names = " ".join(name.replace("_", "-") for name in needed)
        given = Argument("python", path)
        problem = given + f" lacks {', '.join(facts['missing'])}, which the worker needs"
        raise MissingError(problem + f": uv pip install -p {path} {names}")
    return Interpreter(program, environment, facts["versions"])


def outputs_of_interpreter(
    interpreter: Interpreter,
    build: SignedBuild,
    inputs: Mapping[str, np.ndarray],
    options: Mapping[str, object],
) -> dict[str, np.ndarray]:
    """The outputs by name, (samples, ...). Raises StageError with the interpreter's reason."""
    words = ("artifact", str(build.artifact.path), line_from_record(options).decode())
    outputs, runs = build.card.outputs, []
    try:
        with FrameProcess(
            *words, program=interpreter.program, environment=interpreter.environment
        ) as process:
            process.receive()
            for batch, count in split_batches(build.card, inputs):
                process.send({"more": False}, batch)
                runs.append(rows_from_outputs(outputs, process.receive()[1], count))
    except StageError as error:
        raise StageError(
            "the artifact does not run in this environment: " + error.message
        ) from error
    return {
        output.name: join_batches(output.name, [run[output.name] for run in runs])
        for output in outputs
    }


def list_output_changes(
    old: Mapping[str, np.ndarray],
    new: Mapping[str, np.ndarray],
    selection: Selection = EMPTY,
    *,
    classifies: bool,
) -> Iterator[OutputChange]:
    """Compares every output (samples, …) to the last bit, selected rows as sets, and a classifier's predictions."""
    aligned = align_rows(old, new, selection, 0.0)
    for at, (name, before) in enumerate(old.items()):
        after = aligned[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            yield OutputChange(name, before.size, before.size, None, float("inf"), None)
            continue
        pair = [np.ascontiguousarray(output) for output in (before, after)]
        bits = [output.view(np.uint8).reshape(*output.shape, -1) for output in pair]
        changed = (bits[0] != bits[1]).any(axis=-1)
        first = tuple(int(index[0]) for index in np.nonzero(changed)) if changed.any() else None
        predictions = None
        if classifies and at == 0:
            best = [output.reshape(len(output), -1).argmax(axis=1) for output in (before, after)]
            predictions = int((best[0] != best[1]).sum())
        error = compute_output_error(name, before, after)
        yield OutputChange(
            name, before.size, int(changed.sum()), first, error.relative, predictions
        )


def recheck(
    build: SignedBuild,
    python: Path,
    rounds: int,
    max_slowdown: float,
    store: Store,
    listener: Listener,
) -> RecheckRecord:
    """Compares this environment with that of `python`.

    Raises BadInputError without usable measurements, MissingError if it cannot run here, StageError if a process fails.
    """
    info = build.artifact.info
    require_enough_rounds(rounds)
    if (blocker := BACKENDS[info.backend].find_run_blocker(info)) is not None:
        raise MissingError(f"artifact {build.artifact.id} cannot be measured here: " + blocker)
    group = _choose_group(build)
    load = replace(
        group.load,
        min_seconds=MIN_SECONDS,
        max_seconds=MAX_SECONDS,
        percentile=50.0,
        cache_probes=0,
    )
    with store.scratch("recheck") as scratch:
        old, new = _open_both(build, group, python, scratch, listener)
        with listener.step("outputs"):
            outputs = _compare_outputs(build, old, new, group)
        old_pool = WorkerPool(scratch / "old", python=old.program, environment=old.environment)
        new_pool = WorkerPool(scratch / "new", python=new.program, environment=new.environment)
        with old_pool, new_pool:
            contender = _prepare(build, group, load, store, new_pool, scratch)
            baseline = replace(contender, pool=old_pool)
            for subject in (baseline, contender):
                subject.expect(rounds)
            ratio = compare_environments(baseline, contender, load, rounds, randbits(32), listener)
    needed = count_rounds_to_settle(ratio, max_slowdown)
    verdict, reasons = judge_recheck(
        outputs, ratio, needed, TOLERATED_RELATIVE_ERROR[info.precision], max_slowdown
    )
    return RecheckRecord(
        dossier=build.reference.name,
        artifact=build.artifact.id,
        verdict=verdict,
        reasons=reasons,
        versions=_list_version_changes(old.versions, new.versions, BACKENDS[info.backend].packages),
        outputs=outputs,
        load=str(load),
        latency=ratio,
        rounds_to_settle=needed,
        max_slowdown=max_slowdown,
    )


def _choose_group(build: SignedBuild) -> ProcessGroup:
    """The newest well measured load of a closed loop. Raises BadInputError without one."""
    groups = [group for group in group_processes(build.measured) if group.load.rate_per_s is None]
    if not groups:
        raise BadInputError(
            f"{build.folder} has no measurement of a closed loop; measure one, sign off, then recheck"
        )
    return max(reversed(groups), key=lambda group: min(group.count_processes(), MIN_VALUES))


def _open_both(
    build: SignedBuild, group: ProcessGroup, python: Path, scratch: Path, listener: Listener
) -> tuple[Interpreter, Interpreter]:
    """This interpreter and that of `python`; warns of what differs between this one and the dossier's environment."""
    signed, runtimes = group.newest.environment, BACKENDS[build.artifact.info.backend].packages
    required = (*NEEDED, "scipy") if build.selection.outputs else NEEDED
    names = sorted({*signed.packages, *list_runtime_packages(), *runtimes, "numpy"})
    old, new = (open_interpreter(path, names, scratch, required) for path in (None, python))
    recorded = dict(signed.packages) | {"python": signed.python}
    changes = _list_version_changes(recorded, old.versions, runtimes)
    for name, (then, now) in changes.items():
        listener.warn(
            f"the old side is not the dossier's environment: {name} {now}, the dossier has {then}"
        )
    return old, new


def judge_recheck(
    outputs: Sequence[OutputChange],
    latency: Ratio,
    rounds_to_settle: int,
    tolerance: float,
    max_slowdown: float,
) -> tuple[Verdict, tuple[str, ...]]:
    """FAIL for outputs beyond the tolerance, other predictions, or a proven slowdown; PASS if all are excluded."""
    failed, open_points, seen = [], [], []
    for output in outputs:
        if output.relative_error > tolerance:
            failed.append(
                f"output '{output.name}': relative error {output.relative_error:.2g} exceeds {tolerance:g}"
            )
        if output.predictions_changed:
            failed.append(
                f"output '{output.name}': {output.predictions_changed} predictions changed"
            )
        if output.changed:
            at = f", the first at {list(output.first_changed)}" if output.first_changed else ""
            seen.append(
                f"output '{output.name}': {output.changed:,} of {output.values:,} values changed{at}"
            )
    text = f"p50 is {format_ratio(latency)}"
    if latency.change is Change.SLOWER:
        failed.append(f"slower: {text}")
    elif latency.ci[1] > 1 + max_slowdown:  # also an interval that is not known
        doubt = f"{text}: a slowdown of {max_slowdown:.0%} is not excluded"
        if latency.is_known:
            more = f"; about {rounds_to_settle:,} rounds would decide it ("
            doubt = doubt + more + Argument("rounds") + ")"
        open_points.append(doubt)
    else:
        seen.append(text)
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if open_points else Verdict.PASS
    return verdict, (*failed, *open_points, *seen)


def _list_version_changes(
    old: Mapping[str, str], new: Mapping[str, str], runtimes: Collection[str]
) -> dict[str, tuple[str, str]]:
    """Packages whose versions differ; of those that one side lacks only the `runtimes`."""
    names = (set(old) & set(new)) | set(runtimes)
    changed = (name for name in sorted(names) if old.get(name) != new.get(name))
    return {name: (old.get(name, "none"), new.get(name, "none")) for name in changed}


def _compare_outputs(
    build: SignedBuild, old: Interpreter, new: Interpreter, group: ProcessGroup
) -> tuple[OutputChange, ...]:
    known, options = (
        reference_from_file(build.samples.file(REFERENCE)),
        group.newest.measurement.subject.options,
    )
    before, after = (
        outputs_of_interpreter(interpreter, build, known.inputs, options)
        for interpreter in (old, new)
    )
    classifies = build.card.task in (Task.CLASSIFICATION, Task.TEXT_CLASSIFICATION)
    return tuple(list_output_changes(before, after, build.selection, classifies=classifies))


def _prepare(
    build: SignedBuild,
    group: ProcessGroup,
    load: LoadSpec,
    store: Store,
    pool: WorkerPool,
    scratch: Path,
) -> TrialSubject:
    model = store.find(build.artifact.manifest.parents[0], ModelInfo)
    artifact = StoredArtifact(build.artifact, build.card, model, build.samples)
    subject = prepare_subject(
        artifact, BenchPlan(load), store, pool, scratch / "inputs", scratch / "run", load.length
    )
    arguments = {**subject.session.arguments, "workspace": str(store.workspace.absolute())}
    options = group.newest.measurement.subject.options
    return replace(subject, session=replace(subject.session, arguments=arguments)).with_options(
        options
    )
