"""Files of a folder that others may have written: opened inside it or not at all."""

import errno
import hashlib
import inspect
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from optpipe.core import np
from optpipe.core.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Files:
    root: Path
    prefix: str = ""
    kept: dict[str, bytes] | None = None
    """Contents by path below `root`, so that each file is opened once; None if they are not kept."""

    @property
    def folder(self) -> Path:
        return self.root / self.prefix

    def below(self, name: str) -> "Files":
        """The files of the folder `name`; shares the kept contents."""
        return Files(self.root, f"{self.prefix}{name}/", self.kept)

    def has(self, name: str) -> bool:
        """Whether `name` is a regular file. Raises BadInputError if it leads out of the folder."""
        _split_name(self.root, f"{self.prefix}{name}")
        path = self.folder / name
        return f"{self.prefix}{name}" in (self.kept or ()) or (
            path.is_file() and not path.is_symlink()
        )

    def read(self, name: str) -> bytes:
        """Raises BadInputError if `name` is not a regular file inside the folder."""
        path = f"{self.prefix}{name}"
        if self.kept is not None and path in self.kept:
            return self.kept[path]
        with _open_inside(self.root, path) as file:
            content = file.read()
        if self.kept is not None:
            self.kept[path] = content
        return content

    def hash(self, name: str) -> str:
        """SHA-256 in hexadecimal. Raises BadInputError as `read` does."""
        if self.kept is not None:
            return hashlib.sha256(self.read(name)).hexdigest()
        with _open_inside(self.root, f"{self.prefix}{name}") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def hash_callable(function: Callable[..., Any]) -> str:
    """SHA-256 of its source text; of its code and constants if the text is not known."""
    try:
        return hash_text(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None) or getattr(
            type(function).__call__, "__code__", None
        )
        if code is None:
            return hash_text(repr(type(function)))
        return hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest()


def _split_name(root: Path, name: str) -> tuple[str, ...]:
    """The parts of `name`. Raises BadInputError if it leads out of `root`."""
    steps = PurePosixPath(name).parts
    if (
        not steps
        or ".." in steps
        or PurePosixPath(name).is_absolute()
        or "//" in name
        or "\0" in name
    ):
        raise BadInputError(f"{root}: {name!r} is not the name of a file in it")
    return steps


@contextmanager
def _open_inside(root: Path, name: str) -> Iterator[BufferedReader]:
    """Opens each part of `name` relative to the folder before it, without following links."""
    steps = _split_name(root, name)
    at = None
    try:
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for step in steps[:-1]:
            outer, at = at, os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(outer)
        with os.fdopen(
            os.open(steps[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at), "rb"
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInputError(f"{root / name} is not a regular file")
            yield file
    except OSError as error:
        raise BadInputError(f"cannot read {root / name}: {error.strerror}") from error
    finally:
        if at is not None:
            os.close(at)


MAX_DOCUMENT_BYTES = 2**26
"""The size limit of a document, such as a card, a policy, or JSON."""

MAX_LIST_BYTES = 2**29
"""The size limit of a file that lists samples: texts, annotations, a manifest, or groups."""


@contextmanager
def open_user_file(path: Path, most_bytes: int | None = None) -> Iterator[BufferedReader]:
    """Opens a file that a user names, or that a foreign folder contains; links are followed.

    A pipe, a socket, and a device are refused, since reading them may never end; so is a file of more than `most_bytes`.
    Raises BadInputError for these, OSError as `open` does.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(state.st_mode):
            raise BadInputError(f"{path} is a pipe, a socket, or a device; give a regular file")
        if most_bytes is not None and state.st_size > most_bytes:
            raise BadInputError(
                f"{path} is too large: {state.st_size:,} bytes; at most {most_bytes:,}"
            )
        yield file


def read_user_bytes(path: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The content of a document. Raises as `open_user_file` does."""
    with open_user_file(path, most_bytes) as file:
        return file.read(most_bytes)


def read_user_text(path: Path, most_bytes: int = MAX_DOCUMENT_BYTES, errors: str = "strict") -> str:
    """As `read_user_bytes`, with the line ends of text files. Raises UnicodeDecodeError too.

    Editors on Windows write a byte order mark, which is no part of the text.
    """
    text = read_user_bytes(path, most_bytes).decode("utf-8-sig", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def require_regular_file(path: Path, most_bytes: int | None = None) -> None:
    """Checks a file that a library will open by its name. Raises as `open_user_file` does."""
    with open_user_file(path, most_bytes):
        pass


def get_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hash_file(path: Path) -> str:
    """SHA-256 in hexadecimal. Raises as `open_user_file` does."""
    with open_user_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_value(value: Any) -> str:
    """SHA-256 of a JSON-like value, independent of key order. Raises TypeError for anything else, whose `repr` would not be stable."""
    return hash_text(
        json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    )


def hash_arrays(tensors: Mapping[str, Any]) -> str:
    """SHA-256 over names, types, shapes and bytes of arrays, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
