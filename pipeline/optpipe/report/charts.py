"""Figures of measurements, drawn by Altair and vl-convert to SVG without a browser or a network.

Colors are placeholders that become CSS variables in the SVG, so that one drawing serves light, dark and print. Marks keep
Vega's `aria-label`, which screen readers read and the page's script shows as a tooltip.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optpipe.core.comparison import Comparison
from optpipe.core.measurement import name_sample
from optpipe.core.quantity import Estimate
from optpipe.report.document import Figure, LegendEntry, RawFile

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True, slots=True)
class Curve:
    """A line in a figure: `points` are (x, y) in the figure's units."""

    label: str
    points: tuple[tuple[float, float], ...]
    files: tuple[RawFile, ...] = ()


@dataclass(frozen=True, slots=True)
class StageBar:
    """How long a step took."""

    label: str
    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ChartData:
    """What the figures of a comparison show beside its rows."""

    comparison: Comparison
    latencies: tuple[Curve, ...] = ()
    """Empirical distribution functions: latency in ms, share of the queries in [0, 1]."""
    machine: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    """Quantities of the machine with their units, each over seconds from the start of a measurement."""
    stages: tuple[StageBar, ...] = ()
    stage_files: tuple[RawFile, ...] = ()
    """Where `stages` come from."""


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


INVALID = LegendEntry("INVALID", _VARIABLES[BAD], "✚")


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


MAX_SPEEDUPS = 24
Row = dict[str, Any]
"""One mark of a chart, as Vega-Lite takes it: a value by field name."""


def draw_figures(data: ChartData) -> list[Figure]:
    """Every figure that `data` is enough for, in reading order."""
    percentile, rows = _list_points(data)
    drawn = (
        _draw_latency_throughput(data, percentile, rows),
        _draw_distribution(data),
        _draw_frontier(data, percentile, rows),
        _draw_accuracy(data, percentile, rows),
        _draw_energy(data, percentile, rows),
        _draw_speedup(data),
        _draw_stages(data),
        *_draw_machine(data),
    )
    return [figure for figure in drawn if figure is not None]


def _list_points(data: ChartData) -> tuple[str, list[Row]]:
    """The measurements with latency and throughput; one percentile for all: p99 where every one has it, else p50."""
    measured = [row for row in data.comparison.rows if row.latency_ns and row.throughput_images_per_s]
    percentile = "p99" if all("p99" in row.latency_ns for row in measured) else "p50"
    points = []
    for row in measured:
        latency, throughput = row.latency_ns.get(percentile), row.throughput_images_per_s
        if latency is not None and throughput is not None:
            points.append(
                {
                    "build": row.series,
                    "batch size": row.load.batch_size,
                    "latency": _round(latency.value / 1e6),
                    "throughput": _round(throughput.value),
                    "standing": "on the frontier" if row.on_frontier else "dominated" if row.valid else "INVALID",
                    "label": row.label,
                    "sample": row.load.sample,
                    "load": ", ".join([*row.load.list_lengths(), row.load.scenario, row.load.mode]),
                    **_spread("top1", row.top1, 100.0),
                    **_spread("energy", row.energy_j_per_image, 1e3),
                }
            )
    return percentile, points


def _round(value: float) -> float:
    """To six digits: more than a drawing shows, and the same on every machine."""
    return float(f"{value:.6g}")


def _spread(name: str, figure: Estimate | None, factor: float) -> Row:
    if figure is None:
        return {}
    low, high = figure.bounds
    return {
        name: _round(factor * figure.value),
        f"{name} low": _round(factor * low),
        f"{name} high": _round(factor * high),
    }


def _mark_invalid(base: Any, rows: Sequence[Row]) -> tuple[Any, tuple[LegendEntry, ...]]:
    """A cross over every point that is INVALID, and its line of the legend; neither where there is none."""
    crosses = base.transform_filter("datum.standing == 'INVALID'").mark_point(
        shape="cross", filled=True, size=110, color=BAD, opacity=1, aria=False
    )
    return crosses, (INVALID,) if any(row["standing"] == "INVALID" for row in rows) else ()


def _draw_latency_throughput(data: ChartData, percentile: str, rows: Sequence[Row]) -> Figure | None:
    import altair as alt

    if not rows:
        return None
    builds = [row["build"] for row in rows]
    plane = _make_plane(percentile, rows)
    base = plane.encode(color=encode_color("build", builds), order="batch size:Q", detail="load:N")
    texts = base.mark_text(dy=-12, fontSize=FONT_SIZE, aria=False).encode(text="batch size:Q", color=alt.value(INK))
    crosses, invalid = _mark_invalid(plane, rows)
    chart = (
        base.mark_line(strokeWidth=2, aria=False)
        + base.mark_point(filled=True, size=55, opacity=1).encode(shape=encode_shape("build", builds))
        + crosses
        + texts
    ).properties(width=WIDTH, height=HEIGHT)
    caption = "Each line is a build, each point a batch size. Down and to the right is better."
    svg = svg_from_chart(configure_chart(chart), "latency-throughput")
    return Figure("Latency vs. throughput", caption, svg, _sources(data), legend_from_labels(builds) + invalid)


def _make_plane(percentile: str, rows: Sequence[Row]) -> Any:
    """An empty chart of `rows` with throughput to the right and latency upwards."""
    import altair as alt

    rates = choose_axis_scale([row["throughput"] for row in rows], 16)
    times = choose_axis_scale([row["latency"] for row in rows], 18)
    return alt.Chart(alt.InlineData(list(rows))).encode(
        x=alt.X(
            "throughput:Q",
            title=f"{name_sample(row['sample'] for row in rows)}s per second",
            scale=rates,
            axis=alt.Axis(tickCount=5, format="~s"),
        ),
        y=alt.Y("latency:Q", title=f"{percentile} latency (ms)", scale=times, axis=alt.Axis(tickCount=6)),
    )


def _sources(data: ChartData) -> tuple[RawFile, ...]:
    return tuple(dict.fromkeys(file for curve in data.latencies for file in curve.files))


def _draw_lines(
    curves: Sequence[Curve], x: str, y: str, name: str, *, log: bool, step: bool, percent: bool = False
) -> str:
    import altair as alt

    points = [{"x": _round(px), "y": _round(py), "series": curve.label} for curve in curves for px, py in curve.points]
    scale = choose_axis_scale([px for curve in curves for px, _ in curve.points], 0) if log else alt.Scale(zero=False)
    form = alt.Axis(format="%", tickCount=5) if percent else alt.Axis(tickCount=5)
    chart = (
        alt.Chart(alt.InlineData(points))
        .mark_line(strokeWidth=2, interpolate="step-after" if step else "linear", clip=True)
        .encode(
            x=alt.X("x:Q", title=x, scale=scale, axis=alt.Axis(tickCount=5)),
            y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=percent), axis=form),
            color=encode_color("series", [curve.label for curve in curves]),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
    return svg_from_chart(configure_chart(chart), name)


def _draw_distribution(data: ChartData) -> Figure | None:
    curves = data.latencies
    if not curves:
        return None
    svg = _draw_lines(curves, "latency (ms)", "queries completed within", "ecdf", log=True, step=True, percent=True)
    shown = len(curves), len(data.comparison.rows)
    caption = "Share of queries completed within a given time, from the raw samples; nothing is trimmed."
    caption += f" {shown[0]} of {shown[1]} measurements." if shown[0] < shown[1] else ""
    legend = legend_from_labels([curve.label for curve in curves], "▬")
    return Figure("Latency distribution", caption, svg, _sources(data), legend)


def _draw_frontier(data: ChartData, percentile: str, rows: Sequence[Row]) -> Figure | None:
    import altair as alt

    if len(rows) < 2:
        return None
    best = sorted((row for row in rows if row["standing"] == "on the frontier"), key=lambda row: row["latency"])
    numbers = {row["label"]: str(at) for at, row in enumerate(best, start=1)}
    rows = [{**row, "number": numbers.get(row["label"], "")} for row in rows]
    plane = _make_plane(percentile, rows)
    color = alt.Color(
        "standing:N",
        scale=alt.Scale(domain=["on the frontier", "dominated", "INVALID"], range=[GOOD, SERIES[7], BAD]),
        legend=None,
    )
    crosses, invalid = _mark_invalid(plane, rows)
    chart = (
        plane.transform_filter("datum.number")
        .mark_line(strokeDash=[4, 3], color=GOOD, aria=False)
        .encode(detail="load:N")
        + plane.mark_point(filled=True, size=70, opacity=0.95).encode(color=color, description="label:N")
        + crosses
        + plane.mark_text(dx=12, dy=-12, fontSize=FONT_SIZE, fontWeight="bold", aria=False).encode(
            text="number:N", color=alt.value(INK)
        )
    ).properties(width=WIDTH, height=HEIGHT)
    caption = "No other build beats a frontier build on every metric at once. The table of builds shows what dominates the others."
    named = tuple(LegendEntry(label, "var(--pass)", number) for label, number in numbers.items())
    others = (LegendEntry("dominated", "var(--series-8)"),) if any(r["standing"] == "dominated" for r in rows) else ()
    svg = svg_from_chart(configure_chart(chart), "frontier")
    return Figure("Frontier", caption, svg, _sources(data), (*named, *others, *invalid))


def _draw_accuracy(data: ChartData, percentile: str, rows: Sequence[Row]) -> Figure | None:
    caption = (
        "Top-1 accuracy with its interval, at the latency of each build and batch size. Up and to the left is better."
    )
    return _draw_beside_latency(data, percentile, rows, "top1", "Accuracy vs. latency", "top-1 accuracy (%)", caption)


def _draw_energy(data: ChartData, percentile: str, rows: Sequence[Row]) -> Figure | None:
    sample = name_sample(row["sample"] for row in rows)
    caption = f"Energy per {sample} with its interval; approximate. Down and to the left is better."
    return _draw_beside_latency(data, percentile, rows, "energy", "Energy vs. latency", f"mJ per {sample}", caption)


def _draw_beside_latency(
    data: ChartData, percentile: str, rows: Sequence[Row], what: str, title: str, unit: str, caption: str
) -> Figure | None:
    """The figure `what` of each row over its latency; nothing where fewer than two rows have it."""
    import altair as alt

    rows = [row for row in rows if what in row]
    if len(rows) < 2:
        return None
    times = choose_axis_scale([row["latency"] for row in rows], 18)
    y = alt.Y(f"{what}:Q", title=unit, scale=alt.Scale(zero=False, padding=10), axis=alt.Axis(tickCount=6))
    builds = [row["build"] for row in rows]
    x = alt.X("latency:Q", title=f"{percentile} latency (ms)", scale=times, axis=alt.Axis(tickCount=5))
    base = alt.Chart(alt.InlineData(rows)).encode(x=x, color=encode_color("build", builds))
    points = base.mark_point(filled=True, size=55, opacity=1)
    crosses, invalid = _mark_invalid(alt.Chart(alt.InlineData(rows)).encode(x=x, y=y), rows)
    chart = (
        base.mark_rule(strokeWidth=2, opacity=0.6, aria=False).encode(
            y=alt.Y(f"{what} low:Q", title=unit), y2=f"{what} high:Q"
        )
        + points.encode(y=y, shape=encode_shape("build", builds), description="label:N")
        + crosses
        + base.mark_text(dx=12, fontSize=FONT_SIZE, aria=False).encode(y=y, text="batch size:Q", color=alt.value(INK))
    ).properties(width=WIDTH, height=HEIGHT)
    svg = svg_from_chart(configure_chart(chart), title)
    return Figure(title, caption, svg, _sources(data), legend_from_labels(builds) + invalid)


def _name_rows(chart: Any, field: str, order: Sequence[str]) -> Any:
    """The names of the rows of a chart, each above its row, where a long one has the whole width."""
    import altair as alt

    return chart.mark_text(align="left", baseline="bottom", dy=-7, fontSize=FONT_SIZE, aria=False).encode(
        x=alt.value(0), y=_encode_rows(field, order), text=f"{field}:N", color=alt.value(INK)
    )


def _encode_rows(field: str, order: Sequence[str]) -> Any:
    import altair as alt

    return alt.Y(f"{field}:N", title=None, sort=list(order), axis=None)


def _draw_speedup(data: ChartData) -> Figure | None:
    import altair as alt

    rows: list[Row] = [
        {"label": row.label, **_spread("speed-up", row.speedup, 1.0)}
        for row in data.comparison.rows
        if row.speedup is not None and row.change in ("faster", "slower", "no difference shown")
    ]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: -float(row["speed-up"]))[:MAX_SPEEDUPS]
    order = [row["label"] for row in rows]
    y, base = _encode_rows("label", order), alt.Chart(alt.InlineData(rows))
    x = alt.X("speed-up:Q", title="speed-up over the baseline", scale=alt.Scale(zero=False, padding=10))
    chart = (
        alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(color=INK, strokeDash=[3, 3], aria=False).encode(x="one:Q")
        + base.mark_rule(strokeWidth=3, color=SERIES[0], aria=False).encode(
            y=y, x="speed-up low:Q", x2="speed-up high:Q"
        )
        + base.mark_point(filled=True, size=60, color=SERIES[0], opacity=1).encode(y=y, x=x)
        + _name_rows(base, "label", order)
    ).properties(width=WIDTH + 40, height=40 * len(rows))
    baseline = data.comparison.baseline.name if data.comparison.baseline else "the baseline"
    caption = f"Ratio of the p50 latencies with its interval; the baseline is {baseline}. An interval that contains 1 shows no difference."
    return Figure("Speed-up", caption, svg_from_chart(configure_chart(chart), "speedup"), _sources(data))


def _draw_stages(data: ChartData) -> Figure | None:
    import altair as alt

    if not data.stages:
        return None
    rows = [{"build": bar.label, "stage": bar.stage, "seconds": bar.seconds} for bar in data.stages]
    order, stages = list(dict.fromkeys(bar.label for bar in data.stages)), [bar.stage for bar in data.stages]
    names = alt.Chart(alt.InlineData([{"build": name} for name in order]))
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar(size=12)
        .encode(
            x=alt.X("seconds:Q", title="seconds", axis=alt.Axis(tickCount=5)),
            y=_encode_rows("build", order),
            color=encode_color("stage", stages),
        )
        + _name_rows(names, "build", order)
    ).properties(width=WIDTH + 40, height=40 * len(order))
    caption = "Time each stage took when it ran, not when its result was reused from the store."
    svg = svg_from_chart(configure_chart(chart), "stages")
    return Figure("Build time", caption, svg, data.stage_files, legend_from_labels(stages, "■"))


def _draw_machine(data: ChartData) -> list[Figure]:
    drawn = []
    for quantity, curves in data.machine.items():
        x = "seconds from the start of the measurement"
        svg = _draw_lines(curves, x, quantity, f"machine-{quantity}", log=False, step=False)
        files = tuple(file for curve in curves for file in curve.files)
        legend = legend_from_labels([curve.label for curve in curves], "▬")
        drawn.append(Figure(quantity, "State of the machine during the measurement.", svg, files, legend))
    return drawn
