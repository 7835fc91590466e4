"""The artifact store: addressed by recipe, verified by content, complete or absent.

An entry is a folder `store/<kind>-<id>`, where the id is the hash of all that decides its content. It is made in
`tmp/` and renamed into place when whole, so a killed process leaves nothing that looks finished. One lock file per
entry lets two builds of the same thing take turns: the second finds what the first has made. Who makes entries holds a
shared lock on the store until the process ends, so that nobody removes what is about to be needed.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import IO, Any

from optpipe.core.events import Listener
from optpipe.core.hashing import value_sha256
from optpipe.errors import BadInputError, StageError
from optpipe.workspace.environment import environment
from optpipe.workspace.manifest import (
    MANIFEST,
    Manifest,
    UnreadableError,
    command_line,
    damage,
    file_records,
    manifest_from_file,
)

ID_LENGTH = 12
USED = "used"
"""Where the workspace keeps when an entry was last found by a build, in a file of its name."""
_IN_USE: dict[Path, IO[str]] = {}
"""The lock files of the stores that this process makes entries in: their locks end with the process, however it ends."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A complete entry of the store."""

    path: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """The entry's id: the first digits of its recipe's hash."""
        return self.manifest.id

    @property
    def info(self) -> Mapping[str, Any]:
        """What the stage that made it found out."""
        return self.manifest.info

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
        with _named_failures(self.workspace):
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.workspace / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()

    def get(self, kind: str, recipe: Mapping[str, Any]) -> Entry | None:
        """The entry made by `recipe`, or None where there is none or it is damaged."""
        path = self.root / _entry_name(kind, recipe)
        if not (path / MANIFEST).is_file():
            return None
        try:
            manifest = manifest_from_file(path / MANIFEST)
        except UnreadableError:
            return None
        return Entry(path, manifest) if damage(path, manifest) is None else None

    def produce(
        self,
        kind: str,
        recipe: Mapping[str, Any],
        make: Callable[[Path], Mapping[str, Any]],
        *,
        parents: tuple[str, ...] = (),
        listener: Listener,
    ) -> tuple[Entry, bool]:
        """The entry made by `recipe` and whether the store had it already.

        `make` fills an empty folder and returns the manifest's `info`; what it raises leaves nothing behind.
        """
        with suppress(OSError):  # where no lock can be made, nobody can remove anything
            fcntl.flock(self._in_use(), fcntl.LOCK_SH)
        if (entry := self.get(kind, recipe)) is not None:
            self._note_use(entry)
            return entry, True
        name = _entry_name(kind, recipe)
        with _named_failures(self.workspace), self._locked(name):
            if (entry := self.get(kind, recipe)) is not None:
                return entry, True
            if (self.root / name).exists():
                listener.warn(f"store entry {name} was damaged and is made again")
                shutil.rmtree(self.root / name)
            return self._made(kind, name, recipe, make, parents), False

    def _made(
        self,
        kind: str,
        name: str,
        recipe: Mapping[str, Any],
        make: Callable[[Path], Mapping[str, Any]],
        parents: tuple[str, ...],
    ) -> Entry:
        scratch = self.workspace / "tmp" / name  # ours alone while the lock is held, so what lies there is a dead run's
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            started = monotonic()
            info = make(scratch)
            manifest = Manifest(
                kind=kind,
                id=entry_id(kind, recipe),
                recipe=recipe,
                parents=parents,
                files=file_records(scratch),
                info=info,
                environment=environment(),
                command=command_line(),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=round(monotonic() - started, 3),
            )
            (scratch / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
            _flush(scratch)
            self.root.mkdir(parents=True, exist_ok=True)
            scratch.rename(self.root / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Entry(self.root / name, manifest)

    def _in_use(self) -> IO[str]:
        lock = self.workspace / "locks" / "store"
        if (held := _IN_USE.get(lock.absolute())) is None:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held = _IN_USE[lock.absolute()] = lock.open("w")
        return held

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other process makes entries. Raises StageError where one does so already."""
        with _named_failures(self.workspace):
            lock = self._in_use()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StageError(
                    f"another optpipe is at work in {self.workspace}; nothing was removed, try again when it has ended"
                ) from error
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = self.workspace / "locks" / name
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note_use(self, entry: Entry) -> None:
        """Notes that a build came to `entry` again: of several that fit a name, that of the last build is meant."""
        with suppress(OSError):  # a store that cannot be written is read all the same
            (self.workspace / USED).mkdir(exist_ok=True)
            (self.workspace / USED / entry.path.name).write_text(datetime.now(UTC).isoformat(), encoding="utf-8")

    def _last_use(self, entry: Entry) -> str:
        with suppress(OSError):
            return max(entry.manifest.created, (self.workspace / USED / entry.path.name).read_text(encoding="utf-8"))
        return entry.manifest.created

    def entries(self) -> list[Entry]:
        """All entries, those that a build made or found last at the end; their files are not hashed here.

        Raises BadInputError where a manifest is damaged.
        """
        found, damaged = self.listed()
        if damaged:
            remove, clean = f"optpipe rm {damaged[0].name}", "optpipe gc"
            raise BadInputError(
                f"store entry {damaged[0].name} in {self.workspace} has no readable manifest; "
                f"remove it with `{remove}`, or all that is damaged with `{clean}`"
            )
        return found

    def listed(self) -> tuple[list[Entry], list[Path]]:
        """The entries with a readable manifest, in the order of `entries`, and the folders that have none."""
        found, damaged = [], []
        for path in sorted(self.root.glob("*/")):
            try:
                found.append(Entry(path, manifest_from_file(path / MANIFEST)))
            except UnreadableError:
                if path.is_dir():  # else another process has removed it in the meantime
                    damaged.append(path)
        return sorted(found, key=lambda entry: (self._last_use(entry), entry.path.name)), damaged

    def find(self, prefix: str) -> Entry:
        """The one entry whose id or `kind-id` starts with `prefix`."""
        found = [entry for entry in self.entries() if entry.fits(prefix)]
        if len(found) != 1:
            names = ", ".join(entry.path.name for entry in found[:5])
            raise BadInputError(
                f"'{prefix}' fits {len(found)} entries ({names}); give more digits"
                if found
                else f"nothing stored under '{prefix}' in {self.workspace}; `optpipe ls` lists what is"
            )
        return found[0]

    def verified(self, entry: Entry, only: str | None = None) -> Entry:
        """`entry`, after every byte, or those of the file `only`, was held against its manifest.

        Call it before anything is deserialized or believed.
        """
        if (problem := damage(entry.path, entry.manifest, only)) is not None:
            raise StageError(
                f"store entry {entry.path.name} is damaged: {problem}\n`{entry.manifest.command}` makes it again"
            )
        return entry

    def remove_folder(self, folder: Path) -> int:
        """Deletes the folder of an entry or a run, damaged or not; returns the bytes it held, 0 where it is gone already."""
        with _named_failures(self.workspace), self._locked(folder.name):
            doomed = self.workspace / "tmp" / f"{folder.name}.removed"
            doomed.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(doomed, ignore_errors=True)
            try:
                folder.rename(doomed)  # first out of sight in one step, then file by file
            except FileNotFoundError:  # another process was faster
                return 0
            (self.workspace / USED / folder.name).unlink(missing_ok=True)
            size = folder_bytes(doomed)
            shutil.rmtree(doomed)
        return size

    @contextmanager
    def scratch(self, kind: str) -> Iterator[Path]:
        """An empty folder that is deleted at the end; where the process dies, by `gc`, which sees that its lock is free."""
        name = f"{kind}-{secrets.token_hex(6)}"
        with _named_failures(self.workspace), self._locked(name):
            folder = self.workspace / "tmp" / name
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                (self.workspace / "locks" / name).unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """The size of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def entry_id(kind: str, recipe: Mapping[str, Any]) -> str:
    """The id that the entry made by `recipe` has or would have."""
    return value_sha256({"kind": kind, "recipe": recipe})[:ID_LENGTH]


def _entry_name(kind: str, recipe: Mapping[str, Any]) -> str:
    return f"{kind}-{entry_id(kind, recipe)}"


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _named_failures(workspace: Path) -> Iterator[None]:
    """Turns what the file system refuses into the message a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            command = "optpipe gc"
            raise StageError(
                f"no space left for workspace {workspace}; free some (`{command}`) or pass --workspace DIR"
            ) from error
        ours = error.filename is not None and Path(error.filename).is_relative_to(workspace)
        if ours and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise BadInputError(
                f"workspace {workspace} cannot be written ({error.strerror}); pass --workspace DIR"
            ) from error
        raise
