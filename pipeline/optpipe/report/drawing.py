"""Drawing for the report: Altair and Vega specifications to SVG by vl-convert, without a browser or a network.

Colours are placeholders that become CSS variables in the SVG, so that one drawing serves light, dark and print. Marks keep
Vega's `aria-label`, which screen readers read and the page's script shows as a tooltip.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.report.report import RawFile

if TYPE_CHECKING:
    import altair as alt

WIDTH, HEIGHT = 272, 195
"""Of the plot in pixels: with its axes it fits a phone, so that text of 12 pixels stays readable there."""
FONT_SIZE = 12
SERIES = tuple(f"#fe00{number:02x}" for number in range(1, 9))
SHAPES = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"}
INK, FAINT, GOOD, BAD, PAPER = "#fd0001", "#fd0002", "#fd0003", "#fd0004", "#fd0005"
_VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)} | {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    GOOD: "var(--pass)",
    BAD: "var(--fail)",
    PAPER: "var(--paper)",
}


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One line of a figure's legend, which the page sets beside the drawing so that long names wrap."""

    label: str
    color: str
    """As CSS: `var(--series-1)`."""
    mark: str = "●"


INVALID = LegendEntry("INVALID", _VARIABLES[BAD], "✚")


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawn figure with what it says and where its numbers lie."""

    title: str
    caption: str
    svg: str
    files: tuple[RawFile, ...] = ()
    legend: tuple[LegendEntry, ...] = ()


def svg_from_chart(chart: "alt.TopLevelMixin", name: str) -> str:
    """Draws an Altair chart."""
    import vl_convert

    return apply_theme(vl_convert.vegalite_to_svg(chart.to_dict(), allowed_base_urls=[]), name)


def apply_theme(svg: str, name: str) -> str:
    """Makes ids unique to the page, colours variable and the size fluid."""
    for color, variable in _VARIABLES.items():
        svg = re.sub(color, variable, svg, flags=re.IGNORECASE)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    ids = {found: f"{slug}-{at}" for at, found in enumerate(dict.fromkeys(re.findall(r'id="([^"]+)"', svg)))}
    svg = re.sub(r'id="([^"]+)"', lambda match: f'id="{ids[match[1]]}"', svg)  # Vega counts on over a process's life
    svg = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{ids[match[1]]})", svg)
    size = re.search(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"', svg)
    width = f' style="max-width:{size[1]}px"' if size else ""
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+" height="[\d.]+"', rf"\1{width}", svg, count=1)
    return re.sub(r"^.*?<svg", '<svg role="img"', svg, count=1, flags=re.DOTALL)


def configure_chart(chart: Any) -> Any:
    """The chart in the page's fonts and colors."""
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE}
    return (
        chart.configure(
            background="transparent",
            font="Arial, Helvetica, sans-serif",
            padding={"left": 2, "right": 14, "top": 10, "bottom": 2},
        )
        .configure_view(stroke=None)
        .configure_axis(
            **text,
            titleFontWeight=500,
            labelOverlap="greedy",
            labelSeparation=10,
            gridColor=FAINT,
            domainColor=FAINT,
            tickColor=FAINT,
            gridOpacity=0.7,
            titlePadding=10,
        )
        .configure_axisY(minExtent=44)  # the browser's digits are wider than those that this was laid out with
        .configure_range(category=list(SERIES))
    )


def encode_color(field: str, labels: Sequence[str]) -> "alt.Color":
    """One color for each distinct label, in their order; where there are more, `encode_shape` tells them apart."""
    import altair as alt

    return alt.Color(f"{field}:N", scale=_cycle(labels, SERIES, 1), legend=None)


def encode_shape(field: str, labels: Sequence[str]) -> "alt.Shape":
    """Another mark for each round through the colors."""
    import altair as alt

    return alt.Shape(f"{field}:N", scale=_cycle(labels, tuple(SHAPES), len(SERIES)), legend=None)


def legend_from_labels(labels: Sequence[str], mark: str | None = None) -> tuple[LegendEntry, ...]:
    """The legend that belongs to `encode_color` and `encode_shape`; every entry with `mark` if given."""
    marks = tuple(SHAPES.values())
    return tuple(
        LegendEntry(label, f"var(--series-{at % len(SERIES) + 1})", mark or marks[at // len(SERIES) % len(marks)])
        for at, label in enumerate(dict.fromkeys(labels))
    )


def _cycle(labels: Sequence[str], values: Sequence[str], repeat: int) -> "alt.Scale":
    import altair as alt

    names = list(dict.fromkeys(labels))
    return alt.Scale(domain=names, range=[values[at // repeat % len(values)] for at in range(len(names))])


def choose_axis_scale(values: Sequence[float], padding: int = 12) -> "alt.Scale":
    """Logarithmic where the values span more than a factor of four; a narrow logarithmic axis is all tick labels."""
    import altair as alt

    if values and min(values) > 0 and max(values) / min(values) > 4:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(zero=False, nice=False, padding=padding)
