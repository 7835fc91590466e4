"""The executor of this host: a thread for each slot takes builds first, then loads; each task is a process group of its own."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep

from optpipe import __version__
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.files import hash_value
from optpipe.core.process import acknowledge_interrupt, open_process_group
from optpipe.core.records import json_from_record, plain_from_record, read_record
from optpipe.models.sources.resolve import find_model_cards
from optpipe.sweep.job import CellOutcome, JobRecord, JobState, Place, Recipe, SweepOptions, Task
from optpipe.sweep.ledger import claim_job, read_job, write_job
from optpipe.sweep.plan import key_of, sort_tasks, take_task
from optpipe.sweep.slots import (
    Slot,
    find_foreign,
    hold_locks,
    list_descendants,
    list_gpu_processes,
    list_locks,
    name_host,
)
from optpipe.sweep.task import explain_crash, mark_all, tell_on_one_line
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import NOTES, Store

WATCH_S = 1.0
"""Between two looks at a GPU's processes."""
STOP_S = 15.0
"""For a task to end in order."""
_SETTLE_S = 0.5
"""Until the driver no longer lists a process that has ended."""


PROGRAM = (sys.executable, "-m", "optpipe.sweep.task")
"""What does a task: it is called with the task's file and the outcome's."""


def run_task(
    task: Task, slot: Slot, limits: SweepOptions, stop: threading.Event, program: Sequence[str] = PROGRAM
) -> tuple[CellOutcome, ...]:
    """Runs the task in a process group of its own and waits for its end. Raises StageError where the workspace cannot be written."""
    started, clock = datetime.now(UTC).isoformat(timespec="milliseconds"), monotonic()
    task = replace(task, cpus=slot.cpus)
    taken = _find_taken(slot) if task.timing else ()
    if taken:
        why = f"not measured: {slot.name} is in use by {', '.join(taken)}"
        return mark_all(task, CellOutcome(JobState.INVALID, why, started_utc=started))
    with Store(Path(task.workspace)).scratch("sweep") as scratch:
        write_bytes(scratch / "task.json", json_from_record(task))
        command = [*program, str(scratch / "task.json"), str(scratch / "outcome.json")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu or ""}
        with open_process_group(command, scratch / "log", environment) as process:
            foreign, ended = _watch(process, slot, limits.task_s, stop, watch=task.timing)
        found = _read_outcome(task, scratch, process.returncode, ended)
    if task.timing:
        foreign += [one for one in _find_taken(slot) if one not in foreign]
    seconds, why = round(monotonic() - clock, 3), f"other processes used the GPU: {', '.join(foreign)}"
    found = tuple(replace(one, seconds=seconds, started_utc=started) for one in found)
    return tuple(
        replace(one, state=JobState.INVALID, reason=why) if foreign and one.state is JobState.DONE else one
        for one in found
    )


def _find_taken(slot: Slot) -> tuple[str, ...]:
    """Who is on the slot's GPU while nothing of ours is; looked at twice, since the driver is slow to forget."""
    if slot.gpu is None or not list_gpu_processes(slot.gpu):
        return ()
    sleep(_SETTLE_S)
    return tuple(list_gpu_processes(slot.gpu).values())


def _watch(
    process: "subprocess.Popen[bytes]", slot: Slot, limit_s: float, stop: threading.Event, *, watch: bool
) -> tuple[list[str], str | None]:
    """Waits for the end. Returns the foreign processes that were seen, and why the process was ended if it was."""
    deadline, why, foreign = monotonic() + limit_s, None, dict[int, str]()
    while True:
        try:
            process.wait(timeout=WATCH_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return list(foreign.values()), why
        if watch and slot.gpu is not None:
            foreign |= find_foreign(list_gpu_processes(slot.gpu), list_descendants(process.pid))
        if why is None and (stop.is_set() or monotonic() > deadline):
            why = "interrupted" if stop.is_set() else f"it took longer than {limit_s:.0f} s (--set job-timeout)"
            process.send_signal(signal.SIGINT)
            deadline = monotonic() + STOP_S
        elif why is not None and monotonic() > deadline:
            process.kill()


def _read_outcome(task: Task, scratch: Path, returncode: int, ended: str | None) -> tuple[CellOutcome, ...]:
    path = scratch / "outcome.json"
    if path.is_file():
        with suppress(BadInputError):
            return read_record(path, tuple[CellOutcome, ...])
    if ended is not None:
        return mark_all(task, CellOutcome(JobState.FAILED, ended))
    why = explain_crash(returncode, scratch / "log")
    return mark_all(task, CellOutcome(JobState.FAILED, why, crashed=True))


def note_built(workspace: Path, recipe: Recipe, fingerprint: str, artifact: str) -> None:
    if _is_pinned(recipe):
        write_bytes(_path(workspace, recipe, fingerprint), json_from_record(artifact))


def find_built(workspace: Path, recipe: Recipe, fingerprint: str) -> str | None:
    """The artifact, whole; None where the recipe has to be built."""
    if not _is_pinned(recipe):
        return None
    try:
        artifact = read_record(_path(workspace, recipe, fingerprint), str)
        entry = Store(workspace).find(artifact, ArtifactInfo)
    except BadInputError:
        return None
    return artifact if entry.find_damage() is None else None


def _path(workspace: Path, recipe: Recipe, fingerprint: str) -> Path:
    decisive = {"optpipe": __version__, "recipe": plain_from_record(recipe), "environment": fingerprint}
    return workspace / NOTES / f"built-{hash_value(decisive)[:16]}.json"


def _is_pinned(recipe: Recipe) -> bool:
    name = recipe.model
    if recipe.calibration is not None:
        return False
    if name.endswith(".onnx"):
        return name in recipe.files
    return name.isidentifier() and not Path(name).exists() and name not in find_model_cards()


@dataclass(frozen=True, slots=True)
class Setting:
    """What holds for all tasks of a sweep on this host."""

    workspace: Path
    limits: SweepOptions = field(default_factory=SweepOptions)
    serialized: bool = False
    """Whether GPUs of this host time one after the other, because they disturb each other."""
    program: tuple[str, ...] = PROGRAM


Report = Callable[[JobRecord], None]


def run_locally(tasks: Sequence[Task], slots: Sequence[Slot], setting: Setting, report: Report) -> bool:
    """Runs everything, kind by kind, and reports each record. Returns False where it was interrupted."""
    stop = threading.Event()
    for kind in dict.fromkeys(task.kind for task in tasks):
        mine = [slot for slot in slots if slot.kind == kind]
        queue = _Queue([task for task in tasks if task.kind == kind], setting, len(mine), report, stop)
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
        self, tasks: Iterable[Task], setting: Setting, slots: int, report: Report, stop: threading.Event
    ) -> None:
        self.setting, self.slots, self.report, self.stop = setting, slots, report, stop
        self.error: BaseException | None = None
        self.ended = threading.Event()
        """Set when no slot is served any more."""
        self._serving = slots
        self._changed = threading.Condition()
        self._loads = sort_tasks(tasks)
        self._builds = deque({task.recipe_key: replace(task, cells=()) for task in self._loads}.values())
        self._elsewhere: set[str] = set()
        """Keys of cells that another sweep of this workspace runs: their results are waited for, after all others."""
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
                    build = self._builds.popleft()
                    self._building += 1
                    return lambda slot: self._build(build, slot)
                for at, task in enumerate(self._loads):
                    if task.recipe_key in self._built:
                        taken = self._take_loads(at, slot)
                        return lambda slot: self._measure(taken, slot)  # returned at once
                if not self._loads and not self._building:
                    return None
                self._changed.wait(timeout=0.5)
        return None

    def _take_loads(self, at: int, slot: Slot) -> Task:
        slots = 1 if self.setting.serialized else self.slots - self._building
        now = monotonic()
        task = take_task(self._loads, at, tuple(self._ends.values()), slots, now)
        self._ends[slot.name] = now + task.expected_s
        return task

    def _build(self, task: Task, slot: Slot) -> None:
        workspace, attempts = self.setting.workspace, tuple[str, ...]()
        if (known := find_built(workspace, task.recipe, slot.fingerprint)) is not None:
            found = CellOutcome(JobState.DONE, artifact=known)
        else:
            (found,), attempts = try_task(task, slot, self.setting, self.stop)
            if found.state is JobState.DONE and found.artifact is not None:
                note_built(workspace, task.recipe, slot.fingerprint, found.artifact)
        lost: list[Task] = []
        with self._changed:
            self._built[task.recipe_key] = found
            self._building -= 1
            if found.state is not JobState.DONE:  # a row for every cell that needs it
                lost = [each for each in self._loads if each.recipe_key == task.recipe_key]
                self._loads = [each for each in self._loads if each.recipe_key != task.recipe_key]
            self._changed.notify_all()
        if not self.stop.is_set():
            for each in lost:
                self._record(each, (found,) * len(each.cells), slot, attempts)

    def _measure(self, task: Task, slot: Slot) -> None:
        with ExitStack() as stack:
            cells = []
            for cell in task.cells:
                key = key_of(cell, slot)
                wait = self.stop if cell.key in self._elsewhere else None
                if not stack.enter_context(claim_job(self.setting.workspace, key, wait)):
                    with self._changed:
                        self._elsewhere.add(cell.key)
                        self._loads.append(replace(task, cells=(cell,)))
                    continue
                known = read_job(self.setting.workspace, key)
                if known is not None and known.finished and not self.setting.limits.again:
                    self.report(known)
                else:
                    cells.append(cell)
            if cells:
                self._measure_claimed(replace(task, cells=tuple(cells)), slot)

    def _measure_claimed(self, task: Task, slot: Slot) -> None:
        task = replace(task, artifact=self._built[task.recipe_key].artifact)
        outcomes, attempts = try_task(task, slot, self.setting, self.stop)
        if self.stop.is_set() and not any(one.run for one in outcomes):
            return
        if outcomes[0].crashed and len(task.cells) > 1:  # one load must not take the others with it
            for cell in task.cells:
                self._measure_claimed(replace(task, cells=(cell,)), slot)
            return
        self._record(task, outcomes, slot, attempts)

    def _record(self, task: Task, outcomes: Sequence[CellOutcome], slot: Slot, attempts: tuple[str, ...]) -> None:
        beside = 1 if self.setting.serialized else self.slots
        for record in list_records(task, outcomes, slot, attempts, beside):
            with suppress(
                OptpipeError
            ):  # a full disk: the row is in the report even so, and the next sweep runs it again
                write_job(self.setting.workspace, record)
            self.report(record)


def try_task(
    task: Task, slot: Slot, setting: Setting, stop: threading.Event
) -> tuple[tuple[CellOutcome, ...], tuple[str, ...]]:
    """The outcome of each cell, and why earlier tries gave none: a crash is tried again, anything else is a result."""
    attempts = list(task.attempts)
    task = replace(task, workspace=str(setting.workspace))
    locks = list_locks(slot, timing=task.timing, serialized=setting.serialized)
    for left in reversed(range(setting.limits.retries + 1)):
        try:
            with hold_locks(locks, setting.limits.lock_s, stop=stop):
                found = run_task(task, slot, setting.limits, stop, setting.program)
        except OptpipeError as error:
            found = mark_all(task, CellOutcome(JobState.FAILED, tell_on_one_line(error)))
        if not found[0].crashed or len(task.cells) > 1 or not left or stop.is_set():
            break
        attempts.append(found[0].reason)
    return found, tuple(attempts)


def list_records(
    task: Task, outcomes: Sequence[CellOutcome], slot: Slot, attempts: tuple[str, ...], side_by_side: int
) -> Iterator[JobRecord]:
    for cell, found in zip(task.cells, outcomes, strict=True):
        yield JobRecord(
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
            seconds=round(found.seconds / len(task.cells), 3),
            started_utc=found.started_utc,
            attempts=attempts,
        )
