"""What one process of a sweep does: a build, or the loads of one artifact. `python -m optpipe.sweep TASK.json OUTCOME.json`."""

import os
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.errors import ExitStatus, OptpipeError, first_line, is_out_of_memory
from optpipe.core.interrupts import handle_interrupts
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.process_group import end_with_parent
from optpipe.core.records import json_from_record, read_record
from optpipe.sweep.job import Cell, JobState, Recipe
from optpipe.workspace.runs import write_bytes

_FULL_BYTES = 1 << 20
"""A disk with less is full."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a process is told: to build `recipe`, or to measure `cells`, which differ in their loads alone."""

    workspace: str
    recipe: Recipe
    cells: tuple[Cell, ...] = ()
    artifact: str | None = None
    cpus: tuple[int, ...] = ()

    @property
    def timing(self) -> bool:
        """Whether it measures."""
        return bool(self.cells)

    @property
    def label(self) -> str:
        """What it is called while it runs."""
        if not self.cells:
            return f"build {self.recipe.label}"
        more = f" and {len(self.cells) - 1} more" if len(self.cells) > 1 else ""
        return self.cells[0].label + more


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """What came of one cell, or of the build."""

    state: JobState
    reason: str = ""
    artifact: str | None = None
    run: str | None = None
    group: MeasurementGroup | None = None


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What came of a task: an outcome for each cell; one for a build."""

    cells: tuple[CellOutcome, ...]
    seconds: float = 0.0
    started_utc: str = ""
    crashed: bool = False
    """The process ended without a word: another try may succeed."""


def main() -> None:
    """Does the task and writes the outcome; whatever is expected to fail is an outcome."""
    end_with_parent()
    task, path = read_record(Path(sys.argv[1]), Task), Path(sys.argv[2])
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    with handle_interrupts():
        outcomes = _do(task)
    write_bytes(path, json_from_record(TaskOutcome(outcomes)))


def _do(task: Task) -> tuple[CellOutcome, ...]:
    from optpipe.sweep.work import build_recipe, measure_cells

    try:
        return measure_cells(task) if task.timing else (build_recipe(task),)
    except OptpipeError as error:
        return (outcome_from_error(error),) * max(1, len(task.cells))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (CellOutcome(JobState.FAILED, f"out of memory: {first_line(error)}"),) * max(1, len(task.cells))


def outcome_from_error(error: OptpipeError) -> CellOutcome:
    """A failed or, where this machine or the request cannot do it at all, an impossible cell."""
    cannot = error.exit_status in (ExitStatus.BAD_INPUT, ExitStatus.MISSING)
    return CellOutcome(JobState.IMPOSSIBLE if cannot else JobState.FAILED, tell_on_one_line(error))


def tell_on_one_line(error: OptpipeError) -> str:
    """What happened and the way out, which a terminal shows on two lines."""
    return "; ".join(str(error).splitlines())


def limit_load(task: Task) -> tuple[Cell, ...]:
    """The cells by rising length and batch size: memory runs out last."""
    return tuple(
        sorted(task.cells, key=lambda cell: (cell.load.length or 0, cell.load.batch_size, cell.load.rate_per_s or 0.0))
    )


def explain_crash(returncode: int, log: Path) -> str:
    """Why a process that wrote no outcome ended."""
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    said = f": {words[-1][:240]}" if words else ""
    full = shutil.disk_usage(log.parent).free < _FULL_BYTES
    if full and "No space left" not in said:  # then its last words did not fit either
        said += f"{';' if said else ':'} No space left on device of the workspace"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        return f"its process was killed by {name}{said}"
    return f"its process ended with status {returncode}{said}"


def mark_all(task: Task, state: JobState, reason: str) -> tuple[CellOutcome, ...]:
    """The same outcome for every cell."""
    return (CellOutcome(state, reason),) * max(1, len(task.cells))


def spoil(outcome: CellOutcome, why: str) -> CellOutcome:
    """An outcome that may no longer be believed."""
    if outcome.state is not JobState.DONE:
        return outcome
    return replace(outcome, state=JobState.INVALID, reason=why)
