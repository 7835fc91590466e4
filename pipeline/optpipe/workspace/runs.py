"""Run folders: `<workspace>/runs/<kind>-<UTC yyyymmddThhmmss>-<6 hex>/`, finished when `manifest.json` lies in them.

Format history
    1  first version.

The manifest is written last and atomically, with the size and sha256 of every other file; a folder without one was cut
off and is never listed. A run that was stopped on purpose but kept is finished with status `interrupted`.

manifest.json: `schema`, `schema_version`, `run_id`, `kind`, `status` (complete, interrupted), `started_utc`,
`finished_utc`, `command` (reproduces the run), `environment`, `parents[]` (ids of artifacts and runs this one was made
from), `files[]{path, bytes, sha256}`, `details{}` (what the kind adds).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.errors import BadInputError

if TYPE_CHECKING:
    import polars as pl

import io
import os
import secrets
import shlex
import shutil
import tempfile
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from optpipe.core.hashing import hash_file
from optpipe.errors import StageError
from optpipe.workspace.environment import describe_environment

if TYPE_CHECKING:
    import polars as pl

RUN_SCHEMA = "optpipe.run"
RUN_SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
KINDS = ("bench", "profile", "preprocess", "end-to-end", "evaluate", "calibrate", "compare", "signoff")


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run being written: put files under `path`, then call `finish_run`."""

    path: Path
    kind: str
    started_utc: str

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return str(self.manifest["run_id"])

    @property
    def kind(self) -> str:
        """`bench`, `profile`, …"""
        return str(self.manifest["kind"])

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its end and kept."""
        return bool(self.manifest["status"] != "complete")


def begin_run(workspace: Path, kind: str) -> OpenRun:
    """Makes a new, empty run folder. Raises StageError where the workspace cannot be written."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of run {kind!r}")
    now = datetime.now(UTC)
    path = workspace / "runs" / f"{kind}-{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise StageError(f"cannot create {path}: {error.strerror}; choose another location with --workspace") from error
    return OpenRun(path, kind, now.isoformat(timespec="milliseconds"))


@contextmanager
def open_run(workspace: Path, kind: str) -> Iterator[OpenRun]:
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
    command: Sequence[str] | str,
    parents: Sequence[str] = (),
    details: Mapping[str, Any] | None = None,
    status: str = "complete",
) -> Run:
    """Hashes every file and writes the manifest: from here on the run exists. Raises StageError where it cannot."""
    manifest = {
        "schema": RUN_SCHEMA,
        "schema_version": RUN_SCHEMA_VERSION,
        "run_id": run.run_id,
        "kind": run.kind,
        "status": status,
        "started_utc": run.started_utc,
        "finished_utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": command if isinstance(command, str) else shlex.join(command),
        "environment": describe_environment(),
        "parents": list(parents),
        "files": [_entry(run.path, path) for path in _files(run.path)],
        "details": dict(details or {}),
    }
    write_json(run.path / MANIFEST, manifest)
    return Run(run.path, manifest)


def load_run(path: Path) -> Run:
    """The finished run in `path`. Raises BadInputError where it is missing, cut off, or of another schema version."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        problem = "is incomplete (no manifest.json)" if path.is_dir() else "does not exist"
        raise BadInputError(f"run {path} {problem}; `optpipe ls` lists stored runs") from error
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read {path / MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != RUN_SCHEMA:
        raise BadInputError(f"{path / MANIFEST} is not a run manifest")
    if manifest.get("schema_version") != RUN_SCHEMA_VERSION:
        raise BadInputError(
            f"{path} has schema version {manifest.get('schema_version')}; this version of optpipe reads version {RUN_SCHEMA_VERSION}"
        )
    if not _is_complete(manifest):
        raise BadInputError(f"{path / MANIFEST} is damaged")
    return Run(path, manifest)


def _is_complete(manifest: Mapping[str, Any]) -> bool:
    """Whether all that readers rely on is there and of its kind."""
    kinds = {"run_id": str, "kind": str, "status": str, "command": str, "environment": dict, "parents": list,
             "files": list, "details": dict}  # fmt: skip
    files = manifest.get("files")
    return all(isinstance(manifest.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(one, dict) and isinstance(one.get("path"), str) and {"bytes", "sha256"} <= set(one)
        for one in files or ()
    )


def list_runs(workspace: Path, kind: str | None = None) -> tuple[Run, ...]:
    """All finished runs, oldest first; of one `kind` if given. Cut-off folders are left out."""
    return tuple(_load_listed_run(path) for path in list_run_folders(workspace, kind) if (path / MANIFEST).is_file())


def _load_listed_run(path: Path) -> Run:
    try:
        return load_run(path)
    except BadInputError as error:
        raise BadInputError(f"{error}\ndelete the run with `optpipe rm {path.name}`") from error


def list_run_folders(workspace: Path, kind: str | None = None) -> list[Path]:
    """The folders of all runs, oldest first: finished, cut off, and being written."""
    return sorted((workspace / "runs").glob(f"{kind or '*'}-*-*/"), key=lambda path: path.name.split("-")[-2:])


def load_runs(folder: Path) -> tuple[Run, ...]:
    """The runs that lie in `folder`, all of which are finished, by name. Raises BadInputError where one is not."""
    return tuple(load_run(path) for path in sorted(folder.glob("*/")))


def find_changed_files(run: Run) -> tuple[str, ...]:
    """What no longer is as the manifest says: `PATH: changed | missing | not in the manifest`. Empty when intact."""
    stated = {entry["path"]: entry["sha256"] for entry in run.manifest["files"]}
    present = {path.relative_to(run.path).as_posix(): path for path in _files(run.path)}
    missing = [f"{name}: missing" for name in stated if name not in present]
    added = [f"{name}: not in the manifest" for name in present if name not in stated]
    differ = [
        f"{name}: changed" for name, path in present.items() if name in stated and hash_file(path) != stated[name]
    ]
    return tuple(sorted(missing + added + differ))


def read_run_json(run: Run, name: str) -> dict[str, Any]:
    """The JSON object in one of the run's files; BadInputError where there is none."""
    try:
        found = json.loads((run.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read {run.path / name}: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{run.path / name} is not a JSON object")
    return found


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
        raise StageError(
            f"cannot write {path}: {error.strerror}; free some disk space or choose another --workspace"
        ) from error


def _entry(root: Path, path: Path) -> dict[str, Any]:
    return {"path": path.relative_to(root).as_posix(), "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file() and path != root / MANIFEST)


def require_unchanged(run: Run, *, whole: bool = True) -> None:
    """Raises BadInputError, naming the first file of `run` that is not as its manifest says."""
    problems = [problem for problem in find_changed_files(run) if whole or not problem.endswith(": missing")]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise BadInputError(
            f"run {run.run_id} was modified: {problems[0]}{more}\n"
            f"remove it with `optpipe rm {run.run_id}` and measure again"
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
    return sorted(
        (run for run in runs if run.kind == kind), key=lambda run: str(run.manifest["started_utc"]), reverse=True
    )
