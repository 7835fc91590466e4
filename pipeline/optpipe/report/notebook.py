"""Renders a document as a piece of HTML for a notebook's output, which has its own style and no scripts."""

from collections.abc import Iterable, Iterator

from markupsafe import Markup, escape

from optpipe.report.document import Cell, Document, Figure, Part, Section, Sentence, Table, Tone
from optpipe.report.document import ColumnKind as Kind

COLORS = {Tone.GOOD: "#0b6e4f", Tone.BAD: "#b3261e", Tone.DOUBTFUL: "#8a5a00"}
"""Of the report; other tones keep the notebook's color."""


def html_from_document(document: Document) -> str:
    return str(Markup('<div class="optpipe">{}</div>').format(_join(_render_parts(document))))


def _join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _render_parts(parts: Iterable[Part]) -> Iterator[Markup]:
    for part in parts:
        match part:
            case Sentence():
                yield _render_sentence(part)
            case Table():
                yield _render_table(part)
            case Figure():
                yield Markup("<p>{}: {}</p>").format(part.title, part.caption)
            case Section():
                inner = _join(_render_parts(part.parts))
                yield Markup("<h4>{}</h4>{}").format(part.title, inner)


def _paint(text: str, tone: Tone) -> Markup:
    if tone is Tone.STRONG:
        return Markup("<b>{}</b>").format(text)
    if tone is Tone.FAINT:
        return Markup("<small>{}</small>").format(text)
    if tone not in COLORS:
        return escape(text)
    return Markup('<b style="color:{}">{}</b>').format(COLORS[tone], text)


def _render_sentence(sentence: Sentence) -> Markup:
    if sentence.label:
        text = _paint(sentence.label, sentence.tone) + Markup(" {}").format(sentence.text)
    else:
        text = _paint(sentence.text, sentence.tone)
    more = [*sentence.details, *([f"→ {sentence.remedy}"] if sentence.remedy else [])]
    below = _join(Markup("<br><small>{}</small>").format(line) for line in more)
    return Markup("<p>{}{}</p>").format(text, below)


def _render_table(table: Table) -> Markup:
    shown = table.list_columns()
    head = _join(Markup("<th>{}</th>").format(table.columns[at].heading) for at in shown)
    rows = _join(
        Markup("<tr>{}</tr>").format(
            _join(_render_cell(row[at], table.columns[at].kind) for at in shown)
        )
        for row in table.rows
    )
    title = Markup("<caption>{}</caption>").format(table.title) if table.title else Markup("")
    caption = (
        Markup("<p><small>{}</small></p>").format(table.caption) if table.caption else Markup("")
    )
    return Markup("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}").format(
        title, head, rows, caption
    )


def _render_cell(cell: Cell, kind: Kind) -> Markup:
    text = _paint(cell.text, cell.tone)
    if kind is Kind.NAME:
        text = Markup("<code>{}</code>").format(cell.text)
    if cell.note:
        text += Markup(" <small>{}</small>").format(cell.note)
    side = "right" if kind is Kind.FIGURE else "left"
    return Markup('<td style="text-align:{}">{}</td>').format(side, text)
