from collections.abc import Iterator, Mapping
from typing import Any

from optpipe.backends.registry import BACKENDS
from optpipe.core.entries import EngineLayers
from optpipe.core.precision import MixedPrecision, Placement
from optpipe.core.quantity import format_bytes, format_count, format_duration
from optpipe.core.records import record_from_plain
from optpipe.models.artifacts.housekeeping import EntryDetails, Removal, StoreListing
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
from optpipe.workspace.files import FileHash

SHOWN_LAYERS = 20


def document_from_listing(listing: StoreListing) -> Document:
    entries, runs = listing.entries, listing.runs
    if not (entries or listing.damaged or runs):
        return make_document([Sentence("nothing stored yet; start with `optpipe build MODEL`")])
    return make_document(
        [
            *(_tabulate_entries(listing) if entries else ()),
            *(
                Sentence(f"{name}; optpipe store rm {name}, or optpipe store gc, removes it", Tone.BAD, "damaged")
                for name in listing.damaged
            ),
            *(_tabulate_runs(listing) if runs else ()),
        ]
    )


def _tabulate_entries(listing: StoreListing) -> Iterator[Table | Sentence]:
    columns: list[Column | str] = [
        Column("id", ColumnKind.NAME), "kind", "model", "backend", "precision", figure_column("size"), "created (UTC)",
    ]  # fmt: skip
    rows = [
        (
            each.id,
            each.kind,
            each.model,
            f"{each.backend} ({each.device})" if each.backend else "",
            each.precision,
            format_bytes(each.size_bytes),
            str(each.created)[:19].replace("T", " "),
        )
        for each in listing.entries
    ]
    yield make_table(columns, rows)
    total = format_bytes(sum(each.size_bytes for each in listing.entries))
    yield Sentence(f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}, {total}")


def _tabulate_runs(listing: StoreListing) -> Iterator[Table | Sentence]:
    rows = [
        (
            each.id,
            Cell(each.status, Tone.PLAIN if each.status == "complete" else Tone.DOUBTFUL),
            format_bytes(each.size_bytes),
            each.command,
        )
        for each in listing.runs
    ]
    yield make_table((Column("run", ColumnKind.NAME), "status", figure_column("size"), Column("command", rank=0)), rows)
    total = format_bytes(sum(each.size_bytes for each in listing.runs))
    yield Sentence(f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {total}")


def _list_files(files: Mapping[str, FileHash]) -> Iterator[Sentence]:
    return (Sentence(f"{file.sha256}  {format_bytes(file.size_bytes):>9}  {name}") for name, file in files.items())


def document_from_entry(found: EntryDetails) -> Document:
    entry, manifest, info = found.entry, found.manifest, found.manifest.info
    weights, backend = info.get("weights"), BACKENDS.get(info.get("backend", ""))
    packages = ", ".join(f"{name} {version}" for name, version in manifest.environment.packages.items())
    parents = ", ".join(dict.fromkeys(manifest.parents))
    verb = "made" if manifest.status == "complete" else manifest.status
    seconds = format_duration(manifest.seconds * 1e9)
    return make_document(
        [
            Sentence(f"{manifest.name}  {entry.model or ''}"),
            Sentence(f"{verb} {manifest.started_utc[:19]} in {seconds} by  {manifest.command}"),
            Sentence(parents, Tone.STRONG, "from") if parents else None,
            *_list_files(manifest.files),
            *(_describe_proof(proof, found) if (proof := info.get("precision_proof")) else ()),
            *_describe_kept(found),
            Sentence(str(found.chosen), Tone.STRONG, "chosen") if found.chosen else None,
            *(map(Sentence, backend.describe_details(info.get("details", {}))) if backend else ()),
            *(Sentence(str(each), Tone.STRONG, "remark") for each in info.get("remarks", ())),
            Sentence(f"{weights['source']} {weights['sha256']}", Tone.STRONG, "weights") if weights else None,
            Sentence(packages, Tone.STRONG, "with") if packages else None,
            Sentence(str(entry.path), Tone.STRONG, "path"),
            *(_list_layers(found.layers) if found.layers is not None else ()),
        ]
    )


def _describe_proof(proof: Mapping[str, Any], found: EntryDetails) -> Iterator[Sentence]:
    tone, word = (Tone.STRONG, "proven") if proof["proven"] else (Tone.BAD, "NOT proven")
    yield Sentence(f"{found.entry.precision}: {word}, {proof['reason']}", tone, "precision")
    recorded = proof.get("placement")
    placement = None if recorded is None else record_from_plain(recorded, Placement, found.entry.path)
    if placement is not None and placement.count:
        yield Sentence(format_placement(placement), Tone.DOUBTFUL, "elsewhere")


def _describe_kept(found: EntryDetails) -> Iterator[Sentence]:
    """Layers in floating point: of a build within a budget, or of an INT8 or FP8 graph."""
    if recorded := found.manifest.info.get("mixed"):
        mixed = record_from_plain(recorded, MixedPrecision, found.entry.path)
        details = tuple(
            f"{each.layer} ({each.op}), {format_count(each.macs)} MACs: {each.reason}" for each in mixed.kept
        )
        yield Sentence(format_mixed(mixed), Tone.STRONG, "mixed", details)
        return
    yield from (Sentence(f"{each.layer}: {each.reason}", Tone.STRONG, "kept") for each in found.kept[:SHOWN_LAYERS])
    if (more := len(found.kept) - SHOWN_LAYERS) > 0:
        yield Sentence(f"{more} more layers; --json lists all", Tone.FAINT, "kept")


def _list_layers(found: EngineLayers) -> Iterator[Table | Sentence]:
    counted = ", ".join(f"{count} {kind}" for kind, count in found.count_types().items())
    rows = [
        (each.name, each.op, ", ".join(each.inputs), ", ".join(each.outputs), each.tactic)
        for each in found.layers[:SHOWN_LAYERS]
    ]
    title = f"{len(found.layers)} layers ({counted}), from the {found.origin}"
    yield make_table(("layer", "operation", "in", "out", "tactic"), rows, title=title)
    if (more := len(found.layers) - SHOWN_LAYERS) > 0:
        yield Sentence(f"{more} more layers; --json lists all", Tone.FAINT)


def document_from_removal(removal: Removal) -> Document:
    verb, count = "would remove" if removal.dry_run else "removed", len(removal.removed)
    freed = format_bytes(removal.freed_bytes + removal.scratch_bytes)
    return make_document(
        [
            *(Sentence(f"{verb} {name}") for name in removal.removed),
            Sentence(f"{verb} {count} folder{'' if count == 1 else 's'}, {freed}"),
        ]
    )
