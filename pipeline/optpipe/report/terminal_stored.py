"""What is stored, on the terminal."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.backends.base import ToolCommand
from optpipe.backends.registry import BACKENDS
from optpipe.core.engine_layers import EngineLayers
from optpipe.core.entries import SkippedLayer
from optpipe.core.errors import escape
from optpipe.core.mixed_precision import MixedPrecision
from optpipe.core.precision import Placement
from optpipe.core.records import record_from_plain
from optpipe.core.units import format_bytes, format_count, format_duration
from optpipe.models.artifacts.housekeeping import (
    EntryDetails,
    EntrySummary,
    Removal,
    RunDetails,
    RunSummary,
    StoreListing,
)
from optpipe.report.records import format_mixed
from optpipe.report.tables import make_table
from optpipe.report.terminal_build import format_placement
from optpipe.workspace.files import FileHash

SHOWN_LAYERS = 20


def render_stored(listing: StoreListing) -> RenderableType:
    """Entries, what is damaged, and runs."""
    if not (listing.entries or listing.damaged or listing.runs):
        return Text("nothing stored yet; start with `optpipe build MODEL`")
    parts: list[RenderableType] = [_render_entries(listing.entries)] if listing.entries else []
    parts += [
        Text(f"damaged  {name}; optpipe store rm {name}, or optpipe store gc, removes it", style="red")
        for name in listing.damaged
    ]
    return Group(*parts, *([_render_runs(listing.runs)] if listing.runs else []))


def _render_runs(runs: Sequence[RunSummary]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "status"):
        table.add_column(name, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("command", overflow="fold")
    for each in runs:
        status = Text(each.status, style="" if each.status == "complete" else "yellow")
        table.add_row(each.run_id, status, format_bytes(each.size_bytes), Text(each.command or ""))
    return Group(
        table,
        Text(f"{len(runs)} run{'' if len(runs) == 1 else 's'}, {format_bytes(sum(each.size_bytes for each in runs))}"),
    )


def _render_entries(entries: Sequence[EntrySummary]) -> RenderableType:
    """One line per entry, and the sum."""
    table = make_table("id", "kind", "model", "backend", "precision", right=("size",), last=("created (UTC)",))
    for each in entries:
        backend = f"{each.backend} ({each.device})" if each.backend else ""
        created = each.created[:19].replace("T", " ")
        size = format_bytes(each.size_bytes)
        table.add_row(each.id, each.kind, each.model or "", backend, each.precision or "", size, created)
    total = format_bytes(sum(each.size_bytes for each in entries))
    return Group(table, Text(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {total}"))


def _format_file(name: str, file: FileHash) -> str:
    return f"{file.sha256}  {format_bytes(file.size_bytes):>9}  {name}"


def render_run(found: RunDetails) -> RenderableType:
    """One run whole."""
    manifest = found.manifest
    lines = [f"{manifest.name}  {manifest.status}", f"made {manifest.started_utc} by  {manifest.command}"]
    if manifest.parents:
        lines.append(f"from  {', '.join(manifest.parents)}")
    lines += [_format_file(name, file) for name, file in manifest.files.items()]
    if found.decision:
        lines.append(f"chosen  {found.decision}")
    return Group(*map(Text, [*lines, f"path  {found.run.path}"]))


def render_entry(found: EntryDetails) -> RenderableType:
    """One entry whole."""
    entry, manifest = found.entry, found.manifest
    made_in = format_duration(manifest.seconds * 1e9)
    lines = [f"{entry.kind}-{entry.id}  {entry.model or ''}", f"made in {made_in} by  {manifest.command}"]
    if manifest.parents:
        lines.append(f"from  {', '.join(dict.fromkeys(manifest.parents))}")
    lines += [_format_file(name, file) for name, file in manifest.files.items()]
    if proof := manifest.info.get("precision_proof"):
        lines.append(
            f"precision  {entry.precision}: {'proven' if proof['proven'] else 'NOT proven'}, {proof['reason']}"
        )
        lines += _describe_placement(proof.get("placement"), entry.path)
    if kept := manifest.info.get("mixed"):
        lines += _describe_mixed(record_from_plain(kept, MixedPrecision, found.entry.path))
    else:
        lines += _describe_kept(found.kept)
    if found.chosen:
        lines.append(f"chosen  {found.chosen}")
    if (backend := BACKENDS.get(manifest.info.get("backend", ""))) is not None:
        lines += backend.describe_details(manifest.info.get("details", {}))
    lines += [f"remark  {each}" for each in manifest.info.get("remarks", ())]
    if weights := manifest.info.get("weights"):
        lines.append(f"weights  {weights['source']} {weights['sha256']}")
    packages = ", ".join(f"{name} {version}" for name, version in manifest.environment.packages.items())
    told = [*map(Text, [*lines, f"with  {packages}", f"path  {entry.path}"])]
    return Group(*told, *([] if found.layers is None else [_render_layers(found.layers)]))


def _describe_placement(recorded: Any, path: str) -> Iterator[str]:
    """The nodes that a runtime left to another execution provider than the one asked for."""
    placement = None if recorded is None else record_from_plain(recorded, Placement, path)
    if placement is not None and placement.count:
        yield f"elsewhere  {format_placement(placement)}"


def _render_layers(found: EngineLayers) -> RenderableType:
    """The first layers of an engine: type in, type out, and the kernel where the inspector told it."""
    counted = ", ".join(f"{count} {kind}" for kind, count in found.count_types().items())
    known = any(each.tactic for each in found.layers)
    table = make_table("layer", "operation", "in", "out", *(["tactic"] if known else []))
    for each in found.layers[:SHOWN_LAYERS]:
        sides = (", ".join(each.inputs), ", ".join(each.outputs))
        tactic = [each.tactic or ""] if known else []
        table.add_row(*(Text(escape(cell)) for cell in (each.name, each.op, *sides, *tactic)))
    more = len(found.layers) - SHOWN_LAYERS
    rest = [Text(f"{more} more layers; --json lists all")] if more > 0 else []
    return Group(Text(f"layers  {len(found.layers)} ({counted}), from the {found.origin}"), table, *rest)


def render_tool_command(found: ToolCommand) -> RenderableType:
    """Ready to paste: notes as comments, then one argument a line."""
    command = " \\\n  ".join(map(shlex.quote, found.arguments))
    return Text("\n".join([*(f"# {note}" for note in found.notes), command]))


def _describe_mixed(mixed: MixedPrecision) -> Iterator[str]:
    """What a build within a budget keeps out of its precision, layer by layer."""
    yield f"mixed  {format_mixed(mixed)}"
    for each in mixed.kept:
        yield f"  kept  {escape(each.layer)} ({escape(each.op)}), {format_count(each.macs)} MACs: {each.reason}"


def _describe_kept(kept: Sequence[SkippedLayer]) -> Iterator[str]:
    """The layers that an INT8 or FP8 graph leaves in floating point."""
    yield from (f"kept  {escape(each.layer)}: {each.reason}" for each in kept[:SHOWN_LAYERS])
    if (more := len(kept) - SHOWN_LAYERS) > 0:
        yield f"kept  {more} more layers; --json lists all"


def render_removed(removal: Removal) -> RenderableType:
    """What went, or would go."""
    verb = "would remove" if removal.dry_run else "removed"
    count = len(removal.removed)
    return Group(
        *(Text(f"{verb} {name}") for name in removal.removed),
        Text(
            f"{verb} {count} folder{'' if count == 1 else 's'}, {format_bytes(removal.freed_bytes + removal.scratch_bytes)}"
        ),
    )
