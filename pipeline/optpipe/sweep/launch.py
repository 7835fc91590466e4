"""One task in a fresh process group on one slot: its environment, its end, and whether anybody else used the GPU meanwhile."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep

from optpipe.core.errors import BadInputError
from optpipe.core.process import open_process_group
from optpipe.core.records import json_from_record, read_record
from optpipe.sweep.job import JobState
from optpipe.sweep.slots import (
    GpuProcess,
    Slot,
    find_strangers,
    list_descendants,
    list_gpu_processes,
)
from optpipe.sweep.task import Task, TaskOutcome, explain_crash, mark_all, spoil
from optpipe.workspace.files import write_bytes
from optpipe.workspace.store import Store

WATCH_S = 1.0
"""Between two looks at a GPU's processes."""
STOP_S = 15.0
"""For a task to end in order."""
_SETTLE_S = 0.5
"""Until the driver no longer lists a process that has ended."""


PROGRAM = (sys.executable, "-m", "optpipe.sweep")
"""What does a task: it is called with the task's file and the outcome's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, and how often a job that crashed is tried again."""

    task_s: float = 1800.0
    lock_s: float = 600.0
    retries: int = 1
    pending_s: float = 300.0
    """Until a cluster has placed a task."""


def run_task(
    task: Task, slot: Slot, limits: Limits, stop: threading.Event, program: Sequence[str] = PROGRAM
) -> TaskOutcome:
    """Runs the task in a process group of its own and waits for its end. Raises StageError where the workspace cannot be written."""
    started, clock = datetime.now(UTC).isoformat(timespec="milliseconds"), monotonic()
    task = replace(task, cpus=slot.cpus)
    taken = _find_taken(slot) if task.timing else ()
    if taken:
        why = f"not measured: {slot.name} is in use by {', '.join(map(str, taken))}"
        return TaskOutcome(mark_all(task, JobState.INVALID, why), 0.0, started)
    with Store(Path(task.workspace)).scratch("sweep") as scratch:
        write_bytes(scratch / "task.json", json_from_record(task))
        command = [*program, str(scratch / "task.json"), str(scratch / "outcome.json")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu or ""}
        with open_process_group(command, scratch / "log", environment) as process:
            strangers, ended = _watch(process, slot, limits.task_s, stop, watch=task.timing)
        found = _read_outcome(task, scratch, process.returncode, ended)
    if task.timing:
        strangers += [one for one in _find_taken(slot) if one not in strangers]
    if strangers:
        why = f"other processes used the GPU: {', '.join(dict.fromkeys(map(str, strangers)))}"
        found = replace(found, cells=tuple(spoil(one, why) for one in found.cells))
    return replace(found, seconds=round(monotonic() - clock, 3), started_utc=started)


def _find_taken(slot: Slot) -> tuple[GpuProcess, ...]:
    """Who is on the slot's GPU while nothing of ours is; looked at twice, since the driver is slow to forget."""
    if slot.gpu is None or not list_gpu_processes(slot.gpu):
        return ()
    sleep(_SETTLE_S)
    return find_strangers(list_gpu_processes(slot.gpu), (), running=False)


def _watch(
    process: "subprocess.Popen[bytes]", slot: Slot, limit_s: float, stop: threading.Event, *, watch: bool
) -> tuple[list[GpuProcess], str | None]:
    """Waits for the end. Returns the strangers that were seen, and why the process was ended if it was."""
    deadline, why, strangers = monotonic() + limit_s, None, dict[int, GpuProcess]()
    while True:
        try:
            process.wait(timeout=WATCH_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return list(strangers.values()), why
        if watch and slot.gpu is not None:
            own = list_descendants(process.pid)
            strangers |= {one.pid: one for one in find_strangers(list_gpu_processes(slot.gpu), own, running=True)}
        if why is None and (stop.is_set() or monotonic() > deadline):
            why = "interrupted" if stop.is_set() else f"it took longer than {limit_s:.0f} s (--set job-timeout)"
            process.send_signal(signal.SIGINT)
            deadline = monotonic() + STOP_S
        elif why is not None and monotonic() > deadline:
            process.kill()


def _read_outcome(task: Task, scratch: Path, returncode: int, ended: str | None) -> TaskOutcome:
    path = scratch / "outcome.json"
    if path.is_file():
        with suppress(BadInputError):
            return read_record(path, TaskOutcome)
    if ended is not None:
        return TaskOutcome(mark_all(task, JobState.FAILED, ended))
    return TaskOutcome(mark_all(task, JobState.FAILED, explain_crash(returncode, scratch / "log")), crashed=True)
