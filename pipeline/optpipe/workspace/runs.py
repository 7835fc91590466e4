"""Runs in `runs/KIND-TIME-HEX/`.

HEX is the microsecond, so that names sort by time, and a random byte. A run is written in place and is finished once it
has a manifest. A folder without a manifest was cut off, or is being written, and is never listed. A removed run leaves
its manifest, without its files, in `removed/`, so that a sign-off can report it.
"""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from optpipe import __version__
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.measurement import MEASUREMENTS_FILE, read_measurements
from optpipe.core.wording import Call
from optpipe.workspace.commit import describe_commit
from optpipe.workspace.entry import MANIFEST, Run, RunInfo, RunKind, Status, finish_entry, load_run
from optpipe.workspace.places import explain_os_errors

RUNS = "runs"
REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run being written: put files into `path`, then call `finish_run`."""

    path: Path
    kind: RunKind
    started_utc: str

    @property
    def name(self) -> str:
        return self.path.name


def begin_run(workspace: Path, kind: RunKind) -> OpenRun:
    """Creates an empty run folder. Raises BadInputError if the workspace cannot be written, StageError if the disk is full."""
    now = datetime.now(UTC)
    path = (
        workspace / RUNS / f"{kind}-{now:%Y%m%dT%H%M%S}-{now.microsecond:05x}{secrets.token_hex(1)}"
    )
    with explain_os_errors(workspace):
        path.mkdir(parents=True)
    return OpenRun(path, kind, now.isoformat(timespec="microseconds"))


@contextmanager
def open_run(workspace: Path, kind: RunKind) -> Iterator[OpenRun]:
    """Deletes the run's folder if the block does not finish it."""
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
    measurements: int | None = None,
    status: Status = "complete",
) -> Run:
    """Hashes every file and writes the manifest, which finishes the run. Raises StageError if it cannot.

    `command` defaults to the running one.
    """
    ident = run.name.removeprefix(f"{run.kind}-")
    files = Files(run.path)
    if files.has(MEASUREMENTS_FILE):
        measurements = len(read_measurements(files))
    info = RunInfo(model, trained, measurements, describe_commit(), __version__)
    return finish_entry(
        run.path,
        run.kind,
        ident,
        info,
        run.started_utc,
        parents=parents,
        command=command,
        status=status,
    )


def list_runs(workspace: Path, kind: RunKind | None = None) -> tuple[Run, ...]:
    """Finished runs, oldest first; of one `kind` if given."""
    runs = []
    for path in list_run_folders(workspace, kind):
        try:
            runs += [load_run(path)] if (path / MANIFEST).is_file() else []
        except BadInputError as error:
            raise BadInputError(
                error.message, remedy="delete the run with `" + Call("store rm", path.name) + "`"
            ) from error
    return tuple(sorted(runs, key=lambda run: run.manifest.started_utc))


def list_run_folders(workspace: Path, kind: RunKind | None = None) -> list[Path]:
    """Folders of all runs, finished or not, in the order in which they began."""
    kinds = get_args(RunKind) if kind is None else (kind,)
    folders = (path for kind in kinds for path in (workspace / RUNS).glob(f"{kind}-*/"))
    # names end with the time, to the microsecond
    return sorted(folders, key=lambda path: path.name.split("-")[-2:])


def newest_runs(runs: Sequence[Run], kind: RunKind) -> list[Run]:
    return sorted(
        (run for run in runs if run.kind == kind),
        key=lambda run: run.manifest.started_utc,
        reverse=True,
    )
