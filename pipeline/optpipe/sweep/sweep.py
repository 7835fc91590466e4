"""Plans a sweep and runs its tasks; a later sweep resumes it."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from optpipe.core.errors import OptpipeError
from optpipe.core.events import Listener
from optpipe.core.process import acknowledge_interrupt
from optpipe.core.wording import Argument
from optpipe.sweep.job import (
    Cell,
    JobRecord,
    JobState,
    Result,
    SweepOptions,
    Task,
    compute_job_key,
    fail_task,
)
from optpipe.sweep.ledger import (
    claim_job,
    keep_backed,
    list_conflicts,
    read_job,
    read_jobs,
    write_job,
)
from optpipe.sweep.local import find_built, note_built
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.plan import (
    Standing,
    SweepRecord,
    estimate_total,
    fill_rows,
    judge_status,
    list_tasks,
    list_warnings,
    plan_sweep,
    sort_tasks,
    take_task,
)
from optpipe.sweep.slots import Slot
from optpipe.sweep.task import tell_on_one_line
from optpipe.workspace.store import Store

POLL_S = 0.5


class Executor(Protocol):
    """Runs tasks; what `start` returns stands for a running task until `poll` gives its result."""

    remote: bool
    """Whether tasks run on other hosts, with other locks and stores."""

    def start(self, task: Task, slot: Slot) -> Any:
        """Starts the task on the slot, or on another of its kind. Raises OptpipeError."""

    def poll(self, running: Collection[Any], timeout_s: float) -> Iterator[tuple[Any, Result]]:
        """The tasks that have ended, after at most `timeout_s` seconds."""

    def cancel(self, running: Collection[Any]) -> Collection[Any]:
        """Ends the tasks; returns those that still give a result."""

    def close(self) -> None: ...


def run_sweep(
    cells: Sequence[Cell],
    slots: Sequence[Slot],
    options: SweepOptions,
    store: Store,
    listener: Listener,
    executor: Executor,
) -> SweepRecord:
    """Plans, runs what is not stored, and gives a row for every cell. Raises BadInputError if the workspace cannot be written."""
    started = monotonic()
    stored = keep_backed(store.workspace, read_jobs(store.workspace))
    for text in list_conflicts(stored):
        listener.warn(text)
    plan = plan_sweep(cells, slots, stored, again=options.again)
    kinds = [row.cell.kind for row in plan if row.state == Standing.RUN]
    count = min(len(kinds), sum(slot.kind in kinds for slot in slots))
    if not executor.remote and count > 1:
        listener.warn(
            f"{count} slots measure side by side; to measure one cell at a time, use "
            + Argument("slots", 1, setting=True)
        )
    records: dict[str, JobRecord] = {}
    ended = True
    if not options.dry_run and (tasks := list_tasks(plan, options.loads_per_process)):
        store.require_writable()
        total = sum(len(task.cells) for task in tasks)
        # without a count of units: builds come first, and cells differ, so that no remaining time would be true
        with listener.step(f"sweep of {total} job{'s' if total > 1 else ''}"):

            def report(record: JobRecord) -> None:
                records[record.cell.key] = record
                listener.inform(f"{len(records)} of {total}: {describe_record(record)}")

            ended = Scheduler(slots, options, store.workspace, executor, report).run(tasks)
    rows = fill_rows(plan, records)
    warnings = list_warnings(rows)
    for text in warnings:
        listener.warn(text)
    return SweepRecord(
        rows=rows,
        slots=tuple(
            f"{slot.kind} ({slot.name})"
            for slot in slots
            if slot.kind in {cell.kind for cell in cells}
        ),
        seconds=round(monotonic() - started, 3),
        estimate_s=estimate_total(plan, slots),
        dry_run=options.dry_run,
        interrupted=not ended,
        warnings=tuple(warnings),
        exit_status=int(judge_status(rows, interrupted=not ended, dry_run=options.dry_run)),
    )


def describe_record(record: JobRecord) -> str:
    """`digits onnxruntime fp32 (cpu), batch 1: VALID`, or `INVALID` with its reason: known as soon as a job ends."""
    count = f" ({record.group.processes} processes)" if record.group is not None else ""
    state = f"VALID{count}" if record.state is JobState.DONE else record.state.upper()
    reason = f": {record.reason.splitlines()[0]}" if record.reason else ""
    return f"{record.cell.label}: {state}{reason}"


@dataclass(frozen=True, slots=True)
class _Running:
    task: Task
    slot: Slot
    claims: ExitStack
    started: float


class Scheduler:
    """Runs builds first, then loads of what is built, on free slots of their kind, and reports every record."""

    def __init__(
        self,
        slots: Sequence[Slot],
        options: SweepOptions,
        workspace: Path,
        executor: Executor,
        report: Callable[[JobRecord], None],
    ) -> None:
        self.slots, self.options, self.workspace = slots, options, workspace
        self.executor, self.report = executor, report
        self.stop = threading.Event()

    def run(self, tasks: Sequence[Task]) -> bool:
        """Returns False if it was interrupted; running tasks then end in order.

        The loop runs in a thread, so that an interruption comes between two of its steps. `Thread.join` would not do:
        in Python 3.11 and 3.12 an interrupted `join` takes the thread for ended.
        """
        kinds = dict.fromkeys(task.kind for task in tasks)
        # the CPU of this host is not timed while its GPUs are
        groups = (
            [tasks]
            if self.executor.remote
            else [[task for task in tasks if task.kind == kind] for kind in kinds]
        )
        try:
            with ThreadPoolExecutor(1) as pool:
                loop = pool.submit(list, map(self._run_group, groups))
                while not loop.done():
                    try:
                        wait([loop], timeout=0.2)
                    except KeyboardInterrupt as interruption:
                        acknowledge_interrupt(interruption)
                        self.stop.set()
                loop.result()
        finally:
            self.executor.close()
        return not self.stop.is_set()

    def _run_group(self, tasks: Sequence[Task]) -> None:
        self.free = list(self.slots)
        self.loads = sort_tasks(tasks)
        self.builds = list(
            {(task.recipe_key, task.kind): replace(task, cells=()) for task in self.loads}.values()
        )
        self.waiting: dict[str, list[Task]] = {}
        """By recipe, builds for GPUs that wait until a node without a GPU has done its part of them."""
        if self.executor.remote:
            self._build_without_gpu()
        self.running: dict[Any, _Running] = {}
        self.built: dict[tuple[str, str], str] = {}
        """The artifact by recipe and kind."""
        self.models: dict[str, str] = {}
        """An artifact of each model, whose export serves the model's next builds."""
        while (self.builds or self.loads or self.running) and not self.stop.is_set():
            self._start_what_fits()
            if not self.running and (
                self.builds or self.loads
            ):  # another sweep of this workspace runs them
                sleep(POLL_S)
            self._collect(self.running)
        left = self.executor.cancel(tuple(self.running)) if self.stop.is_set() else ()
        while left := [handle for handle in left if handle in self.running]:
            self._collect(left)

    def _build_without_gpu(self) -> None:
        """Sends the part of builds that needs no GPU (export, calibration, some engines) to nodes without one, if there are any."""
        kinds = list(
            dict.fromkeys(
                slot.kind for slot in self.slots if choose_device_of_kind(slot.kind) == "cpu"
            )
        )
        for build in [build for build in self.builds if kinds and build.recipe.device == "cuda"]:
            self.builds.remove(build)
            self.waiting.setdefault(build.recipe_key, []).append(build)
        parts = [builds[0] for builds in self.waiting.values()]
        self.builds += [
            replace(build, kind=kinds[at % len(kinds)]) for at, build in enumerate(parts)
        ]

    def _start_what_fits(self) -> None:
        """Fills the free slots; stops if there is none, since thousands of tasks may wait."""
        for queue in (self.builds, self.loads):
            at = 0
            for _ in range(len(queue)):
                if not self.free or at >= len(queue):
                    break
                task = queue[at]
                slot = next((slot for slot in self.free if slot.kind == task.kind), None)
                if slot is None or not self._is_ready(task):
                    at += 1
                elif task.timing:
                    self._start_loads(at, slot)
                else:
                    self._start_build(queue.pop(at), slot)

    def _is_ready(self, task: Task) -> bool:
        """Loads need their build. On other hosts builds of one model run one after the other: its export serves them all."""
        if task.timing:
            return (task.recipe_key, task.kind) in self.built
        building = {
            other.task.recipe.model for other in self.running.values() if not other.task.timing
        }
        return not self.executor.remote or task.recipe.model not in building

    def _start_build(self, task: Task, slot: Slot) -> None:
        known = find_built(self.workspace, task.recipe, slot.fingerprint)
        if known is None or task.recipe_key in self.waiting:
            self._start(
                replace(task, artifact=task.artifact or self.models.get(task.recipe.model)),
                slot,
                ExitStack(),
            )
        else:
            self.built[task.recipe_key, task.kind] = known

    def _start_loads(self, at: int, slot: Slot) -> None:
        """Starts cells that no other sweep of this workspace runs or has run; those that one runs are tried again last."""
        mine = [running for running in self.running.values() if running.slot.kind == slot.kind]
        ends = [
            running.started + running.task.expected_s for running in mine if running.task.timing
        ]
        count = sum(peer.kind == slot.kind for peer in self.slots)
        task = take_task(
            self.loads,
            at,
            ends,
            count - sum(not running.task.timing for running in mine),
            monotonic(),
        )
        claims, cells = ExitStack(), []
        for cell in task.cells:
            if not claims.enter_context(claim_job(self.workspace, cell.key)):
                self.loads.append(replace(task, cells=(cell,)))
            elif (known := self._find_finished(cell)) is not None:
                self.report(known)
            else:
                cells.append(cell)
        if not cells:
            claims.close()
            return
        artifact = self.built[task.recipe_key, task.kind]
        self._start(
            replace(task, cells=tuple(cells), artifact=artifact, side_by_side=count), slot, claims
        )

    def _find_finished(self, cell: Cell) -> JobRecord | None:
        if self.options.again:
            return None
        prints = dict.fromkeys(slot.fingerprint for slot in self.slots if slot.kind == cell.kind)
        records = (
            read_job(self.workspace, compute_job_key(cell, fingerprint)) for fingerprint in prints
        )
        return next((record for record in records if record is not None and record.finished), None)

    def _start(self, task: Task, slot: Slot, claims: ExitStack) -> None:
        running = _Running(task, slot, claims, monotonic())
        self.free.remove(slot)
        try:
            self.running[self.executor.start(task, slot)] = running
        except OptpipeError as error:  # such as an artifact that was damaged meanwhile
            self._accept(running, fail_task(task, tell_on_one_line(error), slot.fingerprint))

    def _collect(self, running: Collection[Any]) -> None:
        for handle, result in self.executor.poll(tuple(running), POLL_S):
            self._accept(self.running.pop(handle), result)

    def _accept(self, running: _Running, result: Result) -> None:
        self.free.append(running.slot)
        task = running.task
        with running.claims:
            if self.stop.is_set():
                result = replace(result, lost=False)
                if not any(outcome.run for outcome in result.outcomes):
                    return
            if result.lost and self._try_again(task, result.outcomes[0].reason):
                return
            if task.timing:
                self._record(task, result)
            else:
                self._note_build(task, result)

    def _try_again(self, task: Task, why: str) -> bool:
        """Queues a lost task again; several loads one by one, since one load must not take the others with it."""
        if len(task.cells) > 1:
            self.loads[:0] = [replace(task, cells=(cell,)) for cell in task.cells]
            return True
        if len(task.attempts) >= self.options.retries:
            return False
        (self.loads if task.timing else self.builds).insert(
            0, replace(task, attempts=(*task.attempts, why))
        )
        return True

    def _note_build(self, task: Task, result: Result) -> None:
        (outcome,) = result.outcomes
        if outcome.artifact is not None:
            self.models.setdefault(task.recipe.model, outcome.artifact)
        if (
            waiting := self.waiting.pop(task.recipe_key, None)
        ) is not None:  # a node with a GPU may be able to
            self.builds += [replace(build, artifact=outcome.artifact) for build in waiting]
        elif outcome.state is JobState.DONE and outcome.artifact is not None:
            self.built[task.recipe_key, task.kind] = outcome.artifact
            note_built(self.workspace, task.recipe, result.fingerprint, outcome.artifact)
        else:
            needed = task.recipe_key, task.kind
            lost = [load for load in self.loads if (load.recipe_key, load.kind) == needed]
            self.loads[:] = [load for load in self.loads if (load.recipe_key, load.kind) != needed]
            for load in lost:
                outcomes = (outcome,) * len(load.cells)
                self._record(
                    replace(load, attempts=task.attempts), replace(result, outcomes=outcomes)
                )

    def _record(self, task: Task, result: Result) -> None:
        for cell, outcome in zip(task.cells, result.outcomes, strict=True):
            record = JobRecord(
                key=compute_job_key(cell, result.fingerprint),
                cell=cell,
                state=outcome.state,
                reason=outcome.reason,
                fingerprint=result.fingerprint,
                environment=result.environment,
                host=result.host,
                slot=result.slot,
                side_by_side=result.side_by_side,
                artifact=outcome.artifact,
                run=outcome.run,
                group=outcome.group,
                seconds=round(result.seconds / len(task.cells), 3),
                started_utc=result.started_utc,
                attempts=task.attempts,
                bad_input=outcome.bad_input,
            )
            with suppress(
                OptpipeError
            ):  # a full disk: the row is reported, and the next sweep runs the job again
                write_job(self.workspace, record)
            self.report(record)
