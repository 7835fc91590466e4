"""The container of everything in the workspace: a folder with files and a manifest, which is written last and atomically.

An entry with a recipe can be made again and lies in `store/KIND-ID`; its id is the hash of the recipe. An entry without
one happened once (a run, a job of a sweep) and lies in `runs/KIND-ID`; its id names the time. Dossiers hold the same
manifests.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol

from typing_extensions import TypeVar

from optpipe.core.entries import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files, hash_value
from optpipe.core.params import read_origin
from optpipe.core.records import (
    OtherSchemaError,
    json_from_record,
    plain_from_record,
    read_versioned,
    record_from_plain,
)
from optpipe.core.wording import PYTHON, Call
from optpipe.workspace.environment import describe_environment
from optpipe.workspace.files import (
    FileHash,
    find_changed_files,
    find_problems,
    hash_files,
    write_bytes,
)

MANIFEST = "manifest.json"
USED = ".used"
"""File of an entry with the time at which a build last used it: of several entries that fit a name, the last used is meant."""
NOT_LISTED = (MANIFEST, USED)
"""Files of an entry that its manifest does not list."""
ID_LENGTH = 12
Status = Literal["complete", "interrupted"]
RunKind = Literal[
    "bench",
    "profile",
    "preprocess",
    "end-to-end",
    "evaluate",
    "calibrate",
    "choose",
    "compare",
    "turns",
    "signoff",
    "time",
]


class UnreadableManifestError(BadInputError):
    """A damaged manifest, or one of another version of optpipe."""


class OtherVersionError(UnreadableManifestError):
    """A whole manifest that another version of optpipe wrote."""


@dataclass(frozen=True, slots=True)
class Manifest:
    kind: str
    id: str
    recipe: Mapping[str, Any] | None
    """Everything that determines the content: hashes of inputs, flags, tool versions. None if it happened once."""
    parents: tuple[str, ...]
    """Ids of the entries that it was made from."""
    files: Mapping[str, FileHash]
    """By POSIX path in the entry."""
    info: Mapping[str, Any]
    """Plain values of its kind's `EntryInfo`."""
    environment: Environment
    command: str
    started_utc: str
    finished_utc: str
    """Both ISO 8601."""
    status: Status = "complete"
    """`interrupted` if it was stopped on purpose and kept."""
    schema_version: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.id}"

    @property
    def seconds(self) -> float:
        times = (datetime.fromisoformat(time) for time in (self.finished_utc, self.started_utc))
        return (next(times) - next(times)).total_seconds()


class EntryInfo(Protocol):
    """Facts from the maker of an entry, stored in its manifest: a dataclass per kind of entry."""

    KIND: ClassVar[str]
    """First part of the entry's name."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    KIND: ClassVar[str] = "run"

    model: str | None = None
    trained: bool | None = None
    """Whether the model's weights are trained, if accuracy was measured."""
    measurements: int | None = None
    """Number of measurements of a bench run, and of rounds in turns, so that none can vanish unnoticed."""
    commit: str = ""
    """`describe_commit` where it was started; empty outside a repository, and in records of older versions."""
    optpipe: str = ""
    """The version that made it; empty in records of older versions."""


Info = TypeVar("Info", bound=EntryInfo, default=Any)


@dataclass(frozen=True, slots=True)
class Entry(Generic[Info]):
    """A complete entry of the workspace, or its manifest in a dossier; plain `Entry` for any kind."""

    files: Files
    manifest: Manifest
    info: Info
    """Plain values in an entry that was listed without its kind."""

    @property
    def path(self) -> Path:
        return self.files.folder

    @property
    def id(self) -> str:
        """The first digits of its recipe's hash, or the time at which it began."""
        return self.manifest.id

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Empty for what happened once."""
        return self.manifest.recipe or {}

    @property
    def interrupted(self) -> bool:
        return self.manifest.status != "complete"

    def matches_id(self, prefix: str) -> bool:
        """Whether its id or `KIND-ID` starts with `prefix`; an empty one names nothing."""
        return bool(prefix) and (self.id.startswith(prefix) or self.path.name.startswith(prefix))

    def file(self, name: str) -> Path:
        return self.path / name

    def sha256(self, name: str) -> str:
        return self.manifest.files[name].sha256

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.manifest.files.values())

    def find_damage(self, only: str | None = None) -> str | None:
        """The first problem with its files, or with `only` one; None if every byte is as stored.

        A file of another size is not read: it may be a hole of terabytes.
        """
        stated = {name: file for name, file in self.manifest.files.items() if only in (None, name)}
        for name, file in stated.items():
            with suppress(OSError, BadInputError):
                if self.files.has(name) and self.file(name).stat().st_size != file.size_bytes:
                    return f"{name}: changed"
        hashes = {name: file.sha256 for name, file in stated.items()}
        return next(iter(find_changed_files(self.files, hashes)), None)

    def find_problems(self) -> list[str]:
        """Lines `PATH: changed | missing | not in the manifest`; empty if intact."""
        hashes = {name: file.sha256 for name, file in self.manifest.files.items()}
        return find_problems(self.files, hashes, "the manifest", NOT_LISTED)


Run = Entry[RunInfo]


def read_manifest(files: Files) -> Manifest:
    """Raises UnreadableManifestError if the manifest is damaged, OtherVersionError if it has another schema version."""
    try:
        return read_versioned(files, MANIFEST, Manifest)
    except OtherSchemaError as error:
        raise OtherVersionError(error.message) from error
    except BadInputError as error:
        raise UnreadableManifestError(error.message) from error


def entry_from_files(files: Files, kind: type[Info] | None = None) -> Entry[Info]:
    """Raises UnreadableManifestError if the manifest is damaged or of another kind, OtherVersionError if its info has other fields."""
    manifest = read_manifest(files)
    if kind is None:
        plain: Any = manifest.info
        return Entry(files, manifest, plain)
    is_run = kind is RunInfo and manifest.recipe is None
    if not is_run and manifest.kind != kind.KIND:
        raise UnreadableManifestError(
            f"{files.folder} has a manifest of kind {manifest.kind}, expected {kind.KIND}"
        )
    try:
        return Entry(
            files, manifest, record_from_plain(manifest.info, kind, files.folder / MANIFEST)
        )
    except BadInputError as error:
        raise OtherVersionError(error.message) from error


def entry_from_folder(folder: Path, kind: type[Info] | None = None) -> Entry[Info]:
    return entry_from_files(Files(folder), kind)


def load_run(path: Path) -> Run:
    return run_from_files(Files(path))


def run_from_files(files: Files) -> Run:
    """Raises BadInputError if the run is missing, unfinished, or of another schema version."""
    path = files.folder
    if not files.has(MANIFEST):
        problem = "is incomplete (no manifest.json)" if path.is_dir() else "does not exist"
        raise BadInputError(f"run {path} {problem}; `" + Call("store ls") + "` lists stored runs")
    return entry_from_files(files, RunInfo)


def runs_from_files(files: Files, name: str) -> tuple[Run, ...]:
    """The runs in the folder `name`, by name. Raises BadInputError if one is unfinished."""
    return tuple(
        run_from_files(files.below(f"{name}/{path.name}"))
        for path in sorted((files.folder / name).glob("*/"))
    )


def require_unchanged(run: Entry[Any], *, whole: bool = True) -> None:
    """Raises BadInputError that names the first file of `run` that differs from its manifest."""
    problems = [
        problem for problem in run.find_problems() if whole or not problem.endswith(": missing")
    ]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise BadInputError(
            f"run {run.name} was modified: {problems[0]}{more}",
            remedy="remove it with `" + Call("store rm", run.name) + "` and measure again",
        )


def finish_entry(
    folder: Path,
    kind: str,
    ident: str,
    info: Info,
    started_utc: str,
    *,
    recipe: Mapping[str, Any] | None = None,
    parents: Sequence[str] = (),
    command: str | None = None,
    environment: Environment | None = None,
    status: Status = "complete",
) -> Entry[Info]:
    """Hashes every file in `folder` and writes the manifest, which completes the entry. Raises StageError if it cannot.

    `command` and `environment` default to those of this process.
    """
    manifest = Manifest(
        kind=kind,
        id=ident,
        recipe=recipe,
        parents=tuple(parents),
        files=hash_files(folder, NOT_LISTED),
        info=plain_from_record(info),
        environment=environment or describe_environment(),
        command=command or get_command_line(),
        started_utc=started_utc,
        finished_utc=get_utc_time("microseconds"),  # two may be made in one millisecond
        status=status,
    )
    write_bytes(folder / MANIFEST, json_from_record(manifest))
    return Entry(Files(folder), manifest, info)


def compute_entry_id(kind: type[EntryInfo], recipe: Mapping[str, Any]) -> str:
    return hash_value({"kind": kind.KIND, "recipe": recipe})[:ID_LENGTH]


def get_utc_time(precision: str = "seconds") -> str:
    """ISO 8601, to the second unless `precision` is `milliseconds` or `microseconds`."""
    return datetime.now(UTC).isoformat(timespec=precision)


def get_command_line() -> str:
    """The running command, as it can be typed again; in a Python program the call of the library."""
    if (call := read_origin()) is not None:
        return call
    name = Path(sys.argv[0]).name
    return shlex.join(["optpipe" if name in ("optpipe", "__main__.py") else name, *sys.argv[1:]])


def strip_folders(manifest: Manifest) -> Manifest:
    """The manifest without the absolute paths of the command and of the model's source and card."""
    paths = {name: manifest.info.get(name) for name in ("source", "card")}
    named = {name: drop_folder(str(value)) for name, value in paths.items() if value is not None}
    return replace(
        manifest, info={**manifest.info, **named}, command=drop_folders(manifest.command)
    )


def drop_folders(command: str) -> str:
    """Cuts absolute paths of a command line to their last part."""
    if command.startswith(PYTHON):
        return drop_folder(command)
    return shlex.join(map(drop_folder, shlex.split(command)))


def drop_folder(word: str) -> str:
    """`hf:bert` for `hf:/srv/models/bert`, `net.py:make` for `/home/me/net.py:make`."""
    return re.sub(r"(^|[=:,])[/~][^=:,]*/(?=[^/])", r"\1", word)
