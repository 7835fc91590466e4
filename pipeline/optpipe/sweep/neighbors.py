"""The neighbor effect: how much slower an artifact is on one GPU while all others of the host are busy, measured, not assumed.

One worker holds the artifact loaded on the first slot and measures window after window; the workers of all other slots run in
half of the windows and are stopped (SIGSTOP) in the other half, in a newly drawn order for each round. The pair of one round
gives one ratio, Student's t over rounds its interval. A stopped neighbor keeps its memory and its context.
"""

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import ClassVar

from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import Listener
from optpipe.core.files import hash_value
from optpipe.core.measurement import LoadSpec
from optpipe.core.records import plain_from_record
from optpipe.measure.measure import BenchPlan, prepare_subject
from optpipe.measure.pair import read_trial_ns
from optpipe.measure.process import WorkerPool
from optpipe.measure.worker.plan import Point
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.stats.ratio import SMALLEST_ROUNDS, Ratio, alternate, ratio_from_rounds
from optpipe.sweep.job import Cell, JobState, SweepOptions, Task
from optpipe.sweep.local import find_built, run_task
from optpipe.sweep.slots import Slot, hold_locks, list_locks, name_host
from optpipe.workspace.entry import ID_LENGTH, get_utc_time
from optpipe.workspace.runs import list_records, write_record
from optpipe.workspace.store import Store

TOLERATED = 0.02
"""A larger effect makes figures taken side by side incomparable with figures taken alone."""
WINDOW_S = 1.0
READY_S = 300.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class NeighborEffect:
    """The record `runs/neighbors-HOST-FINGERPRINT-HASH`."""

    KIND: ClassVar[str] = "neighbors"

    host: str
    fingerprint: str
    artifact: str
    label: str
    batch_size: int
    slots: int
    ratio: Ratio
    """Time per query with busy neighbors over time without."""
    alone_ns: tuple[float, ...]
    beside_ns: tuple[float, ...]
    measured_utc: str
    seed: int

    @property
    def serializes(self) -> bool:
        """Whether the interval does not exclude an effect over TOLERATED."""
        low, high = self.ratio.ci
        return high > 1 + TOLERATED or low < 1 - TOLERATED


def name_neighborhood(slot: Slot) -> str:
    """A host in one environment, for which an effect holds."""
    return f"{name_host()}-{slot.fingerprint}"


def list_neighbor_effects(workspace: Path) -> dict[str, NeighborEffect]:
    """The last effect of each neighborhood."""
    found = sorted((each.info for each in list_records(workspace, NeighborEffect)), key=lambda one: one.measured_utc)
    return {f"{one.host}-{one.fingerprint}": one for one in found}


def measure_neighbor_effect(
    artifact: str, batch_size: int, slots: Sequence[Slot], store: Store, listener: Listener, *, rounds: int = 10
) -> NeighborEffect:
    """Measures on two slots or more and stores the effect. Raises StageError if a worker dies."""
    (found,) = find_artifacts(artifact, store)
    load = LoadSpec(batch_size, percentile=50.0, min_seconds=WINDOW_S, max_seconds=WINDOW_S, cache_probes=0)
    trial, seed = replace(load, warm_up_seconds=0.0, max_warm_up_seconds=0.0), randbits(32)
    with store.scratch("neighbors") as scratch, ExitStack() as stack:
        pools = [stack.enter_context(_open_pool(slot, scratch / f"slot{at}")) for at, slot in enumerate(slots)]
        subject = prepare_subject(found, BenchPlan(load), store, pools[0], scratch / "inputs", scratch)
        with listener.step("load the artifact on every slot"):
            measured, *others = (stack.enter_context(replace(subject, pool=pool).open()) for pool in pools)
            subject.measure(measured, load, "warm-up")
            for at, other in enumerate(others):
                stack.callback(other.kill)  # it runs until it is killed, and may be stopped
                forever = replace(load, min_seconds=DAY_S, max_seconds=DAY_S)
                other.begin(Point(f"busy{at}", str(scratch / f"busy{at}.spool"), forever), READY_S)
        with listener.step("neighbor effect", total=2 * rounds) as step:

            def measure(*, busy: bool) -> float:
                for other in others:
                    other.signal(signal.SIGCONT if busy else signal.SIGSTOP)
                value = read_trial_ns(subject.measure(measured, trial, f"busy-{busy}"))
                step.advance()
                return value

            times = alternate(
                {"alone": partial(measure, busy=False), "beside": partial(measure, busy=True)}, rounds, seed
            )
    effect = NeighborEffect(
        name_host(), slots[0].fingerprint, artifact, found.label, batch_size, len(slots),
        ratio_from_rounds(times["alone"], times["beside"]), tuple(times["alone"]), tuple(times["beside"]),
        get_utc_time(), seed,
    )  # fmt: skip
    ident = f"{name_neighborhood(slots[0])}-{hash_value(plain_from_record(effect))[:ID_LENGTH]}"
    write_record(store.workspace, effect, ident, effect.measured_utc, parents=(artifact,))
    return effect


def _open_pool(slot: Slot, folder: Path) -> WorkerPool:
    return WorkerPool(folder, slot.cpus, environment={**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu or ""})


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
    task = Task(cell.recipe, slot.kind, workspace=str(store.workspace))
    (outcome,) = run_task(task, slot, SweepOptions(), threading.Event()).outcomes
    if outcome.state is not JobState.DONE or outcome.artifact is None:
        raise StageError(f"{cell.recipe.label}: {outcome.reason}")
    return outcome.artifact
