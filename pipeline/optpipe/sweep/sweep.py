"""A sweep from matrix to table: planned first, then run where its cells can run, resumable."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from optpipe.core.events import Listener
from optpipe.core.plan import for_workspace
from optpipe.sweep.job import Cell, JobRecord
from optpipe.sweep.launch import Limits
from optpipe.sweep.ledger import find_conflicts, keep_backed, read_jobs
from optpipe.sweep.local import Report, Setting, run_locally
from optpipe.sweep.neighbors import read_neighbor_effect
from optpipe.sweep.plan import Standing, SweepPlan, Work, list_works, plan_sweep
from optpipe.sweep.rows import SweepRecord, judge_status, list_warnings, make_rows
from optpipe.sweep.slots import Slot
from optpipe.workspace.store import Store


class Executor(Protocol):
    """Where works run: this host, or a cluster."""

    def __call__(self, works: Sequence[Work], slots: Sequence[Slot], setting: Setting, report: Report) -> bool:
        """Runs everything and reports each record; False where it was interrupted."""


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How a matrix is run."""

    dry_run: bool = False
    again: bool = False
    loads_per_process: int = 1
    limits: Limits = field(default_factory=Limits)


def run_sweep(
    cells: Sequence[Cell],
    slots: Sequence[Slot],
    options: SweepOptions,
    store: Store,
    listener: Listener,
    execute: Executor = run_locally,
) -> SweepRecord:
    """Plans, runs what is not stored, and gives a row for every cell. Raises BadInputError where the workspace cannot be written."""
    started = monotonic()
    stored = keep_backed(store.workspace, read_jobs(store.workspace))
    for tries in stored.values():
        if (conflict := find_conflicts(tries)) is not None:
            listener.warn(str(conflict))
    plan = plan_sweep(cells, slots, stored, again=options.again)
    serialized = decide_serialization(store, plan, listener)
    records: dict[str, JobRecord] = {}
    ended = True
    if not options.dry_run and (works := list_works(plan, options.loads_per_process)):
        store.require_writable()
        setting = Setting(store.workspace, options.limits, serialized=serialized, again=options.again)
        ended = _execute(works, plan, setting, listener, execute, records)
    rows = make_rows(plan, records)
    warnings = list_warnings(rows)
    for text in warnings:
        listener.warn(text)
    return SweepRecord(
        rows=rows,
        slots=tuple(f"{slot.kind} ({slot.name})" for slot in slots if slot.kind in {cell.kind for cell in cells}),
        seconds=round(monotonic() - started, 3),
        estimate_s=plan.estimate_s,
        dry_run=options.dry_run,
        serialized=serialized,
        interrupted=not ended,
        warnings=tuple(warnings),
        exit_status=int(judge_status(rows, interrupted=not ended, dry_run=options.dry_run)),
    )


def decide_serialization(store: Store, plan: SweepPlan, listener: Listener) -> bool:
    """Whether the slots that are to run have to time one after the other, by what was measured of this host."""
    kinds = {one.cell.kind for one in plan.select(Standing.RUN)}
    used = [slot for slot in plan.slots if slot.kind in kinds]
    if len(used) < 2 or not used[0].cpus:  # the nodes of a cluster know their hosts themselves
        return False
    effect = read_neighbor_effect(store.workspace, used)
    if effect is None:
        listener.warn(
            f"{len(used)} slots are timed side by side, and the neighbor effect of this host is unknown; "
            f"measure it with `{for_workspace('optpipe sweep MODEL --calibrate-host')}`"
        )
        return False
    return effect.serializes


def _execute(
    works: Sequence[Work],
    plan: SweepPlan,
    setting: Setting,
    listener: Listener,
    execute: Executor,
    records: dict[str, JobRecord],
) -> bool:
    lock = threading.Lock()
    total = sum(len(work.cells) for work in works)
    with listener.step(f"sweep of {total} job{'s' if total > 1 else ''}", total=total) as step:

        def report(record: JobRecord) -> None:
            with lock:
                records[record.cell.key] = record
                step.advance()

        return execute(works, plan.slots, setting, report)
