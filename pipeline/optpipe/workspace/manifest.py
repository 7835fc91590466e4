"""What stands beside every stored artifact: where it came from, what it is, and how to make it again."""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.core.environment import Environment
from optpipe.core.errors import BadInputError
from optpipe.core.files import Files
from optpipe.core.records import record_from_files
from optpipe.workspace.hashes import FileHash

MANIFEST_SCHEMA = 2
"""Version of the manifest's form: 2 has typed `info` and `environment`."""
MANIFEST = "manifest.json"


class UnreadableManifestError(BadInputError):
    """A manifest that was damaged, or written by another version of optpipe."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one store entry."""

    kind: str
    id: str
    recipe: Mapping[str, Any]
    """All that decides the content: hashes of inputs, flags, tool versions. The id is its hash."""
    parents: tuple[str, ...]
    """Ids of the entries it was made from."""
    files: Mapping[str, FileHash]
    """By path in the entry."""
    info: Mapping[str, Any]
    """What its maker found out: the record of its kind, as plain values."""
    environment: Environment
    command: str
    created: str
    """UTC, ISO 8601."""
    seconds: float
    schema: int = MANIFEST_SCHEMA


def read_manifest(files: Files) -> Manifest:
    """The manifest of a folder. Raises UnreadableManifestError where it is damaged or its schema is another."""
    try:
        found = record_from_files(files, MANIFEST, Manifest)
    except BadInputError as error:
        raise UnreadableManifestError(str(error)) from error
    if found.schema != MANIFEST_SCHEMA:
        raise UnreadableManifestError(
            f"{files.folder / MANIFEST}: manifest schema {found.schema}; this version of optpipe reads {MANIFEST_SCHEMA}"
        )
    return found


def get_command_line() -> str:
    """The command that is running, as it can be typed again."""
    name = Path(sys.argv[0]).name
    program = "optpipe" if name in ("optpipe", "__main__.py") else name
    return shlex.join([program, *sys.argv[1:]])


def strip_folders(manifest: Manifest) -> Manifest:
    """The manifest as it may travel: without the absolute paths of the command and of the model's source and card."""
    paths = {name: manifest.info.get(name) for name in ("source", "card")}
    named = {name: drop_folder(str(value)) for name, value in paths.items() if value is not None}
    return replace(manifest, info={**manifest.info, **named}, command=drop_folders(manifest.command))


def drop_folders(command: str) -> str:
    """A command line whose absolute paths are cut to their last part: a dossier tells nothing of anybody's disk."""
    return shlex.join(map(drop_folder, shlex.split(command)))


def drop_folder(word: str) -> str:
    """A word of a command line likewise: `hf:bert` of `hf:/srv/models/bert`, `net.py:make` of `/home/me/net.py:make`."""
    return re.sub(r"(^|[=:,])[/~][^=:,]*/(?=[^/])", r"\1", word)
