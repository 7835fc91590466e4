"""One process of a sweep: a build, or the loads of one artifact. `python -m optpipe.sweep.task TASK.json OUTCOME.json`."""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

from optpipe.backends.registry import backends_from_text, parse_options
from optpipe.build.build import build_model, require_artifacts
from optpipe.build.plan import BuildPlan
from optpipe.core.card import batch_range_from_text
from optpipe.core.entries import weights_from_text
from optpipe.core.errors import (
    BadInputError,
    ExitStatus,
    OptpipeError,
    first_line,
    is_out_of_memory,
)
from optpipe.core.events import SilentListener
from optpipe.core.files import hash_text, hash_value
from optpipe.core.measurement import Reason, read_measurements
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.precision import CALIBRATED, precisions_from_text
from optpipe.core.process import (
    end_with_parent,
    handle_interrupts,
    redirect_stdout_to_stderr,
    start_python,
)
from optpipe.core.records import json_from_record, read_record, record_from_json
from optpipe.core.wording import Call
from optpipe.measure.bench import bench_artifacts
from optpipe.measure.figures import recorded_from_files
from optpipe.measure.groups import group_processes, summarize_group
from optpipe.measure.measure import BenchPlan
from optpipe.models.artifacts.lookup import StoredArtifact, find_artifacts, select_runnable
from optpipe.models.artifacts.profile_sizes import choose_batch_sizes, require_lengths
from optpipe.models.export.exported import Model
from optpipe.models.inputs.task_data import hash_data
from optpipe.models.sources.resolve import CardSource, source_from_text
from optpipe.sweep.job import Cell, CellOutcome, JobState, Recipe, Task, repeat_outcome
from optpipe.workspace.entry import Run, load_run
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import Store


def build_recipe(task: Task) -> CellOutcome:
    """Builds and verifies. Raises what build raises."""
    recipe, store = task.recipe, Store(Path(task.workspace))
    plan = BuildPlan(
        precisions=precisions_from_text(recipe.precision),
        backends=backends_from_text(recipe.backend, recipe.device),
        named=True,
        device=recipe.device,
        calibration=None if recipe.calibration is None else Path(recipe.calibration),
        options=parse_options(recipe.options),
        truncate=recipe.truncate,
    )
    built = build_model(_model_from_recipe(recipe), plan, store, SilentListener())
    require_artifacts(built)
    artifact = built.artifacts[0]
    if artifact.why_not is not None:
        return CellOutcome(JobState.IMPOSSIBLE, artifact.why_not, artifact.entry.id)
    if not artifact.passed:
        what = (
            "its outputs differ from the source model's"
            if artifact.shortfall is None
            else f"it does not compute in {recipe.precision}: {artifact.shortfall}"
        )
        return CellOutcome(
            JobState.FAILED, f"the build failed verification: {what}", artifact.entry.id
        )
    return CellOutcome(JobState.DONE, artifact=artifact.entry.id)


def _model_from_recipe(recipe: Recipe) -> Model:
    batch = None if recipe.profile is None else batch_range_from_text(recipe.profile)
    return Model(
        source_from_text(recipe.model, {}),
        weights_from_text(recipe.weights, recipe.seed),
        batch,
        {},
    )


def collect_contents(recipe: Recipe) -> dict[str, str]:
    """The hashes of `model` with its weights and of `calibration`, or of the card's calibration data.

    `error` stands for why something cannot be read. A model that a user's code makes is loaded.
    """
    try:
        model = _model_from_recipe(recipe)
        contents, data = (
            {"model": hash_value(model.recipe())},
            recipe.calibration and Path(recipe.calibration),
        )
        if not data and recipe.precision in CALIBRATED and isinstance(model.source, CardSource):
            own = model.source.card.data.get("calibration")
            data = own and Path(own)
        return contents | {"calibration": hash_data(data)} if data else contents
    except OptpipeError as error:
        return {"error": hash_text(str(error))}


def collect_contents_in_child(recipes: Sequence[Recipe]) -> Sequence[dict[str, str]]:
    """`collect_contents` of each in another process: a user's code may open a CUDA context, and measurements start from here."""
    with start_python("optpipe.sweep.task", stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        answer, _ = process.communicate(json_from_record(tuple(recipes)))
    if process.returncode:
        return [{"error": hash_text(f"status {process.returncode}")} for _ in recipes]
    return record_from_json(answer, tuple[dict[str, str], ...], "the child process")


def measure_cells(task: Task) -> tuple[CellOutcome, ...]:
    """Measures the cells in one bench run for each kind of load; a failed cell does not stop the others."""
    store = Store(Path(task.workspace))
    assert task.artifact is not None
    (artifact,), _ = select_runnable(find_artifacts(task.artifact, store))
    outcomes: dict[str, CellOutcome] = {}
    able: dict[tuple[object, ...], list[Cell]] = {}
    by_memory = sorted(
        task.cells,
        key=lambda cell: (cell.load.length or 0, cell.load.batch_size, cell.load.rate_per_s or 0.0),
    )  # memory runs out last
    for cell in by_memory:
        try:
            choose_batch_sizes(artifact, (cell.load.batch_size,), _suggest_wider(cell, artifact))
            require_lengths(artifact, None if cell.load.length is None else (cell.load.length,))
            artifact.resolve_effective_options(parse_options(cell.options))
        except BadInputError as error:
            outcomes[cell.key] = CellOutcome(
                JobState.IMPOSSIBLE, tell_on_one_line(error), task.artifact, bad_input=True
            )
            continue
        able.setdefault((cell.options, cell.processes, cell.max_cv, *cell.load.key[1:]), []).append(
            cell
        )
    for cells in able.values():
        try:
            outcomes |= _measure_alike(artifact, cells, store)
        except OptpipeError as error:
            outcomes |= dict.fromkeys((cell.key for cell in cells), outcome_from_error(error))
    return tuple(outcomes[cell.key] for cell in task.cells)


def _suggest_wider(cell: Cell, artifact: StoredArtifact) -> Call:
    """The sweep of `cell` with a profile that includes its batch size: no sweep takes a build of `optpipe build`."""
    size, (low, usual, high) = cell.load.batch_size, artifact.card.batch_range
    return Call(
        "sweep",
        cell.recipe.model,
        precision=cell.recipe.precision,
        backend=cell.recipe.backend,
        gpu=cell.kind,
        batch=size,
        profile=(min(low, size), usual, max(high, size)),
    )


def _measure_alike(
    artifact: StoredArtifact, cells: Sequence[Cell], store: Store
) -> dict[str, CellOutcome]:
    first = cells[0]
    plan = BenchPlan(
        load=first.load,
        batches=tuple(cell.load.batch_size for cell in cells),
        lengths=None if first.load.length is None else (first.load.length,),
        processes=first.processes,
        options=parse_options(first.options),
        limits={"max_cv": first.max_cv},
        keep_going=False,
    )
    result = bench_artifacts((artifact,), plan, store, SilentListener())
    run = load_run(Path(result.run_dir))
    groups = _group_run(run)
    asked = first.processes if result.interrupted else None
    measured = {cell.key: groups.get(replace(cell.load, length=None).key) for cell in cells}
    return {
        key: outcome_from_group(group, artifact.entry.id, run.name, asked, result.stopped)
        for key, group in measured.items()
    }


def _group_run(run: Run) -> dict[object, tuple[MeasurementGroup, tuple[Reason, ...]]]:
    """Groups by load without the length, which is the same in all of a run."""
    measurements, environment = read_measurements(run.files), run.manifest.environment
    groups = group_processes(
        recorded_from_files(measurement, run.name, run.files, environment)
        for measurement in measurements
    )
    by_load = {replace(group.load, length=None).key: group for group in groups}
    return {
        key: (summarize_group(group), group.newest.measurement.reasons)
        for key, group in by_load.items()
    }


def outcome_from_group(
    measured: tuple[MeasurementGroup, tuple[Reason, ...]] | None,
    artifact: str,
    run: str,
    interrupted: int | None,
    stopped: Reason | None = None,
) -> CellOutcome:
    """`interrupted` is the number of processes that an interrupted run was to have; `stopped` the cause that ended one early."""
    if measured is None:
        why = (
            "memory ran out at a smaller batch size"
            if interrupted is None
            else "interrupted before it was measured"
        )
        return CellOutcome(JobState.FAILED, why, artifact, run)
    group, reasons = measured
    codes = dict.fromkeys(code for left_out in group.left_out for code in left_out.codes)
    if interrupted is not None and (
        "interrupted" in codes or group.processes + len(group.left_out) < interrupted
    ):
        why = f"interrupted after {group.processes} VALID of {interrupted} processes"  # no result: the next sweep measures it
        return CellOutcome(JobState.FAILED, why, artifact, run, group)
    ended = [f"stopped early ({stopped.code})"] if stopped is not None else []
    if group.processes:
        left_out = f"{len(group.left_out)} INVALID left out ({', '.join(codes)})"
        said = "; ".join([*([left_out] if group.left_out else []), *ended])
        return CellOutcome(JobState.DONE, said, artifact, run, group)
    why = "; ".join([*(reason.message for reason in reasons if reason.invalidates), *ended])
    lost = {"out-of-memory", "died", "refused"} & set(codes)
    return CellOutcome(JobState.FAILED if lost else JobState.INVALID, why, artifact, run, group)


_FULL_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""


def main() -> None:
    """Does the task and writes the outcome; expected failures are outcomes.

    Without arguments it reads recipes from stdin and writes their contents to stdout.
    """
    end_with_parent()
    if len(sys.argv) == 1:
        recipes = record_from_json(sys.stdin.buffer.read(), tuple[Recipe, ...], "stdin")
        with redirect_stdout_to_stderr():  # a user's code may print
            contents = tuple(map(collect_contents, recipes))
        sys.stdout.buffer.write(json_from_record(contents))
        return
    task, path = read_record(Path(sys.argv[1]), Task), Path(sys.argv[2])
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    with handle_interrupts():
        try:
            outcomes = measure_cells(task) if task.timing else (build_recipe(task),)
        except OptpipeError as error:
            outcomes = repeat_outcome(task, outcome_from_error(error))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            outcomes = repeat_outcome(
                task, CellOutcome(JobState.FAILED, f"out of memory: {first_line(error)}")
            )
    write_bytes(path, json_from_record(outcomes))


def outcome_from_error(error: OptpipeError) -> CellOutcome:
    """IMPOSSIBLE if this machine or the request cannot do it at all, otherwise FAILED."""
    is_bad = error.exit_status is ExitStatus.BAD_INPUT
    cannot = is_bad or error.exit_status is ExitStatus.MISSING
    state = JobState.IMPOSSIBLE if cannot else JobState.FAILED
    return CellOutcome(state, tell_on_one_line(error), bad_input=is_bad)


def tell_on_one_line(error: OptpipeError) -> str:
    return "; ".join(str(error).splitlines())


def explain_crash(returncode: int, log: Path) -> str:
    words = (
        log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if log.is_file()
        else []
    )
    said = f": {words[-1][:240]}" if words else ""
    full = shutil.disk_usage(log.parent).free < _FULL_BYTES
    if full and "No space left" not in said:  # then its last words did not fit either
        said += f"{';' if said else ':'} No space left on device of the workspace"
    if returncode < 0:
        name = (
            signal.Signals(-returncode).name
            if -returncode in set(signal.Signals)
            else f"signal {-returncode}"
        )
        return f"its process was killed by {name}{said}"
    return f"its process ended with status {returncode}{said}"


if __name__ == "__main__":
    main()
