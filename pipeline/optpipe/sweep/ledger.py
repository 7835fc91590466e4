"""The records of jobs in a workspace: `runs/job-KEY-HASH/`, named by content, so that a union of two workspaces loses nothing."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_value
from optpipe.core.records import plain_from_record
from optpipe.sweep.job import JobRecord, JobState
from optpipe.sweep.locks import POLL_S
from optpipe.workspace.entry import MANIFEST, Entry, get_utc_time
from optpipe.workspace.locks import open_lock, try_lock
from optpipe.workspace.runs import RUNS, list_records, write_record
from optpipe.workspace.store import LOCKS

_HASH_LENGTH = 24
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
    """Adds a record; returns its folder. Raises StageError where it cannot be written."""
    stated = replace(record, environment=Environment())  # the manifest has it
    parents = [each for each in (record.artifact, record.run) if each is not None]
    ident, started = _compute_id(record), record.started_utc or get_utc_time()
    return write_record(workspace, stated, ident, started, parents=parents, environment=record.environment).path


def _compute_id(record: JobRecord) -> str:
    return f"{record.key}-{hash_value(plain_from_record(record))[:_HASH_LENGTH]}"


def read_jobs(workspace: Path) -> dict[str, list[JobRecord]]:
    """All records by key, the one that counts first. Raises BadInputError where one is damaged."""
    found: dict[str, list[JobRecord]] = {}
    for record in _read_records(workspace, ""):
        found.setdefault(record.key, []).append(record)
    return {key: sort_records(records) for key, records in found.items()}


def keep_backed(workspace: Path, jobs: Mapping[str, Sequence[JobRecord]]) -> dict[str, list[JobRecord]]:
    """The records without those whose run was removed (`optpipe store rm`): their figures can no longer be recomputed."""
    runs = workspace / RUNS
    found = {
        key: [one for one in records if one.run is None or (runs / one.run / MANIFEST).is_file()]
        for key, records in jobs.items()
    }
    return {key: records for key, records in found.items() if records}


def _read_records(workspace: Path, prefix: str) -> Iterator[JobRecord]:
    try:
        yield from map(record_from_entry, list_records(workspace, JobRecord, prefix))
    except BadInputError as error:
        raise BadInputError(f"{error}\ndelete the folder; the next sweep runs its job again") from error


def record_from_entry(entry: Entry[JobRecord]) -> JobRecord:
    """The record in a job's entry. Raises BadInputError where its content is not what its name says."""
    record = replace(entry.info, environment=entry.manifest.environment)
    if entry.path.name != f"{JobRecord.KIND}-{_compute_id(record)}":
        raise BadInputError(f"{entry.path} was changed: its content has another hash than its name")
    return record


def read_job(workspace: Path, key: str) -> JobRecord | None:
    """The record of one job that counts; None where there is none."""
    found = sort_records(_read_records(workspace, f"{key}-"))
    return found[0] if found else None


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
