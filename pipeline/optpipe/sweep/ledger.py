"""The records of jobs in a workspace: `runs/job-KEY-HASH/`, named by content, so that workspaces merge without loss."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.files import Files, hash_value
from optpipe.core.records import group_pairs, plain_from_record
from optpipe.core.wording import Argument
from optpipe.sweep.job import JobRecord, JobState
from optpipe.workspace.entry import (
    MANIFEST,
    NOT_LISTED,
    Entry,
    entry_from_folder,
    finish_entry,
    get_utc_time,
    read_manifest,
)
from optpipe.workspace.files import find_problems, hold_lock, open_lock, try_lock
from optpipe.workspace.remote import RemoteWorkspace, is_url, open_remote
from optpipe.workspace.runs import REMOVED, RUNS
from optpipe.workspace.store import LOCKS, Store

_HASH_LENGTH = 24
_RANK = {state: rank for rank, state in enumerate(JobState)}


def write_job(workspace: Path, record: JobRecord) -> Path:
    """Adds a record; returns its folder. Raises StageError if it cannot be written."""
    return finish_entry(
        workspace / RUNS / f"{JobRecord.KIND}-{_compute_id(record)}",
        JobRecord.KIND,
        _compute_id(record),
        replace(record, environment=Environment()),  # the manifest has it
        record.started_utc or get_utc_time(),
        parents=[entry for entry in (record.artifact, record.run) if entry is not None],
        environment=record.environment,
    ).path


def _compute_id(record: JobRecord) -> str:
    return f"{record.key}-{hash_value(plain_from_record(record))[:_HASH_LENGTH]}"


def read_jobs(workspace: Path) -> dict[str, list[JobRecord]]:
    """All records by key, the most informative first. Raises BadInputError if one is damaged."""
    jobs = group_pairs((record.key, record) for record in _read_records(workspace, ""))
    return {key: sort_records(records) for key, records in jobs.items()}


def keep_backed(
    workspace: Path, jobs: Mapping[str, Sequence[JobRecord]]
) -> dict[str, list[JobRecord]]:
    """The records without those whose run was removed (`optpipe store rm`): their figures can no longer be recomputed."""
    runs = workspace / RUNS
    backed = {
        key: [job for job in records if job.run is None or (runs / job.run / MANIFEST).is_file()]
        for key, records in jobs.items()
    }
    return {key: records for key, records in backed.items() if records}


def _read_records(workspace: Path, prefix: str) -> Iterator[JobRecord]:
    try:
        for path in sorted((workspace / RUNS).glob(f"{JobRecord.KIND}-{prefix}*/")):
            if (path / MANIFEST).is_file():
                yield record_from_entry(entry_from_folder(path, JobRecord))
    except BadInputError as error:
        raise BadInputError(
            error.message, remedy="delete the folder; the next sweep runs its job again"
        ) from error


def record_from_entry(entry: Entry[JobRecord]) -> JobRecord:
    """Raises BadInputError if the content does not match the hash in the entry's name."""
    record = replace(entry.info, environment=entry.manifest.environment)
    # another version has other fields
    written = {**entry.manifest.info, "environment": plain_from_record(record.environment)}
    if entry.path.name != f"{JobRecord.KIND}-{record.key}-{hash_value(written)[:_HASH_LENGTH]}":
        raise BadInputError(f"{entry.path} was changed: its content has another hash than its name")
    return record


def read_job(workspace: Path, key: str) -> JobRecord | None:
    records = sort_records(_read_records(workspace, f"{key}-"))
    return records[0] if records else None


def sort_records(records: Iterable[JobRecord]) -> list[JobRecord]:
    """The most informative state first, then the oldest."""
    return sorted(
        records, key=lambda job: (_RANK[job.state], job.started_utc, job.run or "", job.reason)
    )


def list_conflicts(jobs: Mapping[str, Sequence[JobRecord]]) -> Iterator[str]:
    """Keys whose records are DONE and INVALID. A crash before a result is not a conflict."""
    for key, records in jobs.items():
        told = [job for job in records if job.state in (JobState.DONE, JobState.INVALID)]
        if len({job.state for job in told}) > 1:
            results = ", ".join(
                f"{job.state} in {job.run}" if job.run else job.state for job in told
            )
            yield f"job {key} ({records[0].cell.label}) has different results: {results}"


@contextmanager
def claim_job(workspace: Path, key: str) -> Iterator[bool]:
    """Yields whether this process may run the job: two sweeps of one workspace never run it at once."""
    with open_lock(workspace / LOCKS / f"job-{key}") as file:
        yield try_lock(file)


FOLDERS = ("store", RUNS, REMOVED)


@dataclass(frozen=True, slots=True)
class MergeRecord:
    sources: tuple[str, ...]
    added: int
    present: int
    conflicts: tuple[str, ...]
    damaged: tuple[str, ...]
    """Entries that were not copied because their bytes do not match their manifests."""
    warnings: tuple[str, ...] = ()

    @property
    def status(self) -> ExitStatus:
        return (
            ExitStatus.STAGE_FAILED
            if self.damaged
            else ExitStatus.FAIL
            if self.conflicts
            else ExitStatus.DONE
        )


def merge_workspaces(
    sources: Sequence[str | Path], store: Store, listener: Listener
) -> MergeRecord:
    """Copies missing entries from folders and object stores (`s3://…`).

    Raises BadInputError for a source that is not a workspace, before anything is copied; StageError for an object store that
    fails later, where the entries that were whole by then are kept.
    """
    opened = [_open_source(source, store) for source in sources]
    store.require_writable()
    store.root.mkdir(parents=True, exist_ok=True)  # a workspace, also of empty ones
    merged: dict[str, list[str]] = {"added": [], "present": [], "conflicts": [], "damaged": []}
    with store.exclusive():
        for given, (source, names) in zip(sources, opened, strict=True):
            with listener.step(
                f"merge {given}", total=None if names is None else len(names)
            ) as step:
                parts = (
                    _take_in_remote(source, names or (), store, step)
                    if isinstance(source, RemoteWorkspace)
                    else [take_in(source, store, trusted=False)]
                )
                for name, lines in (pair for part in parts for pair in part.items()):
                    merged[name] += lines
    for text in list_conflicts(read_jobs(store.workspace)):
        listener.warn(f"{text}; the done one counts")
    conflicts, damaged = tuple(merged["conflicts"]), tuple(merged["damaged"])
    return MergeRecord(
        tuple(map(str, sources)), len(merged["added"]), len(merged["present"]), conflicts, damaged
    )


def _open_source(
    source: str | Path, store: Store
) -> tuple[Path | RemoteWorkspace, list[str] | None]:
    """The source, and the entries of one in an object store. Raises BadInputError if it is not a workspace."""
    if is_url(str(source)):
        remote = open_remote(str(source))
        if not (names := remote.list_entries(FOLDERS)):
            raise BadInputError(f"{remote.url} is not a workspace: it has no finished entry or run")
        return remote, names
    folder = Path(source)
    if not any((folder / name).is_dir() for name in FOLDERS):
        raise BadInputError(f"{folder} is not a workspace: it has no store or runs")
    if folder.resolve() == store.workspace.resolve():
        raise BadInputError(
            f"{folder} is the workspace itself; choose another " + Argument("workspace")
        )
    return folder, None


def _take_in_remote(
    source: RemoteWorkspace, names: Sequence[str], store: Store, step: ProgressStep
) -> Iterator[dict[str, list[str]]]:
    """Entry by entry, so that an interrupted merge keeps those that it had whole. Of a present one only the manifest travels."""
    for name in names:
        with store.scratch("merge") as scratch:
            source.fetch_manifest(name, scratch / name)
            problem = None
            if not (store.workspace / name).exists() and _read_content(scratch / name) is not None:
                problem = source.fetch_files(name, scratch / name)
            taken = (
                {"damaged": [f"{scratch / name}: {problem}"]}
                if problem
                else take_in(scratch, store, trusted=False)
            )
        yield {
            kind: [line.replace(str(scratch), source.url) for line in lines]
            for kind, lines in taken.items()
        }
        step.advance(1)


def push_workspace(store: Store, target: RemoteWorkspace, listener: Listener) -> int:
    """Copies the finished entries and runs that `target` does not have yet; returns their number. Raises StageError."""
    paths = sorted(
        path
        for folder in FOLDERS
        for path in (store.workspace / folder).glob("*/")
        if (path / MANIFEST).is_file()
    )
    pushed = 0
    with listener.step(f"copy to {target.url}", total=len(paths)) as step:
        for path in paths:
            name = path.relative_to(store.workspace).as_posix()
            if not target.holds(name):
                target.put_entry(name, path)
                pushed += 1
            step.advance(1)
    return pushed


def take_in(source: Path, store: Store, *, trusted: bool = True) -> dict[str, list[str]]:
    """Copies each missing finished entry and run. Returns lines under `added`, `present`, `conflicts` and `damaged`.

    The workspace's entry wins a conflict. Code of an entry that is not `trusted` does not run until it is approved.
    """
    taken: dict[str, list[str]] = {"added": [], "present": [], "conflicts": [], "damaged": []}
    with hold_lock(store.lock_path("merge")):
        for path in sorted(path for folder in FOLDERS for path in (source / folder).glob("*/")):
            if (theirs := _read_content(path)) is None:
                continue
            name = path.relative_to(source)
            here = store.workspace / name
            if not here.exists():
                problem = _copy_whole(path, here, store, trusted=trusted)
                taken["damaged" if problem else "added"].append(f"{path}: {problem}")
            elif _read_content(here) == theirs:
                taken["present"].append(str(name))
            else:
                taken["conflicts"].append(
                    f"{path} differs from {name} of the workspace, which is kept"
                )
    return taken


def _read_content(path: Path) -> object:
    """An entry's or run's content without time and place of its making; None if it is incomplete or damaged."""
    try:
        read = read_manifest(Files(path)) if (path / MANIFEST).is_file() else None
    except BadInputError:  # `optpipe store gc` finds it
        return None
    files = {name: file.sha256 for name, file in read.files.items()} if read is not None else {}
    return read and (files if read.recipe is not None else [files, read.info, read.status])


def _copy_whole(path: Path, target: Path, store: Store, *, trusted: bool) -> str | None:
    """Copies the folder and checks its hashes before and after. Returns the first difference from its manifest."""
    manifest = read_manifest(Files(path))
    files = {name: file.sha256 for name, file in manifest.files.items()}
    with store.scratch("merge") as scratch:
        if link := next((file for file in path.rglob("*") if file.is_symlink()), None):
            return f"{link.relative_to(path)}: a symbolic link"
        for folder in (path, scratch / "copy"):
            if folder != path:
                shutil.copytree(path, folder, symlinks=True)
            if problem := next(
                iter(find_problems(Files(folder), files, "the manifest", NOT_LISTED)), None
            ):
                return problem
        if path.name.startswith(f"{JobRecord.KIND}-"):
            try:
                record_from_entry(entry_from_folder(path, JobRecord))
            except BadInputError as error:
                return str(error)
        target.parent.mkdir(parents=True, exist_ok=True)
        (scratch / "copy").rename(target)
    if trusted and manifest.recipe is not None:
        store.approve(entry_from_folder(target))
    return None
