"""A diagnosis on the terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.report.tables import make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.build.doctor import BackendOption, ToolStatus


def render_diagnosis(findings: "Sequence[ToolStatus]") -> RenderableType:
    """What is here with its version and limits; then what is missing, what it would add, and how to get it."""
    table = make_table("", "tool", "version", "good for", "limits here")
    for each in (each for each in findings if each.found):
        table.add_row(Text("✓", style="green"), each.name, each.version, each.adds, each.note or "")
    missing = [each for each in findings if not each.found]
    lines: list[RenderableType] = [table]
    for each in missing:
        lines.append(Text(f"missing  {each.name}: would add {each.adds}", style="yellow"))
        lines += [Text(f"         {text}") for text in (each.note, each.install) if text]
    return Group(*lines)


def render_options(options: "Sequence[BackendOption]") -> RenderableType:
    """A row for each option: how to give it, its default, and what it does."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("--option", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("taken by", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for each in options:
        default = str(each.default).lower() if isinstance(each.default, bool) else str(each.default) or "none"
        choices = f" ({', '.join(each.choices)})" if each.choices else ""
        table.add_row(f"{each.backend}.{each.name}", default, each.taken_by, Text(each.help + choices))
    return table
