"""The executor of this host."""

import os
import platform
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

from optpipe import __version__
from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError, OptpipeError
from optpipe.core.files import hash_text, hash_value
from optpipe.core.process import make_python_command, open_process_group
from optpipe.core.records import json_from_record, plain_from_record, read_record
from optpipe.core.wording import Argument
from optpipe.sweep.job import (
    CellOutcome,
    JobState,
    Recipe,
    Result,
    SweepOptions,
    Task,
    fail_task,
    repeat_outcome,
)
from optpipe.sweep.slots import (
    Slot,
    find_foreign,
    hold_locks,
    list_descendants,
    list_gpu_processes,
    list_locks,
)
from optpipe.sweep.task import explain_crash, tell_on_one_line
from optpipe.workspace.entry import get_utc_time
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import NOTES, Store

WATCH_S = 1.0
"""Seconds between two checks of a GPU's processes."""
STOP_S = 15.0
"""Seconds for a task to end in order."""
_SETTLE_S = 3.0
"""Seconds until the driver no longer lists a process that has ended or was killed."""
PROGRAM = tuple(make_python_command("optpipe.sweep.task"))
"""Called with the paths of the task and the outcome."""


class LocalExecutor:
    remote = False

    def __init__(
        self, workspace: Path, options: SweepOptions, program: Sequence[str] = PROGRAM
    ) -> None:
        self.workspace, self.options, self.program = workspace, options, program
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1024)

    def start(self, task: Task, slot: Slot) -> Future[Result]:
        """Waits in a thread for the slot's locks, then for the task's end."""
        task = replace(task, workspace=str(self.workspace))
        return self._pool.submit(
            run_exclusively, task, slot, self.options, self._stop, self.program
        )

    def poll(
        self, running: Collection[Future[Result]], timeout_s: float
    ) -> Iterator[tuple[Future[Result], Result]]:
        yield from (
            (future, future.result()) for future in wait(running, timeout_s, FIRST_COMPLETED).done
        )

    def cancel(self, running: Collection[Future[Result]]) -> Collection[Future[Result]]:
        """Interrupts the tasks; they end within STOP_S and may still give a measurement."""
        self._stop.set()
        return running

    def close(self) -> None:
        """Interrupts running tasks and waits for their end."""
        self._stop.set()
        self._pool.shutdown()


def run_exclusively(
    task: Task,
    slot: Slot,
    options: SweepOptions,
    stop: threading.Event,
    program: Sequence[str] = PROGRAM,
) -> Result:
    """Holds the locks of the slot while the task runs; without a lock the task fails."""
    try:
        with hold_locks(list_locks(slot, timing=task.timing), options.lock_s, stop=stop):
            return run_task(task, slot, options, stop, program)
    except OptpipeError as error:
        return fail_task(task, tell_on_one_line(error), slot.fingerprint)


def run_task(
    task: Task,
    slot: Slot,
    options: SweepOptions,
    stop: threading.Event,
    program: Sequence[str] = PROGRAM,
) -> Result:
    """Runs the task in a process group and waits for its end. Raises StageError if the workspace cannot be written."""
    started, clock, lost = get_utc_time("milliseconds"), monotonic(), False
    task = replace(task, cpus=slot.cpus)
    if taken := _find_taken(slot) if task.timing else ():
        why = f"not measured: {slot.name} is in use by {', '.join(taken)}"
        outcomes = repeat_outcome(task, CellOutcome(JobState.INVALID, why))
    else:
        outcomes, lost = _run_process(task, slot, options, stop, program)
    return Result(
        outcomes,
        slot.fingerprint,
        slot.environment,
        host=hash_text(platform.node())[:8],
        slot=slot.name,
        side_by_side=task.side_by_side,
        seconds=round(monotonic() - clock, 3),
        started_utc=started,
        lost=lost,
    )


def _run_process(
    task: Task, slot: Slot, options: SweepOptions, stop: threading.Event, program: Sequence[str]
) -> tuple[tuple[CellOutcome, ...], bool]:
    with Store(Path(task.workspace)).scratch("sweep") as scratch:
        write_bytes(scratch / "task.json", json_from_record(task))
        command = [*program, str(scratch / "task.json"), str(scratch / "outcome.json")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu or ""}
        with open_process_group(command, scratch / "log", environment) as process:
            foreign, stopped = _watch(process, slot, options.task_s, stop, watch=task.timing)
        outcomes = None
        with suppress(BadInputError):
            outcomes = read_record(scratch / "outcome.json", tuple[CellOutcome, ...])
        if outcomes is None:
            why = stopped or explain_crash(process.returncode, scratch / "log")
            return repeat_outcome(task, CellOutcome(JobState.FAILED, why)), stopped is None
    if task.timing:
        foreign += [process for process in _find_taken(slot) if process not in foreign]
    if foreign:
        why = f"other processes used the GPU: {', '.join(foreign)}"
        outcomes = tuple(
            replace(outcome, state=JobState.INVALID, reason=why)
            if outcome.state is JobState.DONE
            else outcome
            for outcome in outcomes
        )
    return outcomes, False


def _find_taken(slot: Slot) -> tuple[str, ...]:
    """Foreign processes on an idle slot's GPU; the driver lists ended processes for a while."""
    deadline = monotonic() + _SETTLE_S
    while (taken := list_gpu_processes(slot.gpu) if slot.gpu else {}) and monotonic() < deadline:
        sleep(0.1)
    return tuple(taken.values())


def _watch(
    process: "subprocess.Popen[bytes]",
    slot: Slot,
    limit_s: float,
    stop: threading.Event,
    *,
    watch: bool,
) -> tuple[list[str], str | None]:
    """Waits for the end. Returns the foreign processes that were seen, and why the process was ended if it was."""
    deadline, why, foreign = monotonic() + limit_s, None, dict[int, str]()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=WATCH_S)
            return list(foreign.values()), why
        if watch and slot.gpu is not None:
            foreign |= find_foreign(list_gpu_processes(slot.gpu), list_descendants(process.pid))
        if why is None and (stop.is_set() or monotonic() > deadline):
            why = (
                "interrupted"
                if stop.is_set()
                else f"it took longer than {limit_s:.0f} s (" + Argument("set", "job-timeout") + ")"
            )
            process.send_signal(signal.SIGINT)
            deadline = monotonic() + STOP_S
        elif why is not None and monotonic() > deadline:
            process.kill()


def note_built(workspace: Path, recipe: Recipe, fingerprint: str, artifact: str) -> None:
    if "model" in recipe.files:
        write_bytes(_path(workspace, recipe, fingerprint), json_from_record(artifact))


def find_built(workspace: Path, recipe: Recipe, fingerprint: str) -> str | None:
    """The artifact, every byte checked; None if the recipe must be built or its content is unknown."""
    if "model" not in recipe.files:
        return None
    try:
        artifact = read_record(_path(workspace, recipe, fingerprint), str)
        entry = Store(workspace).find(artifact, ArtifactInfo)
    except BadInputError:
        return None
    return artifact if entry.find_damage() is None else None


def _path(workspace: Path, recipe: Recipe, fingerprint: str) -> Path:
    decisive = {
        "optpipe": __version__,
        "recipe": plain_from_record(recipe),
        "environment": fingerprint,
    }
    return workspace / NOTES / f"built-{hash_value(decisive)[:16]}.json"
