"""A verdict and a verification on the terminal."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.core.units import format_bytes
from optpipe.reporters.answer import format_verdict_summary
from optpipe.reporters.records import VERDICT_STYLES, format_observed


def render_verdict(verdict: Mapping[str, Any], dossier: str | None) -> RenderableType:
    """The verdict, why, and what to do."""
    color = VERDICT_STYLES[verdict["verdict"]]
    lines: list[RenderableType] = [
        Text.assemble((verdict["verdict"], f"bold {color}"), "  ", format_verdict_summary(verdict))
    ]
    lines += [
        Text(f"WAIVED  {one['name']} is {one['verdict']} and does not count: {one['waived']}", style="bold red")
        for one in verdict["criteria"]
        if one["waived"]
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("criterion", "verdict", "observed", "limit", "why"):
        table.add_column(name, overflow="fold")
    for one in verdict["criteria"]:
        why = Text(one["reason"])
        if one["remedy"] and one["verdict"] != "PASS":
            why.append(f"\n→ {one['remedy']}", style="dim")
        said = Text(one["verdict"], style=VERDICT_STYLES[one["verdict"]])
        said.append(" waived" if one["waived"] else "", style="bold red")
        table.add_row(one["name"], said, format_observed(one), str(one["limit"]), why)
    lines.append(table)
    for note in verdict.get("notes", ()):
        lines.append(Text.assemble((f"note  {note['message']}", "yellow"), (f"\n→ {note['remedy']}", "dim")))
    if dossier is not None:
        lines.append(Text(f"dossier  {dossier}"))
        lines.append(Text(f"verify it anywhere  {shlex.join(['optpipe', 'verify', dossier])}", style="dim"))
    return Group(*lines)


def render_pipeline_run(document: Mapping[str, Any]) -> RenderableType:
    """The verdict, after what became of each step."""
    lines = [
        Text(
            f"{one['status']:<8} {one['name']:<11} {one['seconds']:.1f} s"
            + (f"  {one['reason']}" if one["reason"] else "")
        )
        for one in document["steps"]
    ]
    return Group(*lines, render_verdict(document, document["dossier"]))


NOT_RECOMPUTED = "→ changed before it was sealed, or made by a different version of optpipe: measure and sign off again"


def render_verification(record: Mapping[str, Any]) -> RenderableType:
    """Whether a dossier is intact, and the verdict that its raw files give."""
    if not record["intact"]:
        problems = [Text(f"  {one}") for one in record["problems"][:20]]
        more = len(record["problems"]) - 20
        tail = [Text(f"  and {more} more", style="dim")] if more > 0 else []
        why = ": the seal is intact, but not every figure follows from the raw files" if record["as_sealed"] else ""
        advice = [Text(NOT_RECOMPUTED)] if record["as_sealed"] else []
        return Group(Text(f"NOT INTACT  {record['dossier']}{why}", style="bold red"), *problems, *tail, *advice)
    signed = record["signature"]
    head = Text.assemble(
        ("intact", "green"), f"  {record['files']} files, {format_bytes(record['size_bytes'])}, {signed}"
    )
    return Group(head, render_verdict(record["recomputed"], None))
