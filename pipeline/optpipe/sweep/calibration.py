"""`optpipe sweep --calibrate-host`: builds what is needed, takes every slot of a kind for itself, and measures."""

import threading
from collections.abc import Sequence

from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.stats.ratio import SMALLEST_ROUNDS
from optpipe.sweep.built import find_built
from optpipe.sweep.job import Cell, JobState
from optpipe.sweep.launch import Limits, run_task
from optpipe.sweep.locks import hold_locks, list_locks
from optpipe.sweep.neighbors import NeighborEffect, measure_neighbor_effect
from optpipe.sweep.slots import Slot
from optpipe.sweep.task import Task
from optpipe.workspace.store import Store


def calibrate_host(
    cell: Cell, slots: Sequence[Slot], rounds: int, lock_s: float, store: Store, listener: Listener
) -> NeighborEffect:
    """The neighbor effect of the slots of the cell's kind. Raises MissingError for fewer than two, BadInputError for too few rounds."""
    mine = [slot for slot in slots if slot.kind == cell.kind]
    if len(mine) < 2:
        raise MissingError(
            f"--calibrate-host requires two or more slots of {cell.kind}, found {len(mine)}; for a CPU, add --set cpu-slots=2"
        )
    if rounds < SMALLEST_ROUNDS:
        raise BadInputError(f"--rounds {rounds}: must be at least {SMALLEST_ROUNDS}")
    locks = sorted({lock for slot in mine for lock in list_locks(slot, timing=True, serialized=False)})
    with hold_locks(locks, lock_s):
        artifact = find_built(store.workspace, cell.recipe, mine[0].fingerprint)
        if artifact is None:
            with listener.step(f"build {cell.recipe.label}"):
                artifact = _build(cell, mine[0], store)
        return measure_neighbor_effect(artifact, cell.load.batch_size, mine, store, listener, rounds=rounds)


def _build(cell: Cell, slot: Slot, store: Store) -> str:
    outcome = run_task(Task(str(store.workspace), cell.recipe), slot, Limits(), threading.Event()).cells[0]
    if outcome.state is not JobState.DONE or outcome.artifact is None:
        raise StageError(f"{cell.recipe.label}: {outcome.reason}")
    return outcome.artifact
