"""The executor of this host: a thread for each slot takes builds first, then loads; each task is a process group of its own."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from optpipe.core.errors import OptpipeError
from optpipe.core.process import acknowledge_interrupt
from optpipe.sweep.built import find_built, note_built
from optpipe.sweep.job import Cell, JobRecord, JobState, Place
from optpipe.sweep.launch import PROGRAM, Limits, run_task
from optpipe.sweep.ledger import claim_job, read_job, write_job
from optpipe.sweep.locks import hold_locks, list_locks
from optpipe.sweep.order import sort_works, take_work
from optpipe.sweep.plan import Work, key_of
from optpipe.sweep.slots import Slot, name_host
from optpipe.sweep.task import CellOutcome, Task, TaskOutcome, mark_all, tell_on_one_line


@dataclass(frozen=True, slots=True)
class Setting:
    """What holds for all tasks of a sweep on this host."""

    workspace: Path
    limits: Limits = field(default_factory=Limits)
    serialized: bool = False
    """Whether GPUs of this host time one after the other, because they disturb each other."""
    again: bool = False
    program: tuple[str, ...] = PROGRAM


Report = Callable[[JobRecord], None]


def run_locally(works: Sequence[Work], slots: Sequence[Slot], setting: Setting, report: Report) -> bool:
    """Runs everything, kind by kind, and reports each record. Returns False where it was interrupted."""
    stop = threading.Event()
    for kind in dict.fromkeys(work.kind for work in works):
        mine = [slot for slot in slots if slot.kind == kind]
        queue = _Queue([work for work in works if work.kind == kind], setting, len(mine), report, stop)
        threads = [threading.Thread(target=queue.serve, args=(slot,), name=slot.name) for slot in mine]
        for thread in threads:
            thread.start()
        _wait_for(queue.ended, stop)
        if queue.error is not None:
            raise queue.error
        if stop.is_set():
            return False
    return True


def _wait_for(ended: threading.Event, stop: threading.Event) -> None:
    """Waits; an interruption lets the slots end in order.

    Not by `Thread.join`: in Python 3.11 and 3.12 one that is interrupted takes its thread for ended.
    """
    while not ended.is_set():
        try:
            ended.wait(timeout=0.2)
        except KeyboardInterrupt as interruption:
            acknowledge_interrupt(interruption)
            stop.set()


class _Queue:
    """Builds and loads of one kind, served by the threads of its slots."""

    def __init__(
        self, works: Iterable[Work], setting: Setting, slots: int, report: Report, stop: threading.Event
    ) -> None:
        self.setting, self.slots, self.report, self.stop = setting, slots, report, stop
        self.error: BaseException | None = None
        self.ended = threading.Event()
        """Set when no slot is served any more."""
        self._serving = slots
        self._changed = threading.Condition()
        self._loads = [(work, False) for work in sort_works(works)]
        self._builds = deque({work.recipe_key: work for work, _ in self._loads}.values())
        self._built: dict[str, CellOutcome] = {}
        self._building = 0
        self._ends: dict[str, float] = {}
        """When the slots that measure are expected to be free."""

    def serve(self, slot: Slot) -> None:
        """Takes tasks until none is left."""
        try:
            while not self.stop.is_set() and (task := self._take(slot)) is not None:
                task(slot)
        except BaseException as error:  # noqa: BLE001 # a bug must end the sweep, not leave it waiting
            self.error = self.error or error
            self.stop.set()
        with self._changed:
            self._changed.notify_all()
            self._serving -= 1
            if not self._serving:
                self.ended.set()

    def _take(self, slot: Slot) -> Callable[[Slot], None] | None:
        with self._changed:
            self._ends.pop(slot.name, None)
            while not self.stop.is_set():
                if self._builds:
                    work = self._builds.popleft()
                    self._building += 1
                    return lambda slot: self._build(work, slot)
                for at, (work, wait) in enumerate(self._loads):
                    if work.recipe_key in self._built:
                        taken = self._take_loads(at, slot)
                        return lambda slot: self._measure(taken, slot, wait=wait)  # returned at once
                if not self._loads and not self._building:
                    return None
                self._changed.wait(timeout=0.5)
        return None

    def _take_loads(self, at: int, slot: Slot) -> Work:
        slots = 1 if self.setting.serialized else self.slots - self._building
        now = monotonic()
        work = take_work(self._loads, at, tuple(self._ends.values()), slots, now)
        self._ends[slot.name] = now + work.expected_s
        return work

    def _build(self, work: Work, slot: Slot) -> None:
        workspace, attempts = self.setting.workspace, tuple[str, ...]()
        if (known := find_built(workspace, work.recipe, slot.fingerprint)) is not None:
            outcome = TaskOutcome((CellOutcome(JobState.DONE, artifact=known),))
        else:
            task = Task(str(workspace), work.recipe)
            outcome, attempts = try_task(task, slot, self.setting, self.stop)
        found = outcome.cells[0]
        if found.state is JobState.DONE and found.artifact is not None and known is None:
            note_built(workspace, work.recipe, slot.fingerprint, found.artifact)
        with self._changed:
            self._built[work.recipe_key] = found
            self._building -= 1
            self._changed.notify_all()
        if found.state is not JobState.DONE:
            self._drop(work, slot, outcome, attempts)

    def _drop(self, work: Work, slot: Slot, outcome: TaskOutcome, attempts: tuple[str, ...]) -> None:
        """The build failed: a row for every cell that needs it."""
        with self._changed:
            lost = [each for each, _ in self._loads if each.recipe_key == work.recipe_key]
            self._loads = [each for each in self._loads if each[0].recipe_key != work.recipe_key]
        if self.stop.is_set():
            return
        for cell in (cell for each in lost for cell in each.cells):
            self._record(cell, slot, outcome, outcome.cells[0], attempts)

    def _measure(self, work: Work, slot: Slot, *, wait: bool) -> None:
        with ExitStack() as stack:
            cells = []
            for cell in work.cells:
                key = key_of(cell, slot)
                if not stack.enter_context(claim_job(self.setting.workspace, key, self.stop if wait else None)):
                    self._put_back(work, cell)
                    continue
                known = read_job(self.setting.workspace, key)
                if known is not None and known.finished and not self.setting.again:
                    self.report(known)
                else:
                    cells.append(cell)
            if cells:
                self._measure_claimed(replace(work, cells=tuple(cells)), slot)

    def _put_back(self, work: Work, cell: Cell) -> None:
        """Another sweep of this workspace runs it: its result is waited for, after all others."""
        with self._changed:
            self._loads.append((replace(work, cells=(cell,)), True))

    def _measure_claimed(self, work: Work, slot: Slot) -> None:
        artifact = self._built[work.recipe_key].artifact
        task = Task(str(self.setting.workspace), work.recipe, work.cells, artifact)
        outcome, attempts = try_task(task, slot, self.setting, self.stop)
        if self.stop.is_set() and not any(one.run for one in outcome.cells):
            return
        if outcome.crashed and len(work.cells) > 1:  # one load must not take the others with it
            for cell in work.cells:
                self._measure_claimed(replace(work, cells=(cell,)), slot)
            return
        for cell, found in zip(work.cells, outcome.cells, strict=True):
            self._record(cell, slot, outcome, found, attempts, share=len(work.cells))

    def _record(
        self,
        cell: Cell,
        slot: Slot,
        outcome: TaskOutcome,
        found: CellOutcome,
        attempts: tuple[str, ...],
        share: int = 1,
    ) -> None:
        record = make_record(cell, slot, outcome, found, attempts, share, 1 if self.setting.serialized else self.slots)
        with suppress(OptpipeError):  # a full disk: the row is in the report even so, and the next sweep runs it again
            write_job(self.setting.workspace, record)
        self.report(record)


def try_task(task: Task, slot: Slot, setting: Setting, stop: threading.Event) -> tuple[TaskOutcome, tuple[str, ...]]:
    """The outcome, and why earlier tries gave none: a crash is tried again, anything else is a result."""
    attempts: list[str] = []
    single = len(task.cells) < 2
    locks = list_locks(slot, timing=task.timing, serialized=setting.serialized)
    while True:
        try:
            with hold_locks(locks, setting.limits.lock_s, stop=stop):
                outcome = run_task(task, slot, setting.limits, stop, setting.program)
        except OptpipeError as error:
            outcome = TaskOutcome(mark_all(task, JobState.FAILED, tell_on_one_line(error)))
        if not outcome.crashed or not single or len(attempts) >= setting.limits.retries or stop.is_set():
            return outcome, tuple(attempts)
        attempts.append(outcome.cells[0].reason)


def make_record(
    cell: Cell,
    slot: Slot,
    outcome: TaskOutcome,
    found: CellOutcome,
    attempts: tuple[str, ...],
    share: int,
    side_by_side: int,
) -> JobRecord:
    """The record of one cell of a task that measured `share` of them."""
    return JobRecord(
        key=key_of(cell, slot),
        cell=cell,
        state=found.state,
        reason=found.reason,
        environment=slot.environment,
        fingerprint=slot.fingerprint,
        place=Place(name_host(), slot.name, slot.cpus, side_by_side),
        artifact=found.artifact,
        run=found.run,
        group=found.group,
        seconds=round(outcome.seconds / share, 3),
        started_utc=outcome.started_utc,
        attempts=attempts,
    )
