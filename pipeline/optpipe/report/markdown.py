"""Pages and documents as GitHub-flavored Markdown, without figures."""

from collections.abc import Iterable, Iterator, Sequence

from optpipe.core.errors import escape
from optpipe.report.document import Cell, Column, ColumnKind, Page, Part, Section, Sentence, Table

MARKS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "⚠️"}


def render_page(page: Page) -> str:
    """Renders a report for a pull request or a CI step summary."""
    heading = f"{MARKS[page.verdict]} {page.verdict}: {page.title}" if page.verdict else page.title
    lines = [
        f"## {_escape(heading)}",
        "",
        _escape(page.answer),
        "",
        *([_escape(page.caution), ""] if page.caution else []),
        *_render_parts((*page.alerts, *page.sections)),
    ]
    return "\n".join(lines)


def _render_parts(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        match part:
            case Sentence():
                yield from _render_sentence(part)
            case Table():
                yield from _render_table(part)
            case Section() if part.folded:
                yield from (f"<details><summary>{_escape(part.title)}</summary>", "")
                yield from _render_parts(part.parts)
                yield from ("</details>", "")
            case Section() if lines := list(_render_parts(part.parts)):
                yield from (f"### {_escape(part.title)}", "", *lines)


def _render_sentence(sentence: Sentence) -> Iterator[str]:
    """A paragraph; a quotation if it has a label."""
    label = f"**{_escape(sentence.label)}** " if sentence.label else ""
    remedy = f" → {_escape(sentence.remedy)}" if sentence.remedy else ""
    quote = "> " if sentence.label else ""
    yield f"{quote}{label}{_escape(sentence.text)}{remedy}"
    yield from (f"{quote}- {_escape(detail)}" for detail in sentence.details)
    yield ""


def _render_table(table: Table) -> Iterator[str]:
    shown = table.list_columns()
    columns = [table.columns[at] for at in shown]
    rows = [[_format_cell(row[at], table.columns[at]) for at in shown] for row in table.rows]
    right = [at for at, column in enumerate(columns) if column.kind is ColumnKind.FIGURE]
    if table.title:
        yield from (f"**{_escape(table.title)}**", "")
    yield from render_table_lines([column.heading for column in columns], rows, right)
    yield ""
    if table.caption:
        yield from (_escape(table.caption), "")


def _format_cell(cell: Cell, column: Column) -> str:
    """Value and note on one line; a dash for a figure that was not measured."""
    text = cell.text
    if column.kind is ColumnKind.NAME:
        text = f"`{text}`"
    elif column.kind is ColumnKind.STATE and text in MARKS:
        text = f"{MARKS[text]} {text}"
    elif column.kind is ColumnKind.FIGURE and not text:
        return "–"
    bare = column.kind is ColumnKind.FIGURE or not cell.note or cell.note.startswith("→")
    note = cell.note if bare else f"({cell.note})"
    return " ".join(filter(None, (text, note)))


def render_table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if at in right else "---" for at in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(_escape(cell) for cell in row) + " |"


def _escape(text: str) -> str:
    """`text` on one line, in which names from outside are no columns, no HTML, and no links or pictures."""
    line = escape(text.replace("\n", " ")).replace("|", "\\|").replace("<", "&lt;")
    return line.replace("](", "]\\(").replace("][", "]\\[")
