"""A sweep from matrix to table: planned first, then run where its cells can run, resumable."""

import threading
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from optpipe.core.events import Listener
from optpipe.core.plan import for_workspace
from optpipe.sweep.job import Cell, JobRecord, SweepOptions, Task
from optpipe.sweep.ledger import keep_backed, list_conflicts, read_jobs
from optpipe.sweep.local import Report, Setting, run_locally
from optpipe.sweep.neighbors import read_neighbor_effect
from optpipe.sweep.plan import (
    Standing,
    SweepRecord,
    SweepRow,
    estimate_total,
    fill_rows,
    judge_status,
    list_tasks,
    list_warnings,
    plan_sweep,
)
from optpipe.sweep.slots import Slot
from optpipe.workspace.store import Store


class Executor(Protocol):
    def __call__(self, tasks: Sequence[Task], slots: Sequence[Slot], setting: Setting, report: Report) -> bool:
        """Runs everything and reports each record; False where it was interrupted."""


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
    for text in list_conflicts(stored):
        listener.warn(text)
    plan = plan_sweep(cells, slots, stored, again=options.again)
    serialized = decide_serialization(store, plan, slots, listener)
    records: dict[str, JobRecord] = {}
    ended = True
    if not options.dry_run and (tasks := list_tasks(plan, options.loads_per_process)):
        store.require_writable()
        setting = Setting(store.workspace, options, serialized=serialized)
        ended = _execute(tasks, slots, setting, listener, execute, records)
    rows = fill_rows(plan, records)
    warnings = list_warnings(rows)
    for text in warnings:
        listener.warn(text)
    return SweepRecord(
        rows=rows,
        slots=tuple(f"{slot.kind} ({slot.name})" for slot in slots if slot.kind in {cell.kind for cell in cells}),
        seconds=round(monotonic() - started, 3),
        estimate_s=estimate_total(plan, slots),
        dry_run=options.dry_run,
        serialized=serialized,
        interrupted=not ended,
        warnings=tuple(warnings),
        exit_status=int(judge_status(rows, interrupted=not ended, dry_run=options.dry_run)),
    )


def decide_serialization(store: Store, plan: Sequence[SweepRow], slots: Sequence[Slot], listener: Listener) -> bool:
    """Whether the slots that are to run have to time one after the other, by what was measured of this host."""
    kinds = {row.cell.kind for row in plan if row.state == Standing.RUN}
    used = [slot for slot in slots if slot.kind in kinds]
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
    tasks: Sequence[Task],
    slots: Sequence[Slot],
    setting: Setting,
    listener: Listener,
    execute: Executor,
    records: dict[str, JobRecord],
) -> bool:
    lock = threading.Lock()
    total = sum(len(work.cells) for work in tasks)
    with listener.step(f"sweep of {total} job{'s' if total > 1 else ''}", total=total) as step:

        def report(record: JobRecord) -> None:
            with lock:
                records[record.cell.key] = record
                step.advance()

        return execute(tasks, slots, setting, report)
