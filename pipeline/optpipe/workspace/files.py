"""Files of the workspace: written whole or not at all, read with errors that a user understands, and compared by hash."""

import errno
import io
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.files import Files, hash_file

if TYPE_CHECKING:
    import polars as pl


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


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path` so that a reader sees the whole of it or nothing. NaN is refused."""
    write_bytes(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def write_parquet(path: Path, frame: "pl.DataFrame") -> None:
    """Writes `frame` likewise; polars' own writing leaves half a file and an error of its own where the disk is full."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file as it was when it was stored."""

    sha256: str
    size_bytes: int


def list_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, Path]:
    """The regular files below `folder` by POSIX path relative to it, in its order, but those named in `leave_out`."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: found[name] for name in sorted(found) if name not in leave_out and not found[name].is_symlink()}


def hash_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, FileHash]:
    return {
        name: FileHash(hash_file(path), path.stat().st_size) for name, path in list_files(folder, leave_out).items()
    }


def find_changed_files(files: Files, hashes: Mapping[str, str]) -> list[str]:
    """`NAME: missing` or `NAME: changed` for every file whose SHA-256 is not as `hashes` has it; names that lead out too."""
    found = []
    for name, sha256 in hashes.items():
        try:
            if not files.has(name):
                found.append(f"{name}: missing")
            elif files.hash(name) != sha256:
                found.append(f"{name}: changed")
        except BadInputError as error:
            found.append(str(error))
    return found


def find_problems(files: Files, hashes: Mapping[str, str], list_name: str, leave_out: Collection[str]) -> list[str]:
    """What `find_changed_files` finds, and `NAME: not in LIST` for every file that is not listed; sorted."""
    unlisted = [f"{name}: not in {list_name}" for name in list_files(files.folder, leave_out) if name not in hashes]
    return sorted(find_changed_files(files, hashes) + unlisted)


def measure_folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
