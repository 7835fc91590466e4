"""Workspaces in object stores, through fsspec: `s3://BUCKET/FOLDER`, `gs://…`, `abfs://…`, or any other address that it opens.

An entry's manifest is written last and read first: an entry without one is not there, so that an interrupted copy leaves nothing
that anybody takes for whole. Credentials and endpoints are those of the libraries (environment variables, their own files).
Source: fsspec 2026.9, `fsspec.core.url_to_fs` and `AbstractFileSystem`.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core import LazyModule
from optpipe.core.errors import BadInputError, MissingError, StageError, escape, first_line
from optpipe.core.files import Files
from optpipe.workspace.entry import MANIFEST, read_manifest
from optpipe.workspace.files import list_files
from optpipe.workspace.places import format_extra

fsspec = LazyModule("fsspec")
_S3 = {"config_kwargs": {"connect_timeout": 20, "read_timeout": 60, "retries": {"max_attempts": 3}}}
_GCS = {"requests_timeout": 60}
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "file": {"auto_mkdir": True},
}
"""Options by kind of address: a server that does not answer is given up."""
WAY = "check its name, the credentials, and the endpoint"


def is_url(text: str) -> bool:
    return "://" in text


@dataclass(frozen=True, slots=True)
class RemoteWorkspace:
    """The folder of a workspace in an object store."""

    url: str
    system: Any
    root: str

    def list_entries(self, folders: Sequence[str]) -> list[str]:
        """`store/artifact-…`: the finished entries and runs. Raises BadInputError if the store cannot be read."""
        names = []
        with explain_access(self.url):
            self.system.invalidate_cache()
            for folder in folders:
                for path in self._list(f"{self.root}/{folder}"):
                    name = path.rstrip("/").rpartition("/")[2]
                    if _is_plain(name) and self.system.exists(f"{path}/{MANIFEST}"):
                        names.append(f"{folder}/{name}")
        return sorted(names)

    def _list(self, place: str) -> list[str]:
        try:
            listed = self.system.ls(place, detail=True)
        except FileNotFoundError:
            return []
        return [str(info["name"]) for info in listed if info["type"] == "directory"]

    def fetch_manifest(self, name: str, target: Path) -> None:
        """Copies an entry's manifest to `target`, a folder. Raises StageError."""
        target.mkdir(parents=True)
        self._fetch(f"{name}/{MANIFEST}", target / MANIFEST)

    def fetch_files(self, name: str, target: Path) -> str | None:
        """Copies the files of the manifest in `target`; copies none, and returns the problem, if a name leads out of the entry."""
        files = [*read_manifest(Files(target)).files]
        if odd := [file for file in files if not all(map(_is_plain, file.split("/")))]:
            return f"{escape(odd[0])} is not the name of a file in it"
        for file in files:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fetch(f"{name}/{file}", path)
        return None

    def _fetch(self, name: str, target: Path) -> None:
        with explain_transfer(f"{self.url}/{name}: cannot be read"):
            self.system.get_file(f"{self.root}/{name}", str(target))

    def holds(self, name: str) -> bool:
        with explain_transfer(f"{self.url}: cannot be read"):
            return bool(self.system.exists(f"{self.root}/{name}/{MANIFEST}"))

    def put_entry(self, name: str, source: Path) -> None:
        """Copies a finished entry, its manifest last. Raises StageError; what was copied before is no entry without it."""
        files = list_files(source)
        for file in sorted(files, key=lambda name: name == MANIFEST):
            with explain_transfer(f"{self.url}/{name}: cannot be written"):
                self.system.put_file(str(files[file]), f"{self.root}/{name}/{file}")

    def require_writable(self) -> None:
        """Writes, reads, and removes a few bytes. Raises BadInputError if one of these fails."""
        place, content = f"{self.root}/probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        with explain_access(self.url):
            self.system.pipe_file(place, content)
            stored = self.system.cat_file(place)
            self.system.rm_file(place)
        if stored != content:
            raise BadInputError(f"{self.url}: other bytes were read than written\n{WAY}")


def open_remote(url: str) -> RemoteWorkspace:
    """Raises MissingError without the library for this kind of address, BadInputError for an unknown kind."""
    kind = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(kind)
    except ImportError as error:
        if error.name == "fsspec":
            raise MissingError(
                f"{url} requires fsspec; install it with `{format_extra('fsspec')}`"
            ) from error
        raise MissingError(f"{url}: {first_line(error)}") from error
    except ValueError as error:
        raise BadInputError(
            f"{escape(url)}: {first_line(error)}\ngive a folder, or an address such as s3://BUCKET/FOLDER"
        ) from error
    if not url.partition("://")[2].strip("/"):
        raise BadInputError(
            f"{escape(url)} names no folder\ngive an address such as s3://BUCKET/FOLDER"
        )
    with explain_access(url):
        system, root = fsspec.core.url_to_fs(url.rstrip("/"), **LIMITS.get(kind, {}))
    return RemoteWorkspace(url.rstrip("/"), system, str(root).rstrip("/"))


def _is_plain(name: str) -> bool:
    """Whether it is the name of a file or folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


@contextmanager
def explain_access(url: str) -> Iterator[None]:
    """Raises every library's errors as BadInputError: nothing was done yet."""
    try:
        yield
    except Exception as error:
        raise BadInputError(f"{url}: {_tell(error)}\n{WAY}") from error


@contextmanager
def explain_transfer(what: str) -> Iterator[None]:
    """Raises every library's errors as StageError."""
    try:
        yield
    except Exception as error:
        raise StageError(
            f"{what}: {_tell(error)}\nwhat was copied before is kept; run the command again"
        ) from error


def _tell(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such bucket or object"
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return kind + escape(first_line(error))[:200]
