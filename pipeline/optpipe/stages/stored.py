"""Listing and removing what is stored."""

import fcntl
import shutil
from collections.abc import Iterable
from typing import Any

from optpipe.core.manifest import damage
from optpipe.core.store import Entry, Store
from optpipe.errors import BadInputError

_KEPT = ("artifact",)
"""Entries of these kinds stay, and so does all that they were made from; everything else goes with them."""


def entry_record(entry: Entry) -> dict[str, Any]:
    """One line of `optpipe ls`."""
    info = entry.info
    return {
        "id": entry.id,
        "kind": entry.manifest.kind,
        "model": info.get("model") or info.get("name"),
        "backend": info.get("backend"),
        "precision": info.get("precision"),
        "device": info.get("device"),
        "size_bytes": entry.size_bytes,
        "created": entry.manifest.created,
        "path": str(entry.path),
    }


def entry_details(entry: Entry) -> dict[str, Any]:
    """All that `optpipe show` says."""
    manifest = entry.manifest
    return {
        **entry_record(entry),
        "files": {
            name: {"sha256": each.sha256, "size_bytes": each.size_bytes} for name, each in manifest.files.items()
        },
        "parents": list(manifest.parents),
        "command": manifest.command,
        "seconds": manifest.seconds,
        "info": dict(manifest.info),
        "recipe": dict(manifest.recipe),
        "environment": dict(manifest.environment),
    }


def removed(store: Store, prefix: str, *, with_dependents: bool) -> dict[str, Any]:
    """Removes one entry; raises `BadInputError` where others were made from it and are not to go too."""
    entry = store.find(prefix)
    dependents = _dependents(entry.id, store.entries())
    if dependents and not with_dependents:
        names = ", ".join(each.path.name for each in dependents[:3])
        message = f"{entry.path.name} has {len(dependents)} entries made from it ({names}); pass --with-dependents to remove them too"
        raise BadInputError(message)
    return _remove(store, [*reversed(dependents), entry], dry_run=False)


def _dependents(ident: str, entries: Iterable[Entry]) -> list[Entry]:
    """Everything made from an entry, nearest first."""
    entries = list(entries)
    found: list[Entry] = []
    wave = {ident}
    while wave:
        nearer = [each for each in entries if wave & set(each.manifest.parents) and each not in found]
        found += nearer
        wave = {each.id for each in nearer}
    return found


def collected(store: Store, *, dry_run: bool) -> dict[str, Any]:
    """Removes scratch folders of dead runs, damaged entries, and what no artifact needs."""
    entries = store.entries()
    by_id = {entry.id: entry for entry in entries}
    needed: set[str] = set()
    wave = [entry for entry in entries if entry.manifest.kind in _KEPT and damage(entry.path, entry.manifest) is None]
    while wave:
        needed |= {entry.id for entry in wave}
        wave = [
            by_id[parent]
            for entry in wave
            for parent in entry.manifest.parents
            if parent in by_id and parent not in needed
        ]
    verified = {e.id for e in entries if e.manifest.kind == "verification" and set(e.manifest.parents) <= needed}
    record = _remove(store, [entry for entry in entries if entry.id not in needed | verified], dry_run=dry_run)
    record["scratch_bytes"] = _sweep(store, dry_run=dry_run)
    return record


def _remove(store: Store, entries: list[Entry], *, dry_run: bool) -> dict[str, Any]:
    freed = sum(entry.size_bytes if dry_run else store.remove(entry) for entry in entries)
    return {"removed": [entry.path.name for entry in entries], "freed_bytes": freed, "dry_run": dry_run}


def _sweep(store: Store, *, dry_run: bool) -> int:
    """Deletes scratch folders whose maker is gone: it holds a lock for as long as it lives."""
    freed = 0
    for scratch in sorted((store.workspace / "tmp").glob("*")):
        lock = store.workspace / "locks" / scratch.name.removesuffix(".removed")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            freed += sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
            if not dry_run:
                shutil.rmtree(scratch)
    return freed
