"""The work of a sweep's process: the build and bench that exist, asked for by recipe and cells."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optpipe.backends.registry import backends_from_text
from optpipe.build.build import BuildPlan, build_model, require_artifacts
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.events import SilentListener
from optpipe.core.measurement import Reason, read_measurements
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.precision import precisions_from_text
from optpipe.core.tensors import batch_range_from_text
from optpipe.core.weights import weights_from_text
from optpipe.measure.bench import bench_artifacts
from optpipe.measure.groups import RecordedMeasurement, group_processes, summarize_group
from optpipe.measure.session_plan import BenchPlan
from optpipe.measure.validity import LIMITS
from optpipe.models.artifacts.lookup import (
    StoredArtifact,
    choose_batch_sizes,
    find_artifacts,
    require_lengths,
    select_runnable,
)
from optpipe.models.export.model import Model
from optpipe.models.sources.resolve import source_from_text
from optpipe.sweep.command import command_from_cell
from optpipe.sweep.job import Cell, JobState
from optpipe.sweep.task import CellOutcome, Task, limit_load, outcome_from_error, tell_on_one_line
from optpipe.workspace.runs import Run, load_run
from optpipe.workspace.store import Store


def build_recipe(task: Task) -> CellOutcome:
    """Builds and verifies; the outcome names the artifact. Raises what build raises."""
    recipe, store = task.recipe, Store(Path(task.workspace))
    plan = BuildPlan(
        precisions=precisions_from_text(recipe.precision),
        backends=backends_from_text(recipe.backend, recipe.device),
        named=True,
        device=recipe.device,
        calibration=None if recipe.calibration is None else Path(recipe.calibration),
        options=options_from_texts(recipe.options),
        truncate=recipe.truncate,
    )
    model = Model(
        source_from_text(recipe.model, {}),
        weights_from_text(recipe.weights, recipe.seed),
        batch_range_from_text(recipe.profile) if recipe.profile is not None else None,
        {},
    )
    built = build_model(model, plan, store, SilentListener())
    require_artifacts(built)
    found = built.artifacts[0]
    if found.why_not is not None:
        return CellOutcome(JobState.IMPOSSIBLE, found.why_not, found.entry.id)
    if not found.passed:
        proven = found.entry.info.precision_proof.proven
        what = "its outputs differ from the source model's" if proven else f"it does not compute in {recipe.precision}"
        return CellOutcome(JobState.FAILED, f"the build failed verification: {what}", found.entry.id)
    return CellOutcome(JobState.DONE, artifact=found.entry.id)


def options_from_texts(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`BACKEND.KEY=VALUE` by backend; the matrix has checked the form."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        backend, _, key = name.partition(".")
        found.setdefault(backend, {})[key] = value
    return found


def measure_cells(task: Task) -> tuple[CellOutcome, ...]:
    """Measures the cells in one bench run for each kind of load; one that cannot be measured does not stop the others."""
    store = Store(Path(task.workspace))
    assert task.artifact is not None
    (artifact,), _ = select_runnable(find_artifacts(task.artifact, store))
    outcomes: dict[str, CellOutcome] = {}
    able: dict[tuple[object, ...], list[Cell]] = {}
    for cell in limit_load(task):
        try:
            choose_batch_sizes(artifact, (cell.load.batch_size,), _suggest_wider(cell, artifact))
            require_lengths(artifact, None if cell.load.length is None else (cell.load.length,))
            artifact.resolve_effective_options(options_from_texts(cell.options))
        except BadInputError as error:
            outcomes[cell.key] = CellOutcome(JobState.IMPOSSIBLE, tell_on_one_line(error), task.artifact)
            continue
        able.setdefault((cell.options, cell.processes, cell.max_cv, *cell.load.key[1:]), []).append(cell)
    for cells in able.values():
        try:
            outcomes |= _measure_alike(artifact, cells, store)
        except OptpipeError as error:
            outcomes |= dict.fromkeys((cell.key for cell in cells), outcome_from_error(error))
    return tuple(outcomes[cell.key] for cell in task.cells)


def _suggest_wider(cell: Cell, artifact: StoredArtifact) -> str:
    """The sweep of `cell` with a profile that includes its batch size: `optpipe build` would make a build that no sweep takes."""
    size, (low, usual, high) = cell.load.batch_size, artifact.card.batch_range
    profile = f"{min(low, size)}:{usual}:{max(high, size)}"
    return command_from_cell(replace(cell, recipe=replace(cell.recipe, profile=profile)))


def _measure_alike(artifact: StoredArtifact, cells: Sequence[Cell], store: Store) -> dict[str, CellOutcome]:
    """One run of cells that differ in batch size alone."""
    first = cells[0]
    plan = BenchPlan(
        load=first.load,
        batches=tuple(cell.load.batch_size for cell in cells),
        lengths=None if first.load.length is None else (first.load.length,),
        processes=first.processes,
        to_the_end=True,
        options=options_from_texts(first.options),
        limits={**LIMITS, "max_cv": first.max_cv},
    )
    result = bench_artifacts((artifact,), plan, store, SilentListener())
    run = load_run(Path(result.run_dir))
    groups = _group_run(run)
    found = {}
    for cell in cells:
        group = groups.get(replace(cell.load, length=None).key)
        asked = first.processes if result.interrupted else None
        found[cell.key] = outcome_from_group(group, artifact.entry.id, run.run_id, asked)
    return found


def _group_run(run: Run) -> dict[object, tuple[MeasurementGroup, tuple[Reason, ...]]]:
    """What was measured, by load; the length is the same in all of a run, and a cell need not name it."""
    measured = [RecordedMeasurement(one, run.run_id, run.manifest.environment) for one in read_measurements(run.files)]
    return {
        replace(group.load, length=None).key: (summarize_group(group), group.newest.measurement.reasons)
        for group in group_processes(measured)
    }


def outcome_from_group(
    found: tuple[MeasurementGroup, tuple[Reason, ...]] | None, artifact: str, run: str, interrupted: int | None
) -> CellOutcome:
    """What came of a cell; `interrupted` is the number of processes that an interrupted run was to have."""
    if found is None:
        why = "memory ran out at a smaller batch size" if interrupted is None else "interrupted before it was measured"
        return CellOutcome(JobState.FAILED, why, artifact, run)
    group, reasons = found
    codes = dict.fromkeys(code for one in group.left_out for code in one.codes)
    if interrupted is not None and ("interrupted" in codes or group.processes + len(group.left_out) < interrupted):
        why = (
            f"interrupted after {group.processes} VALID of {interrupted} processes"  # no result: the next sweep goes on
        )
        return CellOutcome(JobState.FAILED, why, artifact, run, group)
    if group.processes:
        said = f"{len(group.left_out)} INVALID left out ({', '.join(codes)})" if group.left_out else ""
        return CellOutcome(JobState.DONE, said, artifact, run, group)
    why = "; ".join(one.message for one in reasons if one.invalidates)
    lost = {"out-of-memory", "died", "refused"} & set(codes)
    return CellOutcome(JobState.FAILED if lost else JobState.INVALID, why, artifact, run, group)
