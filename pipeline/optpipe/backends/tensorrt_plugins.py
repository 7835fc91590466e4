"""Plugin libraries of TensorRT engines: named by path for a build, stored in the artifact with their hashes, loaded before the engine.

Source: NVIDIA TensorRT 11 documentation, "Adding Custom Layers", and `IPluginRegistry.load_library`.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, escape, read_as_user_file
from optpipe.core.files import hash_file

PREFIX = "plugin-"
"""Prefix of the copies in an artifact."""
_LOADED: set[tuple[str, str]] = set()
"""Libraries in this process, by runtime and hash: the runtime's registry refuses a second copy."""


def list_plugins(options: Mapping[str, Any]) -> tuple[Path, ...]:
    return tuple(Path(part.strip()) for part in options["plugins"].split(",") if part.strip())


def require_plugins(options: Mapping[str, Any]) -> None:
    """Raises BadInputError for a path that is no readable file, before anything runs."""
    for path in list_plugins(options):
        if not path.is_file():
            raise BadInputError(f"option plugins={options['plugins']}: no such file: {path}")
        with read_as_user_file(path, "a plugin library"):
            hash_file(path)


def describe_plugins(options: Mapping[str, Any]) -> list[str]:
    """`NAME sha256 HASH` of each, for the artifact's key and its record: where the files lie says nothing about the engine."""
    return [f"{path.name} sha256 {hash_file(path)}" for path in list_plugins(options)]


def copy_plugins(options: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """Copies the libraries into an artifact's folder; returns the names of the copies."""
    names = []
    for number, path in enumerate(list_plugins(options)):
        names.append(f"{PREFIX}{number}-{path.name}")
        shutil.copyfile(path, directory / names[-1])
    return tuple(names)


def load_plugins(registry: Any, files: Iterable[Path], library: str, logger: Any) -> None:
    """Loads libraries once per process, which runs their code. Raises BadInputError if one is refused."""
    for file in files:
        known = library, hash_file(file)
        if known in _LOADED:
            continue
        if registry.load_library(str(file)) is None:
            reason = escape(logger.first_error)[:200] or "no reason given"
            raise BadInputError(
                f"{library} cannot load {file.name} as a plugin library: {reason}\ngive a library with plugin creators for {library}"
            )
        _LOADED.add(known)
