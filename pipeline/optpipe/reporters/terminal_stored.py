"""What is stored, on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import bytes_text, duration_text


def entries_table(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per entry, and the sum."""
    if not entries:
        return Text("nothing stored yet; `optpipe build MODEL` comes first")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "kind", "model", "backend", "precision"):
        table.add_column(name)
    table.add_column("size", justify="right")
    table.add_column("created (UTC)")
    for each in entries:
        backend = f"{each['backend']} ({each['device']})" if each["backend"] else ""
        created = each["created"].replace("T", " ").removesuffix("+00:00")
        size = bytes_text(each["size_bytes"])
        table.add_row(each["id"], each["kind"], each["model"] or "", backend, each["precision"] or "", size, created)
    total = bytes_text(sum(each["size_bytes"] for each in entries))
    return Group(table, Text(f"{len(entries)} entries, {total}"))


def entry_text(entry: Mapping[str, Any]) -> RenderableType:
    """One entry whole."""
    made_in = duration_text(entry["seconds"] * 1e9)
    lines = [f"{entry['kind']}-{entry['id']}  {entry['model'] or ''}", f"made in {made_in} by  {entry['command']}"]
    if entry["parents"]:
        lines.append(f"from  {', '.join(entry['parents'])}")
    lines += [f"{each['sha256']}  {bytes_text(each['size_bytes']):>9}  {name}" for name, each in entry["files"].items()]
    proof = entry["info"].get("precision_proof")
    if proof:
        lines.append(
            f"precision  {entry['precision']}: {'proven' if proof['proven'] else 'NOT proven'}, {proof['reason']}"
        )
    weights = entry["info"].get("weights")
    if weights:
        lines.append(f"weights  {weights['source']} {weights['sha256']}")
    packages = ", ".join(f"{name} {version}" for name, version in entry["environment"]["packages"].items())
    return Group(*map(Text, [*lines, f"with  {packages}", f"path  {entry['path']}"]))


def removed_text(record: Mapping[str, Any]) -> RenderableType:
    """What went, or would go."""
    verb = "would remove" if record["dry_run"] else "removed"
    freed = bytes_text(record["freed_bytes"] + record.get("scratch_bytes", 0))
    return Group(
        *(Text(f"{verb} {name}") for name in record["removed"]),
        Text(f"{verb} {len(record['removed'])} entries, {freed}"),
    )
