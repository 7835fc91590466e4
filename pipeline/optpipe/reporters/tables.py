"""How tables look on the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


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
