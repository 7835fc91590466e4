"""Listing and removing what is stored."""

import fcntl
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from optpipe.errors import BadInputError
from optpipe.workspace.manifest import MANIFEST, find_damage
from optpipe.workspace.runs import list_run_folders, load_run, require_unchanged
from optpipe.workspace.store import Entry, Store, measure_folder_bytes

_KEPT = ("artifact",)
"""Entries of these kinds stay, and so does all that they were made from."""
_COMPANIONS = ("reference", "verification")
"""Entries of these kinds stay as long as all that they were made from: they are what bench and signoff compare outputs with."""


def record_from_entry(entry: Entry) -> dict[str, Any]:
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


def document_from_store(store: Store) -> dict[str, Any]:
    """The JSON document of `optpipe ls`."""
    entries, damaged = store.scan_entries()
    return {
        "workspace": str(store.workspace),
        "entries": [record_from_entry(entry) for entry in sorted(entries, key=lambda each: each.manifest.created)],
        "damaged": [folder.name for folder in damaged],
        "runs": [record_from_run(folder) for folder in list_run_folders(store.workspace)],
    }


def record_from_run(folder: Path) -> dict[str, Any]:
    """One run's line of `optpipe ls`."""
    record = {"run_id": folder.name, "size_bytes": measure_folder_bytes(folder), "path": str(folder)}
    try:
        manifest = load_run(folder).manifest
    except BadInputError:
        status = "damaged" if (folder / MANIFEST).is_file() else "unfinished"
        return {**record, "kind": folder.name.partition("-")[0], "status": status, "command": None}
    return {**record, "kind": manifest["kind"], "status": manifest["status"], "command": manifest["command"]}


def describe_run(folder: Path) -> dict[str, Any]:
    """All that `optpipe show` says of a run. Raises BadInputError where it is not as it was written."""
    run = load_run(folder)
    require_unchanged(run)
    return {**record_from_run(folder), **run.manifest}


def describe_entry(entry: Entry) -> dict[str, Any]:
    """All that `optpipe show` says."""
    manifest = entry.manifest
    return {
        **record_from_entry(entry),
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


def remove_stored(store: Store, prefix: str, *, with_dependents: bool) -> dict[str, Any]:
    """Removes one entry; raises `BadInputError` where others were made from it and are not to go too."""
    folder = find_run(store, prefix)
    if folder is not None:
        return _remove(store, [folder], dry_run=False)
    entry = store.find(prefix)
    dependents = _find_dependents(entry.id, store.list_entries())
    if dependents and not with_dependents:
        names = ", ".join(each.path.name for each in dependents[:3])
        count = "1 entry" if len(dependents) == 1 else f"{len(dependents)} entries"
        raise BadInputError(
            f"{entry.path.name} has {count} made from it ({names}); pass --with-dependents to remove them as well"
        )
    with store.alone():
        return _remove(store, [each.path for each in (*reversed(dependents), entry)], dry_run=False)


def find_run(store: Store, prefix: str) -> Path | None:
    """The one run or damaged entry whose name, or id, starts with `prefix`; None where an entry may be meant."""
    entries, damaged = store.scan_entries()
    if any(entry.fits(prefix) for entry in entries):
        return None
    folders = [*damaged, *list_run_folders(store.workspace)]
    found = [each for each in folders if each.name.startswith(prefix) or each.name.partition("-")[2].startswith(prefix)]
    if len(found) > 1:
        raise BadInputError(
            f"'{prefix}' matches {len(found)} runs ({', '.join(each.name for each in found[:5])}); use a longer prefix"
        )
    return found[0] if found else None


def _find_dependents(ident: str, entries: Iterable[Entry]) -> list[Entry]:
    """Everything made from an entry, nearest first."""
    entries = list(entries)
    found: list[Entry] = []
    wave = {ident}
    while wave:
        nearer = [each for each in entries if wave & set(each.manifest.parents) and each not in found]
        found += nearer
        wave = {each.id for each in nearer}
    return found


def collect_garbage(store: Store, *, dry_run: bool) -> dict[str, Any]:
    """Removes scratch folders of dead runs, damaged entries, and what no artifact needs.

    Raises StageError while another process makes entries: no artifact needs them yet.
    """
    with nullcontext() if dry_run or not store.workspace.is_dir() else store.alone():
        return _collect_garbage(store, dry_run=dry_run)


def _collect_garbage(store: Store, *, dry_run: bool) -> dict[str, Any]:
    entries, broken = store.scan_entries()
    by_id = {entry.id: entry for entry in entries}
    needed: set[str] = set()
    wave = [
        entry for entry in entries if entry.manifest.kind in _KEPT and find_damage(entry.path, entry.manifest) is None
    ]
    while wave:
        needed |= {entry.id for entry in wave}
        wave = [
            by_id[parent]
            for entry in wave
            for parent in entry.manifest.parents
            if parent in by_id and parent not in needed
        ]
    while companions := {
        entry.id
        for entry in entries
        if entry.manifest.kind in _COMPANIONS and entry.id not in needed and set(entry.manifest.parents) <= needed
    }:
        needed |= companions
    unneeded = [entry.path for entry in entries if entry.id not in needed]
    record = _remove(store, [*unneeded, *broken], dry_run=dry_run)
    record["scratch_bytes"] = _sweep(store, dry_run=dry_run)
    return record


def _remove(store: Store, folders: list[Path], *, dry_run: bool) -> dict[str, Any]:
    freed = sum(measure_folder_bytes(each) if dry_run else store.remove_folder(each) for each in folders)
    return {"removed": [each.name for each in folders], "freed_bytes": freed, "dry_run": dry_run}


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
            freed += measure_folder_bytes(scratch)
            if not dry_run:
                shutil.rmtree(scratch)
    return freed
