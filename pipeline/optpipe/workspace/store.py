"""The artifact store: addressed by recipe, verified by content, complete or absent.

An entry is a folder `store/<kind>-<id>`, where the id is the hash of everything that determines its content. It is made
in `tmp/` and renamed into place when complete, so that a killed process leaves no partial entry. A lock file per entry
makes two builds of the same thing take turns: the second finds the result of the first. A process that makes entries
holds a shared lock on the store until it ends, so that nothing that it will need is removed.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import time_ns
from typing import IO, Any

from optpipe.core.errors import BadInputError, OptpipeError, StageError
from optpipe.core.events import Listener, Steps, as_steps, finish_steps
from optpipe.core.files import Files, hash_file
from optpipe.core.records import json_from_record, read_record
from optpipe.core.wording import Argument, Call, describe_remake, for_workspace
from optpipe.workspace.entry import (
    MANIFEST,
    USED,
    Entry,
    EntryInfo,
    Info,
    OtherVersionError,
    UnreadableManifestError,
    compute_entry_id,
    entry_from_folder,
    finish_entry,
    get_utc_time,
)
from optpipe.workspace.files import (
    delete_tree,
    hold_lock,
    list_files,
    lock,
    measure_folder_bytes,
    open_lock,
    try_lock,
    unlock,
    write_bytes,
)
from optpipe.workspace.places import explain_os_errors

LOCKS = "locks"
APPROVED = "approved"
"""Folder of the workspace with the hash of the manifest of each entry that was made or approved here. It lies outside of `store`,
so that nothing that is merged or copied into the store is trusted by itself."""
TMP = "tmp"
"""Folder of the workspace with what is being made or deleted."""
NOTES = "notes"
"""Folder of the workspace with files that only save time and may be deleted while nothing runs."""
DOSSIERS = "dossiers"
"""Folder of the workspace with the sign-offs that named no other place."""
SETTLED_NS = 2_000_000_000
"""Age from which a change of a file shows in its times, whatever the resolution of the file system's clock."""
_IN_USE: dict[Path, IO[str]] = {}
"""Lock files of the stores that this process makes entries in. The locks end with the process, however it ends."""


@dataclass(frozen=True, slots=True)
class Store:
    workspace: Path

    @property
    def root(self) -> Path:
        return self.workspace / "store"

    def own_folder(self, name: str) -> Path:
        """The workspace's folder `name`, in which files are made and deleted.

        Raises BadInputError if it is a symbolic link, since they would be made and deleted in another place.
        """
        folder = self.workspace / name
        if folder.is_symlink():
            raise BadInputError(
                f"{folder} is a symbolic link to {folder.readlink()}; nothing was deleted",
                remedy="remove the link, or move the whole workspace and pass "
                + Argument("workspace", "DIR"),
            )
        return folder

    def require_folder(self) -> None:
        """Raises BadInputError if the workspace is, or lies below, a file or a link to nothing; it need not exist."""
        places = (self.workspace, *self.workspace.parents)
        nearest = next((place for place in places if os.path.lexists(place)), None)
        if nearest is None or os.path.isdir(nearest):  # noqa: PTH112 - Path.is_dir raises where a folder cannot be searched
            return
        what = (
            "a link to nothing" if nearest.is_symlink() and not nearest.exists() else "not a folder"
        )
        raise BadInputError(
            f"{nearest} is {what}",
            argument=Argument("workspace", self.workspace),
            remedy="give a folder, or a path where nothing is yet",
        )

    def require_writable(self) -> None:
        """Raises BadInputError if the workspace cannot be written, or made; what is refused afterwards leaves no folder."""
        whole = self.workspace.absolute()
        with explain_os_errors(self.workspace):
            nearest = next(folder for folder in (whole, *whole.parents) if folder.exists())
            try:
                with NamedTemporaryFile(dir=nearest, prefix=".writable-"):
                    pass
            except OSError as error:
                error.filename = str(nearest)
                raise

    def get(self, kind: type[Info], recipe: Mapping[str, Any]) -> Entry[Info] | None:
        """The entry made by `recipe`; None if it is missing or damaged."""
        try:
            entry = entry_from_folder(self.root / _name_entry(kind, recipe), kind)
        except UnreadableManifestError:
            return None
        return entry if self._is_intact(entry) else None

    def _is_intact(self, entry: Entry[Any]) -> bool:
        """Whether every byte is as stored. Files with the size and times of the last check are not read again, as in git's index."""
        note, now = self.workspace / NOTES / f"intact-{entry.id}.json", time_ns()
        stamps: list[tuple[str, int, int, int, int]] = []
        with suppress(OSError):
            states = [(name, entry.file(name).stat()) for name in entry.manifest.files]
            stamps = [
                (name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
                for name, stat in states
            ]
        with suppress(BadInputError):
            if stamps and read_record(note, list[tuple[str, int, int, int, int]]) == stamps:
                return True
        if entry.find_damage() is not None:
            return False
        if all(max(stamp[2:4]) < now - SETTLED_NS for stamp in stamps):
            with suppress(OSError, OptpipeError):  # a read-only store can still be read
                write_bytes(note, json_from_record(stamps))
        return True

    def produce(
        self,
        kind: type[Info],
        recipe: Mapping[str, Any],
        make: Callable[[Path], Info],
        *,
        parents: tuple[str, ...] = (),
        listener: Listener,
        runs_code: bool = False,
    ) -> tuple[Entry[Info], bool]:
        """The entry made by `recipe`, and whether the store had it already.

        `make` fills an empty folder and returns the manifest's `info`; if it raises, nothing is left behind. If loading the
        entry `runs_code`, one that was neither made nor approved here is made again.
        """

        def start(folder: Path) -> Steps[Info]:
            return as_steps(make, folder)

        return finish_steps(
            self.produce_in_steps(
                kind, recipe, start, parents=parents, listener=listener, runs_code=runs_code
            )
        )

    def produce_in_steps(
        self,
        kind: type[Info],
        recipe: Mapping[str, Any],
        make: Callable[[Path], Steps[Info]],
        *,
        parents: tuple[str, ...],
        listener: Listener,
        runs_code: bool = False,
    ) -> Steps[tuple[Entry[Info], bool]]:
        """`produce` with the pauses of `make`; the entry stays locked in them."""
        with suppress(OSError):  # if no lock can be made, nothing can be removed either
            lock(self._open_store_lock(), shared=True)
        if (entry := self._get_own(kind, recipe, runs_code=runs_code)) is not None:
            with suppress(OSError):  # a read-only store can still be read
                entry.file(USED).write_text(get_utc_time("microseconds"), encoding="utf-8")
            return entry, True
        name = _name_entry(kind, recipe)
        with explain_os_errors(self.workspace), hold_lock(self.lock_path(name)):
            if (entry := self._get_own(kind, recipe, runs_code=runs_code)) is not None:
                return entry, True
            if (self.root / name).exists():
                if _is_of_other_version(self.root / name, kind):
                    why = "is of another version of optpipe"
                elif self.get(kind, recipe) is None:
                    why = "was damaged"
                else:
                    why = "was not built in this workspace"
                listener.warn(f"store entry {name} {why} and is being rebuilt")
                delete_tree(self.own_folder(self.root.name) / name)
            scratch = self.own_folder(TMP) / name
            delete_tree(scratch)  # under the lock, so existing files are a dead run's
            scratch.mkdir(parents=True)
            try:
                started = get_utc_time("microseconds")
                info = yield from make(scratch)
                ident = compute_entry_id(kind, recipe)
                made = finish_entry(
                    scratch, kind.KIND, ident, info, started, recipe=recipe, parents=parents
                )
                for path in list_files(scratch).values():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                self.root.mkdir(parents=True, exist_ok=True)
                self.approve(made)  # its folder still has the name of the entry
                scratch.rename(self.root / name)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return replace(made, files=Files(self.root / name)), False

    def _get_own(
        self, kind: type[Info], recipe: Mapping[str, Any], *, runs_code: bool
    ) -> Entry[Info] | None:
        entry = self.get(kind, recipe)
        return None if entry is None or (runs_code and not self.is_own(entry)) else entry

    def _open_store_lock(self) -> IO[str]:
        path = (self.workspace / LOCKS / "store").absolute()
        if path not in _IN_USE:
            _IN_USE[path] = open_lock(path)
        return _IN_USE[path]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps other processes from making entries while the block runs. Raises StageError if one does so already."""
        with explain_os_errors(self.workspace):
            file = self._open_store_lock()
            if not try_lock(file):
                raise StageError(
                    f"another optpipe process is using {self.workspace}; nothing was removed; try again when it has finished"
                )
            try:
                yield
            finally:
                unlock(file)

    def lock_path(self, name: str) -> Path:
        return self.workspace / LOCKS / name

    @staticmethod
    def _last_use(entry: Entry[Any]) -> str:
        with suppress(OSError):
            return max(entry.manifest.finished_utc, entry.file(USED).read_text(encoding="utf-8"))
        return entry.manifest.finished_utc

    def list_entries(self, kind: type[Info] | None = None) -> list[Entry[Info]]:
        """Entries of `kind`, or all, with the last used at the end. Their files are not hashed.

        Those of another version of optpipe are left out: `produce` makes them again. Raises BadInputError if a manifest is damaged.
        """
        entries, unreadable = self.scan_entries(kind)
        damaged = [path for path in unreadable if not _is_of_other_version(path, kind)]
        if damaged:
            raise BadInputError(
                f"store entry {damaged[0].name} in {self.workspace} has no readable manifest; "
                "remove it with `"
                + Call("store rm", damaged[0].name)
                + "`, or all damaged entries with `"
                + Call("store gc")
                + "`"
            )
        return entries

    def list_other_versions(self, kind: type[EntryInfo]) -> list[str]:
        """The names of the entries of `kind` that another version of optpipe made, which this one cannot read."""
        _, unreadable = self.scan_entries(kind)
        return [path.name for path in unreadable if _is_of_other_version(path, kind)]

    def scan_entries(self, kind: type[Info] | None = None) -> tuple[list[Entry[Info]], list[Path]]:
        """Entries with a readable manifest, ordered as by `list_entries`, and the folders without one."""
        entries, damaged = [], []
        for path in sorted(self.root.glob("*/" if kind is None else f"{kind.KIND}-*/")):
            try:
                entries.append(entry_from_folder(path, kind))
            except UnreadableManifestError:
                if path.is_dir():  # otherwise another process has removed it meanwhile
                    damaged.append(path)
        return sorted(entries, key=lambda entry: (self._last_use(entry), entry.path.name)), damaged

    def find(self, prefix: str, kind: type[Info] | None = None) -> Entry[Info]:
        """The only entry whose id or `kind-id` starts with `prefix`. Raises BadInputError if there is none or several."""
        entries = self.list_entries(kind)
        matches = [entry for entry in entries if entry.matches_id(prefix)]
        if not matches:
            of_model = [
                entry.path.name for entry in entries if entry.manifest.info.get("model") == prefix
            ]
            known = f"'{prefix}' is a model, not an ID; specify one of its entries: {', '.join(of_model[:-6:-1])}"
            problem = known if of_model else f"no entry matches '{prefix}' in {self.workspace}"
            raise BadInputError(f"{problem}; `" + Call("store ls") + "` lists entries")
        if len(matches) > 1:
            names = ", ".join(entry.path.name for entry in matches[:5])
            raise BadInputError(
                f"'{prefix}' matches {len(matches)} entries ({names}); use a longer prefix"
            )
        return matches[0]

    def _path_of_approval(self, name: str) -> Path:
        return self.own_folder(APPROVED) / name

    def approve(self, entry: Entry[Any]) -> None:
        """Notes that `entry`, as its manifest has it now, was made here or is trusted, so that loading it may run code."""
        write_bytes(
            self._path_of_approval(entry.path.name), hash_file(entry.file(MANIFEST)).encode()
        )

    def is_own(self, entry: Entry[Any]) -> bool:
        """Whether `entry` was made or approved in this workspace, and has had the same manifest since."""
        with suppress(OSError):
            approved = self._path_of_approval(entry.path.name).read_text(encoding="utf-8")
            return approved == hash_file(entry.file(MANIFEST))
        return False

    def verify_entry(
        self, entry: Entry[Info], only: str | None = None, *, runs_code: bool = False
    ) -> Entry[Info]:
        """Compares every byte, or those of the file `only`, with the manifest's hashes; returns `entry`.

        Call it before anything is deserialized or believed. Raises StageError if a file is missing or changed, or if
        loading the entry `runs_code` and it was neither made nor approved in this workspace.
        """
        if runs_code and not self.is_own(entry):
            approve = for_workspace(Call("store approve", entry.id), self.workspace)
            raise StageError(
                f"store entry {entry.path.name} was not built in {self.workspace}, and loading it runs code of whoever built it\n"
                f"build it here, or approve it, if you trust who made it: `{approve}`"
            )
        if (problem := entry.find_damage(only)) is not None:
            raise StageError(
                f"store entry {entry.path.name} is damaged: {problem}\n"
                + describe_remake(
                    entry.manifest.command, self.workspace
                )  # a worker has no command line
            )
        return entry

    def remove_folder(self, folder: Path) -> int:
        """Deletes the folder of an entry or a run, damaged or not; returns its bytes, 0 if it is already gone.

        Of a link to a folder only the link is deleted.
        """
        folder = self.own_folder(folder.parent.name) / folder.name
        with explain_os_errors(self.workspace), hold_lock(self.lock_path(folder.name)):
            doomed = self.own_folder(TMP) / f"{folder.name}.removed"
            doomed.parent.mkdir(parents=True, exist_ok=True)
            delete_tree(doomed)
            try:
                folder.rename(doomed)  # hides it in one step before the files are deleted
            except FileNotFoundError:  # another process was faster
                return 0
            size = measure_folder_bytes(doomed)
            delete_tree(doomed)
            self._path_of_approval(folder.name).unlink(missing_ok=True)
        return size

    @contextmanager
    def scratch(self, kind: str) -> Iterator[Path]:
        """An empty folder that is deleted at the end, or by `gc` if the process dies, once its lock is free."""
        name = f"{kind}-{secrets.token_hex(6)}"
        with explain_os_errors(self.workspace), hold_lock(self.lock_path(name)):
            folder = self.own_folder(TMP) / name
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self.lock_path(name).unlink(missing_ok=True)


def _is_of_other_version(folder: Path, kind: type[EntryInfo] | None) -> bool:
    try:
        entry_from_folder(folder, kind)
    except OtherVersionError:
        return True
    except UnreadableManifestError:
        return False
    return False


def _name_entry(kind: type[EntryInfo], recipe: Mapping[str, Any]) -> str:
    return f"{kind.KIND}-{compute_entry_id(kind, recipe)}"
