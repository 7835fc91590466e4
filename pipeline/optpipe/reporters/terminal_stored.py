"""What is stored, on the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_bytes, format_duration


def render_stored(record: Mapping[str, Any]) -> RenderableType:
    """Entries, what is damaged, and runs."""
    entries, damaged, runs = record["entries"], record["damaged"], record["runs"]
    if not (entries or damaged or runs):
        return Text("nothing stored yet; start with `optpipe build MODEL`")
    clean = "optpipe gc"
    broken = [Text(f"damaged  {name}; optpipe rm {name}, or {clean}, removes it", style="red") for name in damaged]
    return Group(*([_render_entries(entries)] if entries else []), *broken, *([_render_runs(runs)] if runs else []))


def _render_runs(runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "status"):
        table.add_column(name, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("command", overflow="fold")
    for each in runs:
        style = "" if each["status"] == "complete" else "yellow"
        status = Text(each["status"], style=style)
        table.add_row(each["run_id"], status, format_bytes(each["size_bytes"]), Text(each["command"] or ""))
    return Group(table, Text(f"{len(runs)} runs, {format_bytes(sum(each['size_bytes'] for each in runs))}"))


def _render_entries(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per entry, and the sum."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "kind", "model", "backend", "precision"):
        table.add_column(name)
    table.add_column("size", justify="right")
    table.add_column("created (UTC)")
    for each in entries:
        backend = f"{each['backend']} ({each['device']})" if each["backend"] else ""
        created = each["created"].replace("T", " ").removesuffix("+00:00")
        size = format_bytes(each["size_bytes"])
        table.add_row(each["id"], each["kind"], each["model"] or "", backend, each["precision"] or "", size, created)
    total = format_bytes(sum(each["size_bytes"] for each in entries))
    return Group(table, Text(f"{len(entries)} entries, {total}"))


def render_run(run: Mapping[str, Any]) -> RenderableType:
    """One run whole."""
    lines = [f"{run['run_id']}  {run['status']}", f"made {run['started_utc']} by  {run['command']}"]
    if run["parents"]:
        lines.append(f"from  {', '.join(run['parents'])}")
    lines += [f"{each['sha256']}  {format_bytes(each['bytes']):>9}  {each['path']}" for each in run["files"]]
    return Group(*map(Text, [*lines, f"path  {run['path']}"]))


def render_entry(entry: Mapping[str, Any]) -> RenderableType:
    """One entry whole."""
    made_in = format_duration(entry["seconds"] * 1e9)
    lines = [f"{entry['kind']}-{entry['id']}  {entry['model'] or ''}", f"made in {made_in} by  {entry['command']}"]
    if entry["parents"]:
        lines.append(f"from  {', '.join(dict.fromkeys(entry['parents']))}")
    lines += [
        f"{each['sha256']}  {format_bytes(each['size_bytes']):>9}  {name}" for name, each in entry["files"].items()
    ]
    proof = entry["info"].get("precision_proof")
    if proof:
        lines.append(
            f"precision  {entry['precision']}: {'proven' if proof['proven'] else 'NOT proven'}, {proof['reason']}"
        )
    lines += list(_describe_tactics(entry["info"].get("tactics") or {}))
    weights = entry["info"].get("weights")
    if weights:
        lines.append(f"weights  {weights['source']} {weights['sha256']}")
    packages = ", ".join(f"{name} {version}" for name, version in entry["environment"]["packages"].items())
    return Group(*map(Text, [*lines, f"with  {packages}", f"path  {entry['path']}"]))


def _describe_tactics(tactics: Mapping[str, Any]) -> Iterator[str]:
    """What computes an INT8 network at each batch size that was measured; `tactics.json` has every layer's."""
    for batch, chosen in tactics.items():
        kernels = ", ".join(f"{name} {count}" for name, count in sorted(chosen["kernels"].items()))
        yield f"tactics  batch {batch}: {format_duration(chosen['sum_us'] * 1e3)} in {kernels}"


def render_removed(record: Mapping[str, Any]) -> RenderableType:
    """What went, or would go."""
    verb = "would remove" if record["dry_run"] else "removed"
    freed = format_bytes(record["freed_bytes"] + record.get("scratch_bytes", 0))
    return Group(
        *(Text(f"{verb} {name}") for name in record["removed"]),
        Text(f"{verb} {len(record['removed'])} folder{'' if len(record['removed']) == 1 else 's'}, {freed}"),
    )
