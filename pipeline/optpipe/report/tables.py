"""How tables look on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Columns = Sequence[tuple[str, Sequence[str | Text]]]
"""Names with their cells."""


def make_table(*left: str, right: Sequence[str] = (), last: Sequence[str] = (), dense: bool = False) -> Table:
    """Columns of text, of figures, and of text again; `dense` leaves one space between them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if dense else (0, 1))
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    for name in last:
        table.add_column(name, overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class FittingTable:
    """A table that leaves out whole columns, and says which, where the terminal would cut into figures and verdicts."""

    columns: Columns
    text: Sequence[str]
    """The names of columns of text; the others hold figures."""
    droppable: Sequence[str]
    """What a narrow terminal goes without, in this order."""
    dense: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, dropped = list(self.columns), []
        for name in self.droppable:
            if console.measure(self._draw(kept), options=options.update(width=10_000)).maximum <= options.max_width:
                break
            dropped += [each for each, _ in kept if each == name]
            kept = [each for each in kept if each[0] != name]
        yield self._draw(kept)
        if dropped:
            yield Text(f"hidden on this narrow terminal: {', '.join(dropped)} (see --json)", style="dim")

    def _draw(self, columns: Columns) -> Table:
        table = make_table(dense=self.dense)
        for name, _ in columns:
            if name in self.text:
                table.add_column(name, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for cells in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*cells)
        return table
