from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.precision import MixedPrecision, Placement
from optpipe.core.quantity import format_bytes, format_count, format_duration
from optpipe.core.records import json_from_record, record_from_plain
from optpipe.core.wording import Argument, Call
from optpipe.models.artifacts.decisions import find_decision, read_decision
from optpipe.report.document import (
    Cell,
    Column,
    ColumnKind,
    Document,
    Sentence,
    Table,
    Tone,
    figure_column,
    format_mixed,
    format_placement,
    make_document,
    make_table,
)
from optpipe.workspace.entry import MANIFEST, Entry, Manifest, load_run, require_unchanged
from optpipe.workspace.files import (
    delete_tree,
    measure_folder_bytes,
    open_lock,
    try_lock,
    write_bytes,
)
from optpipe.workspace.runs import REMOVED, list_run_folders
from optpipe.workspace.store import TMP, Store

_KEPT = ("artifact", "calibration", "data", "preprocessing")
"""Requested results stay, with everything they were made from: `deploy` needs a run's pipeline, and `calibrate` advises
a build from its table."""
_COMPANIONS = ("reference", "verification")
"""These kinds stay as long as everything they were made from: bench and signoff compare outputs with them."""


@dataclass(frozen=True, slots=True)
class EntrySummary:
    """An entry or a run, whose id is its name. Damaged and unfinished runs have no manifest to read the rest from."""

    id: str
    kind: str
    model: str | None
    backend: str | None
    precision: str | None
    device: str | None
    size_bytes: int
    created: str | None
    path: str
    status: Literal["complete", "interrupted", "unfinished", "damaged"] = "complete"
    command: str | None = None
    model_id: str | None = None
    """The ID of the model's content; None for runs, and for what earlier versions made."""


@dataclass(frozen=True, slots=True)
class StoreListing:
    workspace: str
    entries: tuple[EntrySummary, ...]
    damaged: tuple[str, ...]
    runs: tuple[EntrySummary, ...]


@dataclass(frozen=True, slots=True)
class EntryDetails:
    entry: EntrySummary
    manifest: Manifest
    chosen: str | None = None
    """The loads at which `build --precision auto` found it to be the fastest, and the run; for that run, its choice."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Result of `optpipe store rm` or `optpipe store gc`, also of a dry run."""

    removed: tuple[str, ...]
    freed_bytes: int
    dry_run: bool
    scratch_bytes: int = 0
    """Bytes of scratch folders from killed runs."""


def _list_model_ids(entries: Iterable[Entry[Any]]) -> dict[str, str]:
    """The ID of the content of each stored model, by the ID of its entry."""
    models = (entry for entry in entries if entry.kind == ModelInfo.KIND)
    return {model.id: str(model.manifest.info.get("content") or "") for model in models}


def _summarize(
    entry: Entry[Any], model_ids: Mapping[str, str] = MappingProxyType({})
) -> EntrySummary:
    info, manifest = entry.manifest.info, entry.manifest
    about = (entry.id, *manifest.parents)
    return EntrySummary(
        id=entry.name if manifest.recipe is None else entry.id,
        kind=entry.kind,
        model=info.get("model") or info.get("name"),
        backend=info.get("backend"),
        precision=info.get("precision"),
        device=info.get("device"),
        size_bytes=entry.size_bytes,
        created=manifest.finished_utc,
        path=str(entry.path),
        status=manifest.status,
        command=manifest.command,
        model_id=next((model_ids[parent] for parent in about if model_ids.get(parent)), None),
    )


def describe_entry(entry: Entry[Any], store: Store) -> EntryDetails:
    decided = find_decision(store.workspace, {entry.id})
    chosen = None if decided is None else f"{decided[0].describe(entry.id)} ({decided[1]})"
    return EntryDetails(
        _summarize(entry, _list_model_ids(store.scan_entries()[0])), entry.manifest, chosen
    )


def approve_entry(entry: Entry[Any], store: Store) -> EntryDetails:
    """Lets `entry` be loaded in this workspace although another one made it, as it is now: every byte is checked first."""
    store.approve(store.verify_entry(entry))
    return describe_entry(entry, store)


def list_stored(store: Store) -> StoreListing:
    entries, damaged = store.scan_entries()
    ids = _list_model_ids(entries)
    return StoreListing(
        workspace=str(store.workspace),
        entries=tuple(
            _summarize(entry, ids)
            for entry in sorted(entries, key=lambda entry: entry.manifest.finished_utc)
        ),
        damaged=tuple(folder.name for folder in damaged),
        runs=tuple(map(_summarize_run, list_run_folders(store.workspace))),
    )


def _summarize_run(folder: Path) -> EntrySummary:
    try:
        return _summarize(load_run(folder))
    except BadInputError:
        status: Literal["damaged", "unfinished"] = (
            "damaged" if (folder / MANIFEST).is_file() else "unfinished"
        )
        kind, size = folder.name.partition("-")[0], measure_folder_bytes(folder)
        return EntrySummary(
            folder.name, kind, None, None, None, None, size, None, str(folder), status
        )


def describe_run(folder: Path) -> EntryDetails:
    """Raises BadInputError if the run was modified."""
    run = load_run(folder)
    require_unchanged(run)
    chosen = read_decision(run).describe() if run.kind == "choose" else None
    return EntryDetails(_summarize(run), run.manifest, chosen=chosen)


def remove_stored(store: Store, prefix: str, *, with_dependents: bool) -> Removal:
    """Removes an entry or a run. Raises BadInputError if other entries were made from it and `with_dependents` is not set."""
    folder = find_run(store, prefix)
    if folder is not None:
        if (folder / MANIFEST).is_file() and folder.parent.name == "runs":
            run = load_run(folder)
            noted = json_from_record(replace(run.manifest, files={}))
            write_bytes(store.own_folder(REMOVED) / run.name / MANIFEST, noted)
        return _remove(store, [folder], dry_run=False)
    entry = store.find(prefix)
    dependents = _find_dependents(entry.id, store.list_entries())
    if dependents and not with_dependents:
        names = ", ".join(dependent.path.name for dependent in dependents[:3])
        count = "1 entry" if len(dependents) == 1 else f"{len(dependents)} entries"
        problem = f"{entry.path.name} has {count} made from it ({names})"
        raise BadInputError(
            f"{problem}; pass " + Argument("with_dependents", True) + " to remove them as well"
        )
    with store.exclusive():
        return _remove(
            store, [needless.path for needless in (*reversed(dependents), entry)], dry_run=False
        )


def find_run(store: Store, prefix: str) -> Path | None:
    """The only run or damaged entry whose name or id starts with `prefix`; None if an entry matches."""
    entries, damaged = store.scan_entries()
    if any(entry.matches_id(prefix) for entry in entries):
        return None
    folders = [*damaged, *list_run_folders(store.workspace)]
    runs = [
        folder
        for folder in folders
        if prefix
        and (folder.name.startswith(prefix) or folder.name.partition("-")[2].startswith(prefix))
    ]
    if len(runs) > 1:
        problem = f"'{prefix}' matches {len(runs)} runs ({', '.join(run.name for run in runs[:5])})"
        raise BadInputError(f"{problem}; use a longer prefix")
    return runs[0] if runs else None


def _find_dependents(ident: str, entries: Iterable[Entry[Any]]) -> list[Entry[Any]]:
    entries = list(entries)
    dependents: list[Entry[Any]] = []
    wave = {ident}
    while wave:
        nearer = [
            entry
            for entry in entries
            if wave & set(entry.manifest.parents) and entry not in dependents
        ]
        dependents += nearer
        wave = {dependent.id for dependent in nearer}
    return dependents


def collect_garbage(store: Store, *, dry_run: bool) -> Removal:
    """Removes scratch folders of dead runs, damaged entries, and everything that nothing in _KEPT needs.

    Raises StageError while another process makes entries, which nothing needs yet.
    """
    with nullcontext() if dry_run or not store.workspace.is_dir() else store.exclusive():
        entries, broken = store.scan_entries()
        needed: set[str] = set()
        wave = [entry for entry in entries if entry.kind in _KEPT and entry.find_damage() is None]
        while wave:
            needed |= {entry.id for entry in wave}
            parents = {parent for entry in wave for parent in entry.manifest.parents} - needed
            wave = [entry for entry in entries if entry.id in parents]
        while companions := {
            entry.id
            for entry in entries
            if entry.kind in _COMPANIONS
            and entry.id not in needed
            and set(entry.manifest.parents) <= needed
        }:
            needed |= companions
        unneeded = [entry.path for entry in entries if entry.id not in needed]
        removal = _remove(store, [*unneeded, *broken], dry_run=dry_run)
        return replace(removal, scratch_bytes=_sweep(store, dry_run=dry_run))


def _remove(store: Store, folders: list[Path], *, dry_run: bool) -> Removal:
    freed = sum(
        measure_folder_bytes(folder) if dry_run else store.remove_folder(folder)
        for folder in folders
    )
    return Removal(tuple(folder.name for folder in folders), freed, dry_run)


def _sweep(store: Store, *, dry_run: bool) -> int:
    """Deletes scratch folders whose maker, which holds a lock while it lives, is gone. Raises BadInputError if `tmp` is a link."""
    freed = 0
    for scratch in sorted(store.own_folder(TMP).glob("*")):
        with open_lock(store.lock_path(scratch.name.removesuffix(".removed"))) as file:
            if not try_lock(file):
                continue
            freed += measure_folder_bytes(scratch)
            if not dry_run:
                delete_tree(scratch)
    return freed


def document_from_listing(listing: StoreListing) -> Document:
    entries, runs = listing.entries, listing.runs
    if not (entries or listing.damaged or runs):
        return make_document(
            [Sentence("nothing stored yet; start with `" + Call("build", "MODEL") + "`")]
        )
    return make_document(
        [
            *(_tabulate_entries(listing) if entries else ()),
            *(
                Sentence(
                    f"{name}; "
                    + Call("store rm", name)
                    + ", or "
                    + Call("store gc")
                    + ", removes it",
                    Tone.BAD,
                    "damaged",
                )
                for name in listing.damaged
            ),
            *(_tabulate_runs(listing) if runs else ()),
        ]
    )


def _tabulate_entries(listing: StoreListing) -> Iterator[Table | Sentence]:
    columns: list[Column | str] = [
        Column("id", ColumnKind.NAME),
        "kind",
        "model",
        Column("model ID", rank=2),
        "backend",
        "precision",
        figure_column("size"),
        "created (UTC)",
    ]
    rows = [
        (
            entry.id,
            entry.kind,
            entry.model,
            entry.model_id or "",
            f"{entry.backend} ({entry.device})" if entry.backend else "",
            entry.precision,
            format_bytes(entry.size_bytes),
            str(entry.created)[:19].replace("T", " "),
        )
        for entry in listing.entries
    ]
    yield make_table(columns, rows)
    total = format_bytes(sum(entry.size_bytes for entry in listing.entries))
    yield Sentence(f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}, {total}")


def _tabulate_runs(listing: StoreListing) -> Iterator[Table | Sentence]:
    rows = [
        (
            run.id,
            Cell(run.status, Tone.PLAIN if run.status == "complete" else Tone.DOUBTFUL),
            format_bytes(run.size_bytes),
            run.command,
        )
        for run in listing.runs
    ]
    yield make_table(
        (
            Column("run", ColumnKind.NAME),
            "status",
            figure_column("size"),
            Column("command", rank=2),
        ),
        rows,
    )
    total = format_bytes(sum(run.size_bytes for run in listing.runs))
    yield Sentence(f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {total}")


def document_from_entry(details: EntryDetails) -> Document:
    entry, manifest, info = details.entry, details.manifest, details.manifest.info
    weights = info.get("weights")
    packages = ", ".join(
        f"{name} {version}" for name, version in manifest.environment.packages.items()
    )
    parents = ", ".join(dict.fromkeys(manifest.parents))
    verb, took = (
        "made" if manifest.status == "complete" else manifest.status,
        format_duration(manifest.seconds * 1e9),
    )
    files = [
        (name, format_bytes(file.size_bytes), file.sha256) for name, file in manifest.files.items()
    ]
    return make_document(
        [
            Sentence(f"{manifest.name}  {entry.model or ''}"),
            Sentence(f"{verb} {manifest.started_utc[:19]} in {took} by  {manifest.command}"),
            Sentence(entry.model_id, Tone.STRONG, "model ID") if entry.model_id else None,
            Sentence(parents, Tone.STRONG, "from") if parents else None,
            make_table(("file", figure_column("size"), Column("sha256", rank=2)), files)
            if files
            else None,
            *(_describe_proof(proof, details) if (proof := info.get("precision_proof")) else ()),
            *_describe_mixed(details),
            Sentence(str(details.chosen), Tone.STRONG, "chosen") if details.chosen else None,
            *(Sentence(str(remark), Tone.STRONG, "remark") for remark in info.get("remarks", ())),
            Sentence(f"{weights['source']} {weights['sha256']}", Tone.STRONG, "weights")
            if weights
            else None,
            Sentence(packages, Tone.STRONG, "with") if packages else None,
            Sentence(str(entry.path), Tone.STRONG, "path"),
        ]
    )


def _describe_proof(proof: Mapping[str, Any], details: EntryDetails) -> Iterator[Sentence]:
    tone, word = (Tone.STRONG, "proven") if proof["proven"] else (Tone.BAD, "NOT proven")
    yield Sentence(f"{details.entry.precision}: {word}, {proof['reason']}", tone, "precision")
    for form in proof["share"].get("stored", ()):
        text = f"{form['form']} in {form['count']} layers, computed in {form['type']}"
        yield Sentence(text, Tone.STRONG, "weights stored as")
    recorded = proof.get("placement")
    if recorded and (placement := record_from_plain(recorded, Placement, details.entry.path)).count:
        yield Sentence(format_placement(placement), Tone.DOUBTFUL, "elsewhere")


def _describe_mixed(details: EntryDetails) -> Iterator[Sentence]:
    """The layers that a build within a budget has in floating point."""
    if recorded := details.manifest.info.get("mixed"):
        mixed = record_from_plain(recorded, MixedPrecision, details.entry.path)
        kept = tuple(
            f"{node.layer} ({node.op}), {format_count(node.macs)} MACs: {node.reason}"
            for node in mixed.kept
        )
        yield Sentence(format_mixed(mixed), Tone.STRONG, "mixed", kept)


def document_from_removal(removal: Removal) -> Document:
    verb, count = "would remove" if removal.dry_run else "removed", len(removal.removed)
    freed = format_bytes(removal.freed_bytes + removal.scratch_bytes)
    return make_document(
        [
            *(Sentence(f"{verb} {name}") for name in removal.removed),
            Sentence(f"{verb} {count} folder{'' if count == 1 else 's'}, {freed}"),
        ]
    )
