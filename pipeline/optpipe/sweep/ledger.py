"""The records of jobs in a workspace: `jobs/KEY/HASH.json`, named by content, so that a union of two workspaces loses nothing."""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, read_versioned
from optpipe.sweep.job import JobRecord, JobState
from optpipe.sweep.locks import POLL_S
from optpipe.workspace.entry import MANIFEST
from optpipe.workspace.files import write_bytes
from optpipe.workspace.locks import open_lock, try_lock
from optpipe.workspace.store import LOCKS

JOBS = "jobs"
_NAME_LENGTH = 24
_RANK = {state: rank for rank, state in enumerate(JobState)}


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two records of one job that say different things."""

    key: str
    label: str
    states: tuple[str, ...]
    runs: tuple[str, ...]

    def __str__(self) -> str:
        named = zip(self.states, self.runs, strict=True)
        found = ", ".join(f"{state} in {run}" if run else state for state, run in named)
        return f"job {self.key} ({self.label}) has different results: {found}"


def write_job(workspace: Path, record: JobRecord) -> Path:
    """Adds a record. Raises StageError where it cannot be written."""
    content = json_from_record(record)
    path = workspace / JOBS / record.key / f"{hashlib.sha256(content).hexdigest()[:_NAME_LENGTH]}.json"
    write_bytes(path, content)
    return path


def read_jobs(workspace: Path) -> dict[str, list[JobRecord]]:
    """All records by key, the one that counts first. Raises BadInputError where one is damaged."""
    found: dict[str, list[JobRecord]] = {}
    for path in sorted((workspace / JOBS).glob("*/*.json")):
        record = _read_job(path)
        found.setdefault(record.key, []).append(record)
    return {key: sort_records(records) for key, records in found.items()}


def keep_backed(workspace: Path, jobs: Mapping[str, Sequence[JobRecord]]) -> dict[str, list[JobRecord]]:
    """The records without those whose run was removed (`optpipe store rm`): their figures can no longer be recomputed."""
    present = {path.parent.name for path in (workspace / "runs").glob(f"*/{MANIFEST}")}
    found = {key: [one for one in records if one.run is None or one.run in present] for key, records in jobs.items()}
    return {key: records for key, records in found.items() if records}


def is_as_written(path: Path, content: bytes) -> bool:
    """Whether a record's file has the content that its name says."""
    return hashlib.sha256(content).hexdigest()[:_NAME_LENGTH] == path.stem


def _read_job(path: Path) -> JobRecord:
    way_out = "delete the file; the next sweep runs its job again"
    try:
        record = read_versioned(Files(path.parent), path.name, JobRecord)
    except BadInputError as error:
        raise BadInputError(f"{error}\n{way_out}") from error
    if not is_as_written(path, path.read_bytes()):
        raise BadInputError(f"{path} was changed: its content has another hash than its name\n{way_out}")
    return record


def read_job(workspace: Path, key: str) -> JobRecord | None:
    """The record of one job that counts; None where there is none."""
    found = [_read_job(path) for path in sorted((workspace / JOBS / key).glob("*.json"))]
    return sort_records(found)[0] if found else None


def sort_records(records: Iterable[JobRecord]) -> list[JobRecord]:
    """The record that counts first: the most telling state, then the oldest. The order depends on the records alone."""
    return sorted(records, key=lambda one: (_RANK[one.state], one.started_utc, one.run or "", one.reason))


def find_conflicts(records: Sequence[JobRecord]) -> Conflict | None:
    """Whether records of one key disagree: a verdict each, and not the same one. A crash before a result is no conflict."""
    told = [one for one in records if one.state in (JobState.DONE, JobState.INVALID)]
    if len({one.state for one in told}) < 2:
        return None
    states = tuple(str(one.state) for one in told)
    return Conflict(records[0].key, records[0].cell.label, states, tuple(one.run or "" for one in told))


@contextmanager
def claim_job(workspace: Path, key: str, wait: threading.Event | None = None) -> Iterator[bool]:
    """Whether the job is this process's to run while the block runs: two sweeps of one workspace never run it at once.

    Where another has it, it is waited for until `wait` is set.
    """
    with open_lock(workspace / LOCKS / f"job-{key}") as file:
        while not (mine := try_lock(file)) and wait is not None and not wait.wait(POLL_S):
            pass
        yield mine
