"""Renders a document for the width of the terminal: columns that do not fit move below their row, so that no cell wraps."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from optpipe.report.document import (
    Cell,
    Column,
    ColumnKind,
    Document,
    Figure,
    Part,
    Section,
    Sentence,
    Table,
    Tone,
    clean_text,
)

STYLES = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.BAD: "red",
    Tone.DOUBTFUL: "yellow",
    Tone.FAINT: "dim",
    Tone.STRONG: "bold",
}
GAPS = "   ", "  "
"""Gaps between columns; the second one if the first is too wide."""
NARROW = 12
"""Text becomes no narrower than this."""


def print_document(document: Document, console: Console) -> None:
    blank = True
    for line in _render_parts(document, console, console.width):
        if line.plain or not blank:
            console.print(line)
        blank = not line.plain


def text_from_document(document: Document, width: int = 100) -> str:
    """The document as `print_document` prints it, without colors."""
    console = Console(highlight=False, markup=False, width=width, color_system=None)
    with console.capture() as written:
        print_document(document, console)
    return written.get().rstrip()


def _render_parts(parts: Iterable[Part], console: Console, width: int) -> Iterator[Text]:
    for part in parts:
        match part:
            case Sentence():
                yield from _render_sentence(part, console, width)
            case Table():
                yield from _render_table(part, console, width)
            case Figure():
                yield Text(clean_text(f"{part.title}: {part.caption}"))
            case Section():
                yield Text()
                yield Text(clean_text(part.title), style="bold")
                yield from _render_parts(part.parts, console, width)


def _render_sentence(sentence: Sentence, console: Console, width: int) -> Iterator[Text]:
    style = STYLES[sentence.tone]
    faint = sentence.tone is Tone.FAINT
    text = Text(style=style if faint or not sentence.label else "")
    if sentence.label:
        text.append(clean_text(sentence.label), style=style if faint else f"bold {style}").append(
            "  "
        )
    yield text.append(clean_text(sentence.text))
    for detail in sentence.details:
        yield from _indent(Text(clean_text(detail), style="dim" if faint else ""), console, width)
    if sentence.remedy:
        remedy = Text(f"→ {clean_text(sentence.remedy)}", style="dim")
        yield from _indent(remedy, console, width) if sentence.details else [remedy]


def _indent(text: Text, console: Console, width: int) -> Iterator[Text]:
    for line in text.wrap(console, max(width - 4, NARROW), overflow="fold"):
        line.rstrip()
        yield Text("    ").append_text(line)


def _render_table(table: Table, console: Console, width: int) -> Iterator[Text]:
    used = table.list_columns()
    shared = [
        at
        for at in used
        if table.columns[at].shared and len({row[at].text for row in table.rows}) == 1
    ]
    shown = [at for at in used if at not in shared]
    title = ": ".join(
        part for part in (table.title, ", ".join(table.rows[0][at].text for at in shared)) if part
    )
    yield Text()
    if title:
        yield Text(clean_text(title), style="bold")
    if shown:
        yield from _render_rows(table, shown, console, width)
    if table.caption:
        yield Text(clean_text(table.caption), style="dim")
    yield Text()


def _render_rows(table: Table, shown: list[int], console: Console, width: int) -> Iterator[Text]:
    columns = table.columns
    heads = [Text(clean_text(column.heading), style="bold") for column in columns]
    rows = [
        [_text_from_cell(cell, column) for cell, column in zip(row, columns, strict=True)]
        for row in table.rows
    ]
    natural = [
        max(map(_measure, (heads[at], *(row[at] for row in rows)))) for at in range(len(columns))
    ]
    gap = next(
        (gap for gap in GAPS if sum(natural[at] + len(gap) for at in shown) <= width + len(gap)),
        GAPS[-1],
    )
    folded: list[int] = []
    while sum(natural[at] + len(gap) for at in shown) > width + len(gap):
        movable = [at for at in shown[1:] if columns[at].rank] or shown[2:]
        if not movable:
            break
        moved = max(movable, key=lambda at: (columns[at].rank, natural[at]))
        shown.remove(moved)
        folded.append(moved)
    widths = [natural[at] for at in shown]
    while sum(widths) > max(
        width - len(gap) * (len(shown) - 1), len(widths)
    ):  # no more columns can move below
        widths[max(range(len(widths)), key=widths.__getitem__)] -= 1
    right = [columns[at].kind is ColumnKind.FIGURE for at in shown]
    yield from _join_cells([heads[at] for at in shown], widths, right, gap, console)
    yield Text("─" * (sum(widths) + len(gap) * (len(widths) - 1)), style="dim")
    for row, cells in zip(rows, table.rows, strict=True):
        yield from _join_cells([row[at] for at in shown], widths, right, gap, console)
        below = [at for at in sorted(folded) if cells[at].text or cells[at].note]
        rest = [f"{columns[at].heading}: {' '.join(row[at].plain.split())}" for at in below]
        lines: list[str] = []
        for part in rest:
            if lines and cell_len(lines[-1]) + cell_len(part) + 2 <= width - 4:
                lines[-1] += f"; {part}"
            else:
                lines.append(part)
        for line in lines:
            yield from _indent(Text(line, style="dim"), console, width)


def _text_from_cell(cell: Cell, column: Column) -> Text:
    text = Text(clean_text(cell.text), style=STYLES[cell.tone])
    if column.kind is ColumnKind.FIGURE:
        return (
            text.append(f" {clean_text(cell.note)}" if cell.note else "")
            if cell.text
            else Text("–", style="dim")
        )
    return (
        text.append(f"\n{clean_text(cell.note)}" if cell.text else clean_text(cell.note))
        if cell.note
        else text
    )


def _measure(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def _join_cells(
    cells: Sequence[Text], widths: Sequence[int], right: Sequence[bool], gap: str, console: Console
) -> Iterator[Text]:
    """One row, with as many lines as its highest cell."""
    wrapped = [
        cell.wrap(console, width, overflow="fold")
        for cell, width in zip(cells, widths, strict=True)
    ]
    for number in range(max(map(len, wrapped))):
        line = Text()
        for at, lines in enumerate(wrapped):
            part = lines[number] if number < len(lines) else Text()
            part.rstrip()
            space = " " * (widths[at] - part.cell_len)
            line.append(gap if at else "").append(space if right[at] else "")
            line.append_text(part).append("" if right[at] else space)
        line.rstrip()
        yield line
