"""Run folders: `<workspace>/runs/<kind>-<UTC yyyymmddThhmmss>-<6 hex>/`, finished when `manifest.json` lies in them.

Format history
    1  first version.
    2  `files` by path, with `size_bytes`; `model` and `trained` in place of `details`.

The manifest is written last and atomically, with the size and sha256 of every other file; a folder without one was cut
off and is never listed. A run that was stopped on purpose but kept is finished with status `interrupted`.
"""

import errno
import io
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optpipe.core.environment import Environment
from optpipe.core.errors import BadInputError, StageError
from optpipe.core.files import Files
from optpipe.core.records import json_from_record, read_record, record_from_files
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.hashes import FileHash, find_problems, hash_files
from optpipe.workspace.manifest import get_command_line
from optpipe.workspace.places import explain_os_errors

if TYPE_CHECKING:
    import polars as pl

RUN_SCHEMA = "optpipe.run"
RUN_SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
RunKind = Literal[
    "bench", "profile", "preprocess", "end-to-end", "evaluate", "calibrate", "choose", "compare", "signoff"
]
RunStatus = Literal["complete", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunManifest:
    """The record of one finished run."""

    run_id: str
    kind: RunKind
    status: RunStatus
    started_utc: str
    finished_utc: str
    command: str
    """Reproduces the run."""
    environment: Environment
    parents: tuple[str, ...]
    """Ids of the artifacts and runs that this one was made from."""
    files: Mapping[str, FileHash]
    """By path in the run's folder."""
    model: str | None = None
    trained: bool | None = None
    """Whether the model's weights are trained, where accuracy was measured."""
    schema: str = RUN_SCHEMA
    schema_version: int = RUN_SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RemovedRun:
    """What is left of a run that was removed on request, so that a sign-off can say that it was there."""

    run_id: str
    kind: RunKind
    started_utc: str
    removed_utc: str
    parents: tuple[str, ...]


REMOVED = "removed"
"""Folder of the workspace with a record of each removed run."""


def note_removal(workspace: Path, run: RunManifest) -> None:
    """Records that the run is removed."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = RemovedRun(run.run_id, run.kind, run.started_utc, now, run.parents)
    write_bytes(workspace / REMOVED / f"{run.run_id}.json", json_from_record(record))


def list_removed_runs(workspace: Path, parent: str) -> tuple[RemovedRun, ...]:
    """The bench runs of the artifact `parent` that were removed, by name."""
    found = (read_record(path, RemovedRun) for path in sorted((workspace / REMOVED).glob("bench-*.json")))
    return tuple(one for one in found if parent in one.parents)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run being written: put files under `path`, then call `finish_run`."""

    path: Path
    kind: RunKind
    started_utc: str

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    files: Files
    manifest: RunManifest

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.files.folder

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.manifest.run_id

    @property
    def kind(self) -> RunKind:
        """`bench`, `profile`, …"""
        return self.manifest.kind

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its end and kept."""
        return self.manifest.status != "complete"

    def find_problems(self) -> list[str]:
        """What is no longer as the manifest says: `PATH: changed | missing | not in the manifest`. Empty when intact."""
        hashes = {name: file.sha256 for name, file in self.manifest.files.items()}
        return find_problems(self.files, hashes, "the manifest", (MANIFEST,))


def begin_run(workspace: Path, kind: RunKind) -> OpenRun:
    """Makes a new, empty run folder. Raises BadInputError where the workspace cannot be written, StageError where it is full."""
    now = datetime.now(UTC)
    path = workspace / "runs" / f"{kind}-{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    with explain_os_errors(workspace):
        path.mkdir(parents=True)
    return OpenRun(path, kind, now.isoformat(timespec="microseconds"))


@contextmanager
def open_run(workspace: Path, kind: RunKind) -> Iterator[OpenRun]:
    """A new run that is finished in the block, or leaves nothing behind."""
    run = begin_run(workspace, kind)
    try:
        yield run
    finally:
        if not (run.path / MANIFEST).is_file():
            shutil.rmtree(run.path, ignore_errors=True)


def finish_run(
    run: OpenRun,
    *,
    command: str | None = None,
    parents: Sequence[str] = (),
    model: str | None = None,
    trained: bool | None = None,
    status: RunStatus = "complete",
) -> Run:
    """Hashes every file and writes the manifest: from here on the run exists. Raises StageError where it cannot.

    `command` is the one that is running unless another is given.
    """
    manifest = RunManifest(
        run_id=run.run_id,
        kind=run.kind,
        status=status,
        started_utc=run.started_utc,
        finished_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=command or get_command_line(),
        environment=describe_environment(),
        parents=tuple(parents),
        files=hash_files(run.path, (MANIFEST,)),
        model=model,
        trained=trained,
    )
    write_bytes(run.path / MANIFEST, json_from_record(manifest))
    return Run(Files(run.path), manifest)


@dataclass(frozen=True, slots=True)
class _Version:
    schema: str
    schema_version: int


def load_run(path: Path) -> Run:
    """The finished run in `path`. Raises BadInputError as `run_from_files`."""
    return run_from_files(Files(path))


def run_from_files(files: Files) -> Run:
    """The finished run in a folder. Raises BadInputError where it is missing, cut off, or of another schema version."""
    path = files.folder
    if not files.has(MANIFEST):
        problem = "is incomplete (no manifest.json)" if path.is_dir() else "does not exist"
        raise BadInputError(f"run {path} {problem}; `optpipe store ls` lists stored runs")
    version = record_from_files(files, MANIFEST, _Version)
    if version.schema != RUN_SCHEMA:
        raise BadInputError(f"{path / MANIFEST} is not a run manifest")
    if version.schema_version != RUN_SCHEMA_VERSION:
        raise BadInputError(
            f"{path} has schema version {version.schema_version}; this version of optpipe reads version {RUN_SCHEMA_VERSION}"
        )
    return Run(files, record_from_files(files, MANIFEST, RunManifest))


def list_runs(workspace: Path, kind: str | None = None) -> tuple[Run, ...]:
    """All finished runs, oldest first; of one `kind` if given. Cut-off folders are left out."""
    finished = (path for path in list_run_folders(workspace, kind) if (path / MANIFEST).is_file())
    return tuple(sorted(map(_load_listed_run, finished), key=lambda run: run.manifest.started_utc))


def _load_listed_run(path: Path) -> Run:
    try:
        return load_run(path)
    except BadInputError as error:
        raise BadInputError(f"{error}\ndelete the run with `optpipe store rm {path.name}`") from error


def list_run_folders(workspace: Path, kind: str | None = None) -> list[Path]:
    """The folders of all runs, by the second in which they began: finished, cut off, and being written."""
    return sorted((workspace / "runs").glob(f"{kind or '*'}-*-*/"), key=lambda path: path.name.split("-")[-2:])


def load_runs(folder: Path) -> tuple[Run, ...]:
    """The runs that lie in `folder`, all of which are finished, by name. Raises BadInputError where one is not."""
    return tuple(load_run(path) for path in sorted(folder.glob("*/")))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path` so that a reader sees the whole of it or nothing. NaN is refused."""
    write_bytes(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def write_parquet(path: Path, frame: "pl.DataFrame") -> None:
    """Writes `frame` likewise; polars' own writing leaves half a file and an error of its own where the disk is full."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes the whole of `content` or nothing. Raises StageError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        free = "free disk space or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StageError(f"cannot write {path}: {error.strerror}; {free}choose another location") from error


def require_unchanged(run: Run, *, whole: bool = True) -> None:
    """Raises BadInputError, naming the first file of `run` that is not as its manifest says."""
    problems = [problem for problem in run.find_problems() if whole or not problem.endswith(": missing")]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise BadInputError(
            f"run {run.run_id} was modified: {problems[0]}{more}\n"
            f"remove it with `optpipe store rm {run.run_id}` and measure again"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; BadInputError where there is none."""
    try:
        found = json.loads(read_dossier_file(path))
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return found


def read_dossier_file(path: Path) -> bytes:
    """The bytes of a file that a dossier must have. Raises BadInputError where it has not."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}; the dossier is incomplete") from error


def newest_runs(runs: Sequence[Run], kind: str) -> list[Run]:
    """Those of `runs` that are of `kind`, the newest first."""
    return sorted((run for run in runs if run.kind == kind), key=lambda run: run.manifest.started_utc, reverse=True)
