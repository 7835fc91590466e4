"""Figures drawn by Altair and vl-convert as SVG, without a browser or a network: lines, points, and bars.

Colors are placeholders that become CSS variables in the SVG, so that one drawing serves light, dark, and print. Marks keep
Vega's `aria-label`, which screen readers read and the page's script shows as a tooltip.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log10
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.core import LazyModule
from optpipe.report.document import Figure, Legend, RawFiles, Sentence, clean_text

if TYPE_CHECKING:
    import altair as alt
else:
    alt = LazyModule("altair", without=("rfc3987_syntax",))
vl_convert = LazyModule("vl_convert")


WIDTH, HEIGHT = 272, 195
"""Size of the plot in pixels: with its axes it fits a phone, and its text of 12 pixels stays readable there."""
FONT_SIZE, ROW_HEIGHT, LINE_HEIGHT = 12, 40, 15
MAX_NAME = 44
"""Characters of a row's name that fit the width of a drawing."""
SERIES = tuple(f"#fe00{number:02x}" for number in range(1, 9))
SHAPES = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"}
INK, FAINT, BAD = "#fd0001", "#fd0002", "#fd0004"
_VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)} | {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    BAD: "var(--fail)",
}
_FLAGS = {
    "INVALID": (("INVALID", _VARIABLES[BAD], "✚"), {"shape": "cross", "color": BAD, "filled": True, "size": 110}),
    "frontier": (("on the frontier", _VARIABLES[INK], "◯"), {"shape": "circle", "color": INK, "filled": False, "size": 160}),
}  # fmt: skip
"""The legend and the extra mark of a flagged point."""


class Curve(NamedTuple):
    """A line in a figure: `points` are (x, y) in the figure's units."""

    label: str
    points: tuple[tuple[float, float], ...]
    files: RawFiles = ()


class Bar(NamedTuple):
    """A row's part; `low` and `high` are the bounds of a known interval, `name` its tooltip in a timeline."""

    label: str
    part: str
    value: float
    low: float | None = None
    high: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A point labeled with `text`; `label` is its tooltip, `flag` one of `_FLAGS`; points of one `group` are joined."""

    series: str
    label: str
    x: float
    y: float
    text: str = ""
    flag: str = ""
    group: str = ""
    low: float | None = None
    high: float | None = None


def draw_distributions(title: str, caption: str, curves: Sequence[Curve], x: str, y: str) -> Figure:
    """Draws shares, from 0% to 100%: of the queries over their time, or of a device's peak over the time of a recording."""
    points = [
        {"x": _round(px), "y": _round(py), "series": curve.label}
        for curve in curves
        for px, py in curve.points
    ]
    labels = [curve.label for curve in curves]
    across = choose_axis_scale([_round(px) for curve in curves for px, _ in curve.points], 0)
    chart = (
        alt.Chart(alt.InlineData(points))
        .mark_line(strokeWidth=2, interpolate="step-after", clip=True)
        .encode(
            x=alt.X("x:Q", title=x, scale=across, axis=alt.Axis(tickCount=5)),
            y=alt.Y(
                "y:Q", title=y, scale=alt.Scale(zero=True), axis=alt.Axis(format="%", tickCount=5)
            ),
            color=_encode_color(labels),
        )
    )
    files = tuple(dict.fromkeys(file for curve in curves for file in curve.files))
    return _draw(chart, title, caption, files, _list_legend(labels, "▬"))


def _rows_from_points(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row of chart data for each point, without the coordinates that it lacks."""
    return [
        {
            "at": at,
            **{name: getattr(point, name) for name in ("series", "label", "text", "group", "flag")},
        }
        | {
            key: _round(value)
            for key in ("x", "y", "low", "high")
            if (value := getattr(point, key)) is not None
        }
        for at, point in enumerate(points)
    ]


def draw_points(
    title: str,
    caption: str,
    points: Sequence[Point],
    x: str,
    y: str,
    files: RawFiles = (),
    *,
    limit: Sequence[tuple[float, float]] = (),
    linear: bool = False,
) -> Figure:
    """Draws the points with their intervals, and the line `limit`; axes are logarithmic where `choose_axis_scale` makes them so."""
    rows = _rows_from_points(points)
    labels = [point.series for point in points]
    roof = [{"x": _round(px), "y": _round(py)} for px, py in limit]
    values = ([] if linear else [row[key] for row in (*rows, *roof)] for key in ("x", "y"))
    across, upwards = (choose_axis_scale(column, PADDING) for column in values)
    axis = alt.Axis(tickCount=5, format=_choose_number_format([row["x"] for row in (*rows, *roof)]))
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("x:Q", title=x, scale=across, axis=axis),
        y=alt.Y("y:Q", title=y, scale=upwards, axis=alt.Axis(tickCount=6)),
        color=_encode_color(labels),
    )
    shape = alt.Shape("series:N", scale=_cycle(labels, tuple(SHAPES), len(SERIES)), legend=None)
    layers = [
        base.mark_point(filled=True, size=55, opacity=1).encode(shape=shape, description="label:N")
    ]
    if any(point.group for point in points):
        layers.insert(
            0, base.mark_line(strokeWidth=2, aria=False).encode(detail="group:N", order="at:Q")
        )
    if any(point.low is not None for point in points):
        interval = base.mark_rule(strokeWidth=2, opacity=0.6, aria=False)
        layers.insert(0, interval.encode(y=alt.Y("low:Q", title=y, scale=upwards), y2="high:Q"))
    if roof:
        line = alt.Chart(alt.InlineData(roof)).mark_line(color=INK, strokeWidth=2, aria=False)
        layers.insert(0, line.encode(x="x:Q", y="y:Q"))
    flags = [flag for flag in _FLAGS if any(point.flag == flag for point in points)]
    for flag in flags:
        over = alt.Chart(alt.InlineData([row for row in rows if row["flag"] == flag]))
        layers.append(
            over.mark_point(opacity=1, aria=False, **_FLAGS[flag][1]).encode(x="x:Q", y="y:Q")
        )
    kept = _keep_labels_apart(rows, across, upwards, roof)
    layers += [
        alt.Chart(alt.InlineData([row for row, side in zip(rows, kept, strict=True) if side == at]))
        .mark_text(dx=dx, dy=dy, fontSize=FONT_SIZE, aria=False)
        .encode(x="x:Q", y="y:Q", text="text:N", color=alt.value(INK))
        for at, (dx, dy) in enumerate(SIDES)
        if at in kept
    ]
    legend = _list_legend(labels) if len(set(labels)) > 1 or labels[0] else ()
    return _draw(
        alt.layer(*layers), title, caption, files, (*legend, *(_FLAGS[flag][0] for flag in flags))
    )


SIDES = (0, -12), (0, 15), (16, 0), (-16, 0)
"""Where the label of a point may stand, in pixels from it: above, below, to the right, to the left."""
DIGIT_WIDTH, TEXT_HEIGHT = 9, 16
"""Largest size of a digit in a browser, whose fonts are wider than those of the layout."""
PADDING = 16


def _keep_labels_apart(
    rows: Sequence[dict[str, Any]],
    across: "alt.Scale",
    upwards: "alt.Scale",
    roof: Sequence[dict[str, float]],
) -> list[int | None]:
    """The side of each point on which its label meets no other; None without one: a tooltip still names the point."""
    heights = [row[key] for row in rows for key in ("y", "low", "high") if key in row]
    xs = _place_on_axis(
        [row["x"] for row in rows], [row["x"] for row in (*rows, *roof)], across, WIDTH
    )
    ys = _place_on_axis(
        [row["y"] for row in rows], [*heights, *(row["y"] for row in roof)], upwards, HEIGHT
    )
    taken: list[tuple[float, float, float]] = []
    sides: list[int | None] = []
    for row, x, y in zip(rows, xs, ys, strict=True):
        half = DIGIT_WIDTH * len(row["text"]) / 2
        places = [(x + dx, HEIGHT - y + dy, half) for dx, dy in SIDES]
        free = (
            at for at, place in enumerate(places) if not any(_meet(place, other) for other in taken)
        )
        side = next(free, None) if row["text"] else None
        sides.append(side)
        if side is not None:
            taken.append(places[side])
    return sides


def _meet(first: tuple[float, float, float], second: tuple[float, float, float]) -> bool:
    """Whether two labels overlap; each is the x and y of its center, and half its width."""
    across = abs(first[0] - second[0]) < first[2] + second[2]
    return across and abs(first[1] - second[1]) < TEXT_HEIGHT


def _place_on_axis(
    values: Sequence[float], domain: Sequence[float], scale: "alt.Scale", length: int
) -> list[float]:
    """The pixels along an axis at which Vega draws `values`."""
    by = log10 if scale.to_dict().get("type") == "log" else float
    low, high = by(min(domain)), by(max(domain))
    room = length - 2 * PADDING
    return [
        PADDING + room * ((by(value) - low) / (high - low) if high > low else 0.5)
        for value in values
    ]


def draw_bars(
    title: str,
    caption: str,
    bars: Sequence[Bar],
    unit: str,
    files: RawFiles = (),
    *,
    reference: float | None = None,
) -> Figure:
    """Draws one row for each label, its name above its bars; a line at `reference`."""
    rows = [
        {"label": clean_text(bar.label), "part": bar.part}
        | {
            key: _round(value)
            for key in ("value", "low", "high")
            if (value := getattr(bar, key)) is not None
        }
        for bar in bars
    ]
    order, parts = (
        list(dict.fromkeys(row["label"] for row in rows)),
        list(dict.fromkeys(bar.part for bar in bars)),
    )
    y = alt.Y("label:N", title=None, sort=order, axis=None)
    base = alt.Chart(alt.InlineData(rows))
    x, color = (
        alt.X("value:Q", title=unit, axis=alt.Axis(tickCount=5)),
        _encode_color(parts, "part"),
    )
    chart = base.mark_bar(size=12).encode(x=x, y=y, color=color)
    if any(bar.low is not None for bar in bars):
        chart += base.mark_rule(strokeWidth=2, color=INK, aria=False).encode(
            y=y, x="low:Q", x2="high:Q"
        )
    if reference is not None:
        at = alt.Chart(alt.InlineData([{"at": reference}]))
        chart += at.mark_rule(color=INK, strokeDash=[3, 3], aria=False).encode(x="at:Q")
    return _draw_rows(
        chart, order, title, caption, files, _list_legend(parts, "■") if len(parts) > 1 else ()
    )


def draw_timeline(
    title: str, caption: str, bars: Sequence[Bar], unit: str, files: RawFiles = ()
) -> Figure:
    """Draws one row for each label; each bar lasts from its `low` to its `high`."""
    rows = [
        {
            "label": bar.label,
            "part": bar.part,
            "name": clean_text(bar.name),
            "from": bar.low,
            "to": bar.high,
        }
        for bar in bars
    ]
    order, parts = (
        list(dict.fromkeys(bar.label for bar in bars)),
        list(dict.fromkeys(bar.part for bar in bars)),
    )
    base = alt.Chart(alt.InlineData(rows)).mark_bar(size=14)
    chart = base.encode(
        x=alt.X("from:Q", title=unit, axis=alt.Axis(tickCount=5)),
        x2="to:Q",
        y=alt.Y("label:N", title=None, sort=order, axis=None),
        color=_encode_color(parts, "part"),
        description="name:N",
    )
    return _draw_rows(chart, order, title, caption, files, _list_legend(parts, "■"))


def draw_processes(points: Sequence[Point], files: RawFiles = ()) -> Figure:
    """Draws one row for each series, and one point for each process; those with a `flag`, the reason, are hollow."""
    rows = [
        {"label": point.series, "name": point.label, "x": _round(point.x), "why": point.flag}
        for point in points
    ]
    order = list(dict.fromkeys(point.series for point in points))
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X(
            "x:Q",
            title="p50 ÷ median",
            scale=alt.Scale(zero=False, padding=14),
            axis=alt.Axis(tickCount=5),
        ),
        y=alt.Y("label:N", title=None, sort=order, axis=None),
    )
    count = sum(bool(point.flag) for point in points)
    layers = []  # without empty ones, which would be marks without a name
    if count < len(points):
        valid = base.transform_filter("datum.why == ''")
        layers.append(
            valid.mark_point(filled=True, size=70, opacity=0.8, color=SERIES[0]).encode(
                description="name:N"
            )
        )
    if count:
        rejected = base.transform_filter("datum.why != ''")
        layers.append(rejected.mark_point(size=70, color=BAD).encode(description="name:N"))
    finding = f"{count} of {len(points)} processes were rejected"
    if len(points) == 1:
        finding = f"the only process was {'rejected' if count else 'not rejected'}"
    elif count < len(points):
        spread = max(abs(point.x - 1) for point in points if not point.flag)
        finding += f"; the others are within {spread:.1%} of their median"
    caption = (
        "The p50 of each process, divided by the median of the valid ones of its build and load."
    )
    legend = (
        ("counted", _VARIABLES[SERIES[0]], "●"),
        *([("rejected", _VARIABLES[BAD], "○")] if count else []),
    )
    return replace(
        _draw_rows(alt.layer(*layers), order, "Processes", caption, files, legend), finding=finding
    )


def _draw_rows(
    chart: Any, order: Sequence[object], title: str, caption: str, files: RawFiles, legend: Legend
) -> Figure:
    """Adds the name of each row above it, on as many lines as it needs."""
    wrapped = {name: wrap(str(name), MAX_NAME) or [""] for name in order}
    most = max(map(len, wrapped.values()), default=1)
    names = alt.Chart(
        alt.InlineData(
            [
                {"label": name, "line": line, "up": len(lines) - at}
                for name, lines in wrapped.items()
                for at, line in enumerate(lines)
            ]
        )
    )
    for up in range(1, most + 1):
        chart += (
            names.transform_filter(f"datum.up == {up}")
            .mark_text(
                align="left",
                baseline="bottom",
                dy=-7 - LINE_HEIGHT * (up - 1),
                fontSize=FONT_SIZE,
                aria=False,
            )
            .encode(
                x=alt.value(0),
                y=alt.Y("label:N", title=None, sort=list(order), axis=None),
                text="line:N",
                color=alt.value(INK),
            )
        )
    row_height = ROW_HEIGHT + 2 * LINE_HEIGHT * (most - 1)
    return _draw(
        chart, title, caption, files, legend, width=WIDTH + 40, height=row_height * len(order)
    )


FEWEST_POINTS = 3
"""Fewer are a sentence: a drawing of them shows no shape."""


def draw_or_state_points(
    title: str,
    caption: str,
    points: Sequence[Point],
    x: str,
    y: str,
    files: RawFiles,
    *,
    limit: Sequence[tuple[float, float]] = (),
    finding: str = "",
) -> Figure | Sentence:
    """The drawn points, or a sentence with the values of fewer than FEWEST_POINTS."""
    if len(points) >= FEWEST_POINTS:
        figure = draw_points(title, caption, points, x, y, files, limit=limit)
        return replace(figure, finding=finding)
    stated = "; ".join(
        f"{point.label.partition('; ')[0]}: {_name_value(y, point.y)} at {_name_value(x, point.x)}"
        for point in points
    )
    text = stated + (". " + finding if finding else "")
    return Sentence(text if text.endswith(".") else text + ".", label=title)


def _name_value(axis: str, value: float) -> str:
    """`p99 latency 2.31 ms`, `1,016 images per second`, `top-1 accuracy 99.5%`: a value in the words of its axis."""
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    name, _, unit = axis.partition(" (")
    if not unit:
        return f"{number} {name}"
    unit = unit.removesuffix(")")
    return f"{name} {number}{'' if unit == '%' else ' '}{unit}"


def _round(value: float) -> float:
    """Six digits: more than a drawing shows, and the same on every machine."""
    return float(f"{value:.6g}")


def choose_axis_scale(values: Sequence[float], padding: int) -> "alt.Scale":
    """Logarithmic if the values span more than a factor of four."""
    if values and min(values) > 0 and max(values) / min(values) > 4:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(zero=False, nice=False, padding=padding)


def _choose_number_format(values: Sequence[float]) -> str:
    """SI prefixes where the ticks are round numbers; close values need all their digits: 8,024 and not 8.024k."""
    near = min(values) > 0 and max(values) / min(values) <= 4
    return "," if near else "~s"


def _encode_color(labels: Sequence[str], field: str = "series") -> "alt.Color":
    """One color for each distinct label, in their order; points of one color differ in shape."""
    return alt.Color(f"{field}:N", scale=_cycle(labels, SERIES, 1), legend=None)


def _cycle(labels: Sequence[str], values: Sequence[str], repeat: int) -> "alt.Scale":
    names = list(dict.fromkeys(labels))
    return alt.Scale(
        domain=names, range=[values[at // repeat % len(values)] for at in range(len(names))]
    )


def _list_legend(labels: Sequence[str], mark: str | None = None) -> Legend:
    """The legend of the colors, and of the shapes of points unless every entry has `mark`."""
    marks = tuple(SHAPES.values())
    return tuple(
        (
            label,
            f"var(--series-{at % len(SERIES) + 1})",
            mark or marks[at // len(SERIES) % len(marks)],
        )
        for at, label in enumerate(dict.fromkeys(labels))
    )


def _draw(
    chart: Any,
    title: str,
    caption: str,
    files: RawFiles,
    legend: Legend,
    *,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Figure:
    """Sets the page's fonts and colors, unique ids, and a size that fits its place."""
    text = {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": FONT_SIZE,
        "titleFontSize": FONT_SIZE,
    }
    chart = (
        chart.properties(width=width, height=height)
        .configure(
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
        .configure_axisY(minExtent=44)  # the browser's digits are wider than those of the layout
        .configure_range(category=list(SERIES))
    )
    svg = vl_convert.vegalite_to_svg(chart.to_dict(validate=False), allowed_base_urls=[])
    for color, variable in _VARIABLES.items():
        svg = re.sub(color, variable, svg, flags=re.IGNORECASE)
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    ids = {
        identifier: f"{slug}-{at}"
        for at, identifier in enumerate(dict.fromkeys(re.findall(r'id="([^"]+)"', svg)))
    }
    svg = re.sub(
        r'id="([^"]+)"', lambda match: f'id="{ids[match[1]]}"', svg
    )  # Vega's ids count on within a process
    svg = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{ids[match[1]]})", svg)
    size = re.search(r'<svg[^>]*? width="([\d.]+)" height="([\d.]+)"', svg)
    fluid = f' style="max-width:{size[1]}px"' if size else ""
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+" height="[\d.]+"', rf"\1{fluid}", svg, count=1)
    opening = f'<svg role="group" aria-labelledby="figure-{title.replace(" ", "-")}"'
    svg = re.sub(r"^.*?<svg", opening, svg, count=1, flags=re.DOTALL)
    return Figure(title, caption, svg, files, legend)
