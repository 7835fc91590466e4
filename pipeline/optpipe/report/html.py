"""Renders a page as one HTML file without external resources."""

import re
from functools import cache, partial
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup

from optpipe.core.quantity import format_bytes
from optpipe.report.document import Cell, Column, ColumnKind, Gauge, Page, Part, Table, clean_text

if TYPE_CHECKING:
    from jinja2 import Environment
MARKS = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?"}
GAUGE_WIDTH, GAUGE_HEIGHT = 160, 14
_COMMAND = re.compile(r"(^|[:;] )(optpipe [a-z]+(?: (?!(?:with|and|to|or|for) )[^\s;]+)*)$")


def render_html(page: Page) -> str:
    """The same values give the same bytes."""
    template = _make_environment().get_template("page.html.j2")
    html = template.render(
        page=page,
        css=_read_page_file("report.css"),
        js=_read_page_file("report.js"),
        mark=MARKS.get(page.verdict, ""),
        files_size=format_bytes(sum(file.size_bytes for file in page.files)),
    )
    return clean_text(html)


def render_badge(verdict: str) -> str:
    """An SVG for a README: `optpipe` and the verdict, in the colors of the report."""
    color = {"PASS": "#0b6e4f", "INCONCLUSIVE": "#8a5a00"}.get(verdict, "#b3261e")
    text = f"{MARKS.get(verdict, MARKS['FAIL'])} {verdict}"
    name, length = 60, 9 * len(text) + 16
    label = '<text y="14" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff" text-anchor="middle" x='
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{name + length}" height="20" role="img" aria-label="optpipe: {verdict}">'
        f'<rect width="{name + length}" height="20" rx="3" fill="{color}"/>'
        f'<path d="M3 0h{name - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3" fill="#3b4252"/>'
        f'{label}"{name / 2:g}">optpipe</text>{label}"{name + length / 2:g}">{text}</text></svg>\n'
    )


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    made = Environment(
        loader=PackageLoader("optpipe.report", "page"),
        autoescape=select_autoescape(["html.j2", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "code": _mark_code,
        "kind": lambda part: type(part).__name__.lower(),
        "runs": _group_parts,
    }
    made.globals |= {
        "cell_html": _render_cells,
        "sort_key": lambda cell: (
            f"{cell.value:.9g}" if cell.value is not None else cell.text or cell.note
        ),
        "group": _find_group,
        "shown": _choose_columns,
        "zip": partial(zip, strict=True),
    }
    return made


def _read_page_file(name: str) -> Markup:
    return Markup(
        resources.files("optpipe.report").joinpath("page", name).read_text(encoding="utf-8")
    )


def _mark_code(text: str) -> Markup:
    """Marks commands, and text between backticks, as code."""
    parts = (text if "`" in text else _COMMAND.sub(r"\1`\2`", text)).split("`")
    if len(parts) % 2 == 0:
        return Markup("{}").format(text)
    return Markup("").join(
        Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(parts)
    )


def _group_parts(parts: tuple[Part, ...]) -> list[tuple[str, list[Part]]]:
    """Groups consecutive parts of one kind: figures share a grid."""
    return [(kind.__name__.lower(), list(group)) for kind, group in groupby(parts, type)]


def _choose_columns(table: Table) -> list[list[int]]:
    """Positions of the columns that a page shows, each followed by those below it."""
    shown: list[list[int]] = []
    for at in table.list_columns(page=True):
        if table.columns[at].below:
            shown[-1].append(at)
        else:
            shown.append([at])
    return shown


def _find_group(table: Table, row: tuple[Cell, ...]) -> str:
    """The row's state, by which the filter buttons choose it."""
    states = (
        cell.text
        for cell, column in zip(row, table.columns, strict=True)
        if column.kind is ColumnKind.STATE
    )
    return next(states, "")


def _render_cells(cells: tuple[Cell, ...], columns: tuple[Column, ...], shown: list[int]) -> Markup:
    below = [_render_cell(cells[at], columns[at]) for at in shown[1:] if cells[at].text]
    small = Markup("").join(Markup("<small>{}</small>").format(line) for line in below)
    return _render_cell(cells[shown[0]], columns[shown[0]]) + small


def _render_cell(cell: Cell, column: Column) -> Markup:
    text, note = _mark_code(cell.text), _mark_code(cell.note)
    if column.kind is ColumnKind.NAME:
        text = Markup("<code>{}</code>").format(Markup(".<wbr>").join(cell.text.split(".")))
    elif column.kind is ColumnKind.STATE:
        chip = Markup('<span class="chip {}">{}</span>')
        text = chip.format(cell.text.lower(), f"{MARKS.get(cell.text, '')} {cell.text}".strip())
        return text + (chip.format(cell.note, cell.note.upper()) if cell.note else "")
    elif column.kind is ColumnKind.FIGURE and not cell.text:
        return Markup("–")
    if note:
        text += Markup("<small>{}</small>").format(note)
    return text if cell.gauge is None else text + _draw_gauge(cell.gauge)


def _draw_gauge(gauge: Gauge) -> Markup:
    """The limit as a line, the interval as a bar, the forbidden side shaded; hidden from screen readers, because it repeats the text.

    The scale runs from the lowest to the highest of them with a margin; it begins at 0 if that is near.
    """
    low, high = min(gauge.low, gauge.limit), max(gauge.high, gauge.limit)
    start = 0.0 if 0 <= low < high / 2 else low - 0.15 * (high - low)
    width = high - start + 0.15 * (high - low)
    if width <= 0:
        return Markup("")
    shown = gauge.limit, gauge.low, gauge.high, gauge.value
    line, left, right, value = (GAUGE_WIDTH * (value - start) / width for value in shown)
    left, right = min(left, value - 1.5), max(right, value + 1.5)
    begin, length = (0.0, line) if gauge.at_least else (line, GAUGE_WIDTH - line)
    return Markup(
        f'<svg class="gauge" viewBox="0 0 {GAUGE_WIDTH} {GAUGE_HEIGHT}" aria-hidden="true">'
        f'<rect y="5" width="{GAUGE_WIDTH}" height="4" rx="2" fill="var(--line)"/>'
        f'<rect x="{begin:.1f}" y="5" width="{length:.1f}" height="4" fill="var(--fail)" opacity=".6"/>'
        f'<rect x="{left:.1f}" y="3" width="{right - left:.1f}" height="8" rx="2" fill="var(--{gauge.tone})"/>'
        f'<circle cx="{value:.1f}" cy="7" r="2" fill="var(--paper)"/>'
        f'<rect x="{line - 1:.1f}" width="2" height="14" fill="var(--ink)"/></svg>'
    )
