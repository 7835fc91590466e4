"""What stands beside every stored artifact: where it came from, what it is, and how to make it again."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optpipe.core.hashing import hash_file
from optpipe.errors import BadInputError

MANIFEST_SCHEMA = 1
"""Version of the manifest's form; a reader refuses a newer one."""
MANIFEST = "manifest.json"


class UnreadableManifestError(BadInputError):
    """A manifest that was damaged."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size and hash at the moment it was stored."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one store entry."""

    kind: str
    id: str
    recipe: Mapping[str, Any]
    """All that decides the content: hashes of inputs, flags, tool versions. The id is its hash."""
    parents: tuple[str, ...]
    """Ids of the entries it was made from."""
    files: Mapping[str, FileRecord]
    info: Mapping[str, Any]
    """What the stage found out: shares, parity, warnings."""
    environment: Mapping[str, Any]
    command: str
    created: str
    """UTC, ISO 8601."""
    seconds: float
    schema: int = field(default=MANIFEST_SCHEMA)

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"


_KINDS: Mapping[str, Any] = {"kind": str, "id": str, "command": str, "created": str, "seconds": (int, float), "recipe": dict, "info": dict,
          "environment": dict}  # fmt: skip


def manifest_from_file(path: Path) -> Manifest:
    """Reads a manifest; raises `UnreadableManifestError` where it is damaged, `BadInputError` where its schema is another."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        schema = value["schema"]
        if schema != MANIFEST_SCHEMA:
            raise BadInputError(
                f"{path}: manifest schema {schema}, this version of optpipe reads {MANIFEST_SCHEMA}; use a matching optpipe"
            )
        value["files"] = {name: FileRecord(**record) for name, record in value["files"].items()}
        value["parents"] = tuple(value["parents"])
        found = Manifest(**value)
        if not all(isinstance(getattr(found, name), kind) for name, kind in _KINDS.items()):
            raise TypeError  # noqa: TRY301
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableManifestError(f"{path} is not a readable manifest ({type(error).__name__})") from error
    return found


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Sizes and hashes of all files below `directory`, by POSIX path relative to it, without the manifest itself."""
    return {
        path.relative_to(directory).as_posix(): FileRecord(hash_file(path), path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.relative_to(directory).as_posix() != MANIFEST
    }


def find_damage(directory: Path, manifest: Manifest, only: str | None = None) -> str | None:
    """What is wrong with the files of an entry, or with `only` one; None where every byte is as it was stored."""
    for name, record in manifest.files.items() if only is None else [(only, manifest.files[only])]:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.size_bytes:
            return f"{name} has {path.stat().st_size} bytes, expected {record.size_bytes}"
        if hash_file(path) != record.sha256:
            return f"{name} does not match the hash in its manifest"
    return None


def get_command_line() -> str:
    """The command that is running, as it can be typed again."""
    name = Path(sys.argv[0]).name
    program = "optpipe" if name in ("optpipe", "__main__.py") else name
    return shlex.join([program, *sys.argv[1:]])
