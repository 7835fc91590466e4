"""What a node of a Ray cluster does with a task that the driver sends: it measures as one host does, and hands back records and runs."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Any

from optpipe.core.errors import OptpipeError, StageError
from optpipe.core.records import json_from_record, record_from_json
from optpipe.sweep.job import JobRecord, JobState
from optpipe.sweep.local import Setting, make_record, try_task
from optpipe.sweep.matrix import choose_device_of_kind
from optpipe.sweep.neighbors import name_neighborhood
from optpipe.sweep.ray_cluster import FINGERPRINT, LABEL
from optpipe.sweep.slots import Slot, count_neighbors, list_slots
from optpipe.sweep.task import Task, TaskOutcome, mark_all, tell_on_one_line
from optpipe.sweep.transport import get_chunk, list_all, pack, put_chunks, unpack
from optpipe.workspace.store import Store

BEGUN = b"begun"
"""What a node says first."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What a node is told."""

    task: Task
    kind: str
    setting: Setting
    shared: str | None
    """A workspace that driver and nodes see under one path; otherwise what is needed travels."""
    bucket: str | None = None
    """A folder that fsspec opens (`s3://…`, `gs://…`), through which chunks travel in place of the object store."""
    fingerprints: tuple[str, ...] = ()
    """Environments that nodes of the kind have by their labels."""
    disturbed: tuple[str, ...] = ()
    """Hosts whose GPUs have to time one after the other."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node says of a task before the parcels of what it made."""

    outcome: TaskOutcome
    attempts: tuple[str, ...]
    records: tuple[JobRecord, ...]
    clock_s: float
    """By the node's clock, in Unix seconds."""


def run_errand(content: bytes, parcels: Sequence[Any], fetch: Callable[[Any], bytes]) -> Iterator[bytes]:
    """On the node: says that it has begun, does the task, and yields its records, then what it made."""
    errand = record_from_json(content, Errand, "the driver")
    yield BEGUN
    with suppress(PermissionError):  # Ray starts workers at nice 15, and their children would be measured at it
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with tempfile.TemporaryDirectory(prefix="optpipe-node-") as folder:
        workspace = Path(errand.shared or folder)
        store = Store(workspace)
        try:
            slot = _find_slot(errand.kind, errand.fingerprints)
            unpack((fetch(each) for each in parcels), store)
        except OptpipeError as error:
            lost = TaskOutcome(mark_all(errand.task, JobState.FAILED, tell_on_one_line(error)))
            yield json_from_record(Reply(lost, (), (), time()))
            return
        task = replace(errand.task, workspace=str(workspace))
        serialized = name_neighborhood(slot) in errand.disturbed
        setting = replace(errand.setting, workspace=workspace, serialized=serialized)
        outcome, attempts = try_task(task, slot, setting, threading.Event())
        beside = 1 if serialized else count_neighbors(slot)
        records = tuple(
            make_record(cell, slot, outcome, found, attempts, len(task.cells), beside)
            for cell, found in zip(task.cells, outcome.cells, strict=False)
        )
        yield json_from_record(Reply(outcome, attempts, records, time()))
        if errand.shared is None:
            chunks = pack(workspace, list_all(workspace) if not task.timing else _list_runs(outcome))
            yield from (
                chunks if errand.bucket is None else (name.encode() for name in put_chunks(errand.bucket, chunks))
            )


def _list_runs(outcome: TaskOutcome) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"runs/{one.run}" for one in outcome.cells if one.run))


def _find_slot(kind: str, fingerprints: Sequence[str]) -> Slot:
    """The slot that Ray gave this worker. Raises StageError where the node is not what its labels say."""
    slots = list_slots()
    whole = next(slot for slot in slots if slot.gpu is None)
    found = replace(whole, kind=kind) if choose_device_of_kind(kind) == "cpu" else slots[0]
    if found.kind != kind:
        raise StageError(f"the node's label {LABEL} says {kind}, but it has {found.kind}; start it with its own labels")
    if found.fingerprint not in fingerprints:
        raise StageError(
            f"the node's environment is not what its label {FINGERPRINT} says (driver, power limit or versions differ); "
            "start it again with its own labels"
        )
    return found


def make_remote(*, gpu: bool, streaming: bool) -> Any:
    """The Ray task, `(errand, parcels, bell, name)`. Resources and max_calls have to stand here: a task whose worker is used again
    would keep a CUDA context. Not `streaming`, which Ray Client cannot, it hands back a list, and rings the bell as it begins.
    """
    import ray

    def stream(content: bytes, parcels: list[Any], _bell: Any, _name: str) -> Iterator[bytes]:
        yield from run_errand(
            content, parcels, lambda each: get_chunk(each) if isinstance(each, str) else ray.get(each)
        )

    def gather(content: bytes, parcels: list[Any], bell: Any, name: str) -> list[bytes]:
        ray.get(bell.ring.remote(name))
        return list(stream(content, parcels, bell, name))

    task = stream if streaming else gather
    if gpu:
        return ray.remote(num_gpus=1, num_cpus=1, max_calls=1, max_retries=0)(task)
    return ray.remote(num_cpus=1, max_calls=1, max_retries=0)(task)


def make_bell() -> Any:
    """A Ray actor that knows which tasks have begun."""
    import ray

    class Bell:
        def __init__(self) -> None:
            self.rung: set[str] = set()

        def ring(self, name: str) -> None:
            self.rung.add(name)

        def list_rung(self) -> set[str]:
            return self.rung

    return ray.remote(num_cpus=0)(Bell).remote()
