"""Loaders that a session plan can name."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe.backends.base import Session


def session_from_loader(loader: str, arguments: Mapping[str, Any]) -> "Session":
    """Calls `module:function` with `arguments`."""
    module, _, function = loader.partition(":")
    session: Session = getattr(import_module(module), function)(**arguments)
    return session


def session_from_store(workspace: str, entry: str, options: Mapping[str, Any]) -> "Session":
    """An artifact of the store, after every byte was checked against its manifest: deserializing runs code."""
    from optpipe.backends.registry import BACKENDS
    from optpipe.core.entries import ArtifactInfo
    from optpipe.workspace.store import Store

    store = Store(Path(workspace))
    found = store.verify_entry(store.find(entry, ArtifactInfo))
    return BACKENDS[found.info.backend].load(found.path, found.info, options)
