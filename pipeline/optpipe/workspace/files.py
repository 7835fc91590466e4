"""Files of the workspace: written atomically, read with clear errors, compared by hash, and locked.

A lock is `flock` on a file, which the kernel releases however its holder ends.
"""

import errno
import fcntl
import io
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.files import Files, hash_file

if TYPE_CHECKING:
    import polars as pl


def write_bytes(path: Path, content: bytes) -> None:
    """Writes all of `content` or nothing. Raises StageError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(
            f".{secrets.token_hex(8)}"
        )  # `tempfile` makes files that only their owner can read
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        free = "free disk space or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StageError(
            f"cannot write {path}: {error.strerror}; {free}choose another location"
        ) from error


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """As `write_bytes`. NaN is refused."""
    write_bytes(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def write_parquet(path: Path, frame: "pl.DataFrame") -> None:
    """As `write_bytes`; polars' own writer leaves half a file, and an obscure error, on a full disk."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())


@dataclass(frozen=True, slots=True)
class FileHash:
    sha256: str
    size_bytes: int


def list_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, Path]:
    """Regular files below `folder`, by POSIX path relative to it, sorted, without those named in `leave_out`."""
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    return {
        name: paths[name]
        for name in sorted(paths)
        if name not in leave_out and not paths[name].is_symlink()
    }


def hash_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, FileHash]:
    return {
        name: FileHash(hash_file(path), path.stat().st_size)
        for name, path in list_files(folder, leave_out).items()
    }


def find_changed_files(files: Files, hashes: Mapping[str, str]) -> list[str]:
    """`NAME: missing` or `NAME: changed` for every file whose SHA-256 differs from `hashes`; also reports names outside the folder."""
    problems = []
    for name, sha256 in hashes.items():
        try:
            if not files.has(name):
                problems.append(f"{name}: missing")
            elif files.hash(name) != sha256:
                problems.append(f"{name}: changed")
        except BadInputError as error:
            problems.append(str(error))
    return problems


def find_problems(
    files: Files, hashes: Mapping[str, str], list_name: str, leave_out: Collection[str]
) -> list[str]:
    """Sorted result of `find_changed_files`, with `NAME: not in LIST` for unlisted files."""
    unlisted = [
        f"{name}: not in {list_name}"
        for name in list_files(files.folder, leave_out)
        if name not in hashes
    ]
    return sorted(find_changed_files(files, hashes) + unlisted)


def measure_folder_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`, none of them behind a symbolic link."""
    if folder.is_symlink():
        return 0
    below = folder.rglob("*") if folder.is_dir() else [folder]
    return sum(path.stat().st_size for path in below if path.is_file() and not path.is_symlink())


def delete_tree(path: Path) -> None:
    """Deletes a folder, a file or a link at `path`; what a link points to stays, also inside the folder."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Creates and locks the file `path` while the block runs; waits for another holder."""
    with open_lock(path) as file:
        lock(file)
        yield


def open_lock(path: Path) -> IO[str]:
    """The lock file, not yet locked; closing it unlocks it. Raises OSError for a symbolic link, since opening creates a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")


def lock(file: IO[str], *, shared: bool = False) -> None:
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: IO[str] | int, *, shared: bool = False) -> bool:
    """Locks `file`, a file or descriptor, unless another process holds it; returns whether it did."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
