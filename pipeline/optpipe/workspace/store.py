"""The artifact store: addressed by recipe, verified by content, complete or absent.

An entry is a folder `store/<kind>-<id>`, where the id is the hash of all that decides its content. It is made in
`tmp/` and renamed into place when whole, so a killed process leaves nothing that looks finished. One lock file per
entry lets two builds of the same thing take turns: the second finds what the first has made. Who makes entries holds a
shared lock on the store until the process ends, so that nobody removes what is about to be needed.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic
from typing import IO, Any, ClassVar, Generic, Protocol, overload

from typing_extensions import TypeVar

from optpipe.core.errors import BadInputError, StageError
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.hashing import hash_value
from optpipe.core.records import json_from_record, plain_from_record, record_from_plain
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.hashes import find_changed_files, hash_files
from optpipe.workspace.manifest import MANIFEST, Manifest, UnreadableManifestError, get_command_line, read_manifest
from optpipe.workspace.places import explain_os_errors

ID_LENGTH = 12
USED = "used"
"""Where the workspace keeps when an entry was last found by a build, in a file of its name."""
_IN_USE: dict[Path, IO[str]] = {}
"""The lock files of the stores that this process makes entries in: their locks end with the process, however it ends."""


class EntryInfo(Protocol):
    """What the maker of an entry found out: a dataclass for each kind of entry, stored in its manifest."""

    KIND: ClassVar[str]
    """The first part of the entry's name."""


Info = TypeVar("Info", bound=EntryInfo, default=Any)


@dataclass(frozen=True, slots=True)
class Entry(Generic[Info]):
    """A complete entry of the store, or its manifest in a dossier; plain `Entry` where its kind does not matter."""

    path: Path
    manifest: Manifest
    info: Info
    """Plain values in an entry that was listed without its kind."""

    @property
    def id(self) -> str:
        """The entry's id: the first digits of its recipe's hash."""
        return self.manifest.id

    def fits(self, prefix: str) -> bool:
        """Whether its id or `kind-id` starts with `prefix`."""
        return self.id.startswith(prefix) or self.path.name.startswith(prefix)

    def file(self, name: str) -> Path:
        """The path of one of its files."""
        return self.path / name

    def sha256(self, name: str) -> str:
        """The stored hash of one of its files."""
        return self.manifest.files[name].sha256

    @property
    def size_bytes(self) -> int:
        """The size of all its files."""
        return sum(record.size_bytes for record in self.manifest.files.values())

    def find_damage(self, only: str | None = None) -> str | None:
        """What is wrong with its files, or with `only` one; None where every byte is as it was stored."""
        hashes = {name: file.sha256 for name, file in self.manifest.files.items() if only in (None, name)}
        return next(iter(find_changed_files(Files(self.path), hashes)), None)


@overload
def entry_from_folder(folder: Path, kind: type[Info]) -> Entry[Info]: ...
@overload
def entry_from_folder(folder: Path, kind: None = None) -> Entry[Any]: ...
def entry_from_folder(folder: Path, kind: type[Any] | None = None) -> Entry[Any]:
    """The entry whose manifest lies in `folder`. Raises UnreadableManifestError as `entry_from_files`."""
    return entry_from_files(Files(folder), kind)


def entry_from_files(files: Files, kind: type[Any] | None) -> Entry[Any]:
    """The entry whose manifest is among `files`. Raises UnreadableManifestError where none is, or one of another kind."""
    manifest, folder = read_manifest(files), files.folder
    if kind is None:
        return Entry(folder, manifest, manifest.info)
    if manifest.kind != kind.KIND:
        raise UnreadableManifestError(f"{folder} has a manifest of kind {manifest.kind}, expected {kind.KIND}")
    try:
        return Entry(folder, manifest, record_from_plain(manifest.info, kind, folder / MANIFEST))
    except BadInputError as error:
        raise UnreadableManifestError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Store:
    """The store below one workspace folder."""

    workspace: Path

    @property
    def root(self) -> Path:
        """Where complete entries lie."""
        return self.workspace / "store"

    def require_writable(self) -> None:
        """Raises `BadInputError` before any work where the workspace cannot be written."""
        with explain_os_errors(self.workspace):
            self.root.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=self.workspace, prefix=".writable-"):
                pass

    def get(self, kind: type[Info], recipe: Mapping[str, Any]) -> Entry[Info] | None:
        """The entry made by `recipe`, or None where there is none or it is damaged."""
        path = self.root / _name_entry(kind, recipe)
        try:
            entry = entry_from_folder(path, kind)
        except UnreadableManifestError:
            return None
        return entry if entry.find_damage() is None else None

    def produce(
        self,
        kind: type[Info],
        recipe: Mapping[str, Any],
        make: Callable[[Path], Info],
        *,
        parents: tuple[str, ...] = (),
        listener: Listener,
    ) -> tuple[Entry[Info], bool]:
        """The entry made by `recipe` and whether the store had it already.

        `make` fills an empty folder and returns the manifest's `info`; what it raises leaves nothing behind.
        """
        with suppress(OSError):  # where no lock can be made, nobody can remove anything
            fcntl.flock(self._open_store_lock(), fcntl.LOCK_SH)
        if (entry := self.get(kind, recipe)) is not None:
            self._note_use(entry)
            return entry, True
        name = _name_entry(kind, recipe)
        with explain_os_errors(self.workspace), self._lock_entry(name):
            if (entry := self.get(kind, recipe)) is not None:
                return entry, True
            if (self.root / name).exists():
                listener.warn(f"store entry {name} was damaged and is being rebuilt")
                shutil.rmtree(self.root / name)
            return self._make(kind, name, recipe, make, parents), False

    def _make(
        self,
        kind: type[Info],
        name: str,
        recipe: Mapping[str, Any],
        make: Callable[[Path], Info],
        parents: tuple[str, ...],
    ) -> Entry[Info]:
        scratch = self.workspace / "tmp" / name  # ours alone while the lock is held, so what lies there is a dead run's
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            started = monotonic()
            info = make(scratch)
            manifest = Manifest(
                kind=kind.KIND,
                id=compute_entry_id(kind, recipe),
                recipe=recipe,
                parents=parents,
                files=hash_files(scratch),
                info=plain_from_record(info),
                environment=describe_environment(),
                command=get_command_line(),
                created=datetime.now(UTC).isoformat(timespec="microseconds"),  # two may be made in one millisecond
                seconds=round(monotonic() - started, 3),
            )
            (scratch / MANIFEST).write_bytes(json_from_record(manifest))
            _flush(scratch)
            self.root.mkdir(parents=True, exist_ok=True)
            scratch.rename(self.root / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Entry(self.root / name, manifest, info)

    def _open_store_lock(self) -> IO[str]:
        lock = self.workspace / "locks" / "store"
        if (held := _IN_USE.get(lock.absolute())) is None:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held = _IN_USE[lock.absolute()] = lock.open("w")
        return held

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other process makes entries. Raises StageError where one does so already."""
        with explain_os_errors(self.workspace):
            lock = self._open_store_lock()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StageError(
                    f"another optpipe process is using {self.workspace}; nothing was removed; try again when it has finished"
                ) from error
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    @contextmanager
    def _lock_entry(self, name: str) -> Iterator[None]:
        lock = self.workspace / "locks" / name
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note_use(self, entry: Entry[Any]) -> None:
        """Notes that a build came to `entry` again: of several that fit a name, that of the last build is meant."""
        with suppress(OSError):  # a store that cannot be written is read anyway
            (self.workspace / USED).mkdir(exist_ok=True)
            (self.workspace / USED / entry.path.name).write_text(datetime.now(UTC).isoformat(), encoding="utf-8")

    def _last_use(self, entry: Entry[Any]) -> str:
        with suppress(OSError):
            return max(entry.manifest.created, (self.workspace / USED / entry.path.name).read_text(encoding="utf-8"))
        return entry.manifest.created

    @overload
    def list_entries(self, kind: type[Info]) -> list[Entry[Info]]: ...
    @overload
    def list_entries(self, kind: None = None) -> list[Entry[Any]]: ...
    def list_entries(self, kind: type[Any] | None = None) -> list[Entry[Any]]:
        """The entries of `kind`, or all; those that a build made or found last at the end. Their files are not hashed here.

        Raises BadInputError where a manifest is damaged.
        """
        found, damaged = self.scan_entries(kind)
        if damaged:
            remove, clean = f"optpipe store rm {damaged[0].name}", "optpipe store gc"
            raise BadInputError(
                f"store entry {damaged[0].name} in {self.workspace} has no readable manifest; "
                f"remove it with `{remove}`, or all damaged entries with `{clean}`"
            )
        return found

    def scan_entries(self, kind: type[Any] | None = None) -> tuple[list[Entry[Any]], list[Path]]:
        """The entries with a readable manifest, in the order of `list_entries`, and the folders that have none."""
        found: list[Entry[Any]] = []
        damaged = []
        for path in sorted(self.root.glob("*/" if kind is None else f"{kind.KIND}-*/")):
            try:
                found.append(entry_from_folder(path, kind))
            except UnreadableManifestError:
                if path.is_dir():  # else another process has removed it in the meantime
                    damaged.append(path)
        return sorted(found, key=lambda entry: (self._last_use(entry), entry.path.name)), damaged

    @overload
    def find(self, prefix: str, kind: type[Info]) -> Entry[Info]: ...
    @overload
    def find(self, prefix: str, kind: None = None) -> Entry[Any]: ...
    def find(self, prefix: str, kind: type[Any] | None = None) -> Entry[Any]:
        """The one entry, of `kind` if given, whose id or `kind-id` starts with `prefix`."""
        entries: list[Entry[Any]] = self.list_entries(kind)
        found = [entry for entry in entries if entry.fits(prefix)]
        if not found:
            of_model = [each.path.name for each in entries if each.manifest.info.get("model") == prefix]
            known = f"'{prefix}' is a model, not an ID; specify one of its entries: {', '.join(of_model[:-6:-1])}"
            problem = known if of_model else f"no entry matches '{prefix}' in {self.workspace}"
            raise BadInputError(f"{problem}; `optpipe store ls` lists entries")
        if len(found) > 1:
            names = ", ".join(entry.path.name for entry in found[:5])
            raise BadInputError(f"'{prefix}' matches {len(found)} entries ({names}); use a longer prefix")
        return found[0]

    def verify_entry(self, entry: Entry[Info], only: str | None = None) -> Entry[Info]:
        """`entry`, after every byte, or those of the file `only`, was compared with its manifest's hashes.

        Call it before anything is deserialized or believed. Raises StageError where a file is missing or changed.
        """
        if (problem := entry.find_damage(only)) is not None:
            raise StageError(
                f"store entry {entry.path.name} is damaged: {problem}\nrebuild it with `{entry.manifest.command}`"
            )
        return entry

    def remove_folder(self, folder: Path) -> int:
        """Deletes the folder of an entry or a run, damaged or not; returns the bytes it held, 0 where it is gone already."""
        with explain_os_errors(self.workspace), self._lock_entry(folder.name):
            doomed = self.workspace / "tmp" / f"{folder.name}.removed"
            doomed.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(doomed, ignore_errors=True)
            try:
                folder.rename(doomed)  # first out of sight in one step, then file by file
            except FileNotFoundError:  # another process was faster
                return 0
            (self.workspace / USED / folder.name).unlink(missing_ok=True)
            size = measure_folder_bytes(doomed)
            shutil.rmtree(doomed)
        return size

    @contextmanager
    def scratch(self, kind: str) -> Iterator[Path]:
        """An empty folder that is deleted at the end; where the process dies, by `gc`, which sees that its lock is free."""
        name = f"{kind}-{secrets.token_hex(6)}"
        with explain_os_errors(self.workspace), self._lock_entry(name):
            folder = self.workspace / "tmp" / name
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                (self.workspace / "locks" / name).unlink(missing_ok=True)


def measure_folder_bytes(folder: Path) -> int:
    """The size of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compute_entry_id(kind: type[EntryInfo], recipe: Mapping[str, Any]) -> str:
    """The id that the entry made by `recipe` has or would have."""
    return hash_value({"kind": kind.KIND, "recipe": recipe})[:ID_LENGTH]


def _name_entry(kind: type[EntryInfo], recipe: Mapping[str, Any]) -> str:
    return f"{kind.KIND}-{compute_entry_id(kind, recipe)}"


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
