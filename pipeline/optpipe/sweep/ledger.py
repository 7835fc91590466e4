"""The records of jobs in a workspace: `runs/job-KEY-HASH/`, named by content, so that a union of two workspaces loses nothing."""

import hashlib
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener
from optpipe.core.files import Files, hash_value
from optpipe.core.records import plain_from_record
from optpipe.sweep.job import JobRecord, JobState
from optpipe.sweep.slots import POLL_S
from optpipe.workspace.entry import MANIFEST, NOT_LISTED, Entry, entry_from_folder, get_utc_time, read_manifest
from optpipe.workspace.files import find_problems, write_bytes
from optpipe.workspace.locks import hold_lock, open_lock, try_lock
from optpipe.workspace.runs import REMOVED, RUNS, list_records, write_record
from optpipe.workspace.store import LOCKS, Store

_HASH_LENGTH = 24
_RANK = {state: rank for rank, state in enumerate(JobState)}


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


def list_conflicts(jobs: Mapping[str, Sequence[JobRecord]]) -> Iterator[str]:
    """Where records of one key disagree: a verdict each, and not the same one. A crash before a result is no conflict."""
    for key, records in jobs.items():
        told = [one for one in records if one.state in (JobState.DONE, JobState.INVALID)]
        if len({one.state for one in told}) > 1:
            found = ", ".join(f"{one.state} in {one.run}" if one.run else one.state for one in told)
            yield f"job {key} ({records[0].cell.label}) has different results: {found}"


@contextmanager
def claim_job(workspace: Path, key: str, wait: threading.Event | None = None) -> Iterator[bool]:
    """Whether the job is this process's to run while the block runs: two sweeps of one workspace never run it at once.

    Where another has it, it is waited for until `wait` is set.
    """
    with open_lock(workspace / LOCKS / f"job-{key}") as file:
        while not (mine := try_lock(file)) and wait is not None and not wait.wait(POLL_S):
            pass
        yield mine


CONFLICTS = "conflicts"
FOLDERS = ("store", RUNS, REMOVED)
"""What holds folders with a manifest."""
_CONTENT_LENGTH = 12


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """The JSON document of `optpipe store merge`."""

    sources: tuple[str, ...]
    added: int
    """Entries that were copied."""
    present: int
    """Those that the workspace had already."""
    conflicts: tuple[str, ...]
    damaged: tuple[str, ...]
    """What was not copied because its bytes are not as its manifest says."""
    warnings: tuple[str, ...] = ()

    @property
    def status(self) -> ExitStatus:
        """STAGE_FAILED where something was damaged, FAIL for a conflict."""
        return ExitStatus.STAGE_FAILED if self.damaged else ExitStatus.FAIL if self.conflicts else ExitStatus.DONE


@dataclass(frozen=True, slots=True)
class _Variant:
    """A folder with a manifest: what has one name and one content."""

    name: str
    """`store/artifact-ID` or `runs/RUN`."""
    path: Path
    digest: str
    """Of the content."""
    order: tuple[str, str]
    """The older first."""
    files: dict[str, str]

    def find_problem(self, path: Path | None = None) -> str | None:
        """The first file that is not as the manifest says."""
        return next(iter(find_problems(Files(path or self.path), self.files, "the manifest", NOT_LISTED)), None)


def merge_workspaces(sources: Sequence[Path], store: Store, listener: Listener) -> MergeRecord:
    """Copies what is missing. Raises BadInputError for a source that is no workspace, before anything is copied."""
    for source in sources:
        if not any((source / folder).is_dir() for folder in FOLDERS):
            raise BadInputError(f"{source} is not a workspace: it has no store or runs")
        if source.resolve() == store.workspace.resolve():
            raise BadInputError(f"{source} is the workspace itself; choose another --workspace")
    store.require_writable()
    counts = [0, 0]
    damaged: list[str] = []
    with store.exclusive():
        for source in sources:
            with listener.step(f"merge {source}"):
                damaged += take_in(source, store, counts)
    conflicts = [*_list_variants_apart(store.workspace), *list_conflicts(read_jobs(store.workspace))]
    return MergeRecord(tuple(map(str, sources)), counts[0], counts[1], tuple(conflicts), tuple(damaged))


def take_in(source: Path, store: Store, counts: list[int]) -> list[str]:
    """Copies what is missing, one process at a time; returns what was damaged. `counts` are those of added and present."""
    with hold_lock(store.lock_path("merge")):
        return list(_merge_folders(source, store, counts))


def _merge_folders(source: Path, store: Store, counts: list[int]) -> Iterator[str]:
    have = _collect(store.workspace)
    for theirs in _list_variants(source):
        mine = have.get(theirs.name, {}).get(theirs.digest)
        if mine is not None:
            counts[1] += 1
            if theirs.order < mine.order:  # the same content, made earlier
                write_bytes(mine.path / MANIFEST, (theirs.path / MANIFEST).read_bytes())
            continue
        if (problem := theirs.find_problem() or _find_job_problem(theirs)) is not None:
            yield f"{theirs.path}: {problem}"
            continue
        place = _place_aside(store.workspace, theirs)
        with store.scratch("merge") as scratch:
            shutil.copytree(theirs.path, scratch / "copy")
            if (problem := theirs.find_problem(scratch / "copy")) is not None:
                yield f"{theirs.path}: {problem} after it was copied"
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            (scratch / "copy").rename(place)
        counts[0] += 1
    _name_oldest(store.workspace)


def _find_job_problem(variant: _Variant) -> str | None:
    if not variant.path.name.startswith(f"{JobRecord.KIND}-"):
        return None
    try:
        record_from_entry(entry_from_folder(variant.path, JobRecord))
    except BadInputError as error:
        return str(error)
    return None


def _place_aside(workspace: Path, variant: _Variant) -> Path:
    return workspace / CONFLICTS / variant.name.partition("/")[0] / f"{Path(variant.name).name}@{variant.digest}"


def _name_oldest(workspace: Path) -> None:
    """Gives each name to the oldest content that has it; the others keep their place aside."""
    for name, variants in _collect(workspace).items():
        oldest = min(variants.values(), key=lambda one: one.order)
        if oldest.path == workspace / name:
            continue
        if (workspace / name).exists():
            holder = next((one for one in variants.values() if one.path == workspace / name), None)
            aside = workspace / CONFLICTS / name if holder is None else _place_aside(workspace, holder)
            aside.parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).rename(aside)
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        oldest.path.rename(workspace / name)


def _collect(workspace: Path) -> dict[str, dict[str, _Variant]]:
    """What has each name, by content."""
    found: dict[str, dict[str, _Variant]] = {}
    for variant in _list_variants(workspace):
        found.setdefault(variant.name, {})[variant.digest] = variant
    return found


def _list_variants(workspace: Path) -> Iterator[_Variant]:
    """Every finished entry and run with its content's hash; what was cut off is left out."""
    for folder in FOLDERS:
        for root in (workspace / folder, workspace / CONFLICTS / folder):
            for path in sorted(root.glob("*/")):
                if (path / MANIFEST).is_file() and (found := _read_variant(folder, path)) is not None:
                    yield found


def _read_variant(folder: str, path: Path) -> _Variant | None:
    try:
        read = read_manifest(Files(path))
    except BadInputError:  # `optpipe store gc` finds it
        return None
    files = {name: file.sha256 for name, file in read.files.items()}
    manifest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    content = files if read.recipe is not None else [files, read.info, read.status]
    name = f"{folder}/{path.name.partition('@')[0]}"
    return _Variant(name, path, hash_value(content)[:_CONTENT_LENGTH], (read.started_utc, manifest), files)


def _list_variants_apart(workspace: Path) -> Iterator[str]:
    for name, variants in sorted(_collect(workspace).items()):
        if len(variants) > 1:
            others = sorted(one.path.name for one in variants.values() if one.path != workspace / name)
            yield f"{name} has {len(variants)} versions; the oldest keeps the name, conflicts/ has {', '.join(others)}"
