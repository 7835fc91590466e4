"""The report's figures: Altair and Vega specifications, drawn to SVG by vl-convert without a browser or a network.

Colours are placeholders that become CSS variables in the SVG, so that one drawing serves light, dark and print. Marks keep
Vega's `aria-label`, which screen readers read and the page's script shows as a tooltip.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.core.report import Curve, RawFile, Report

if TYPE_CHECKING:
    import altair as alt

WIDTH, HEIGHT = 420, 250
SERIES = tuple(f"#fe00{number:02x}" for number in range(1, 9))
INK, FAINT, GOOD, BAD = "#fd0001", "#fd0002", "#fd0003", "#fd0004"
_VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)} | {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    GOOD: "var(--pass)",
    BAD: "var(--fail)",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawn figure with what it says and where its numbers lie."""

    title: str
    caption: str
    svg: str
    files: tuple[RawFile, ...] = ()


def figures(report: Report) -> list[Figure]:
    """Every figure that `report` has the data for, in reading order."""
    drawn = (
        _latency_throughput(report),
        _distribution(report),
        _frontier(report),
        _speedup(report),
        _stages(report),
        *_machine(report),
        _kernels(report),
        _tensor_cores(report),
        _roofline(report),
    )
    return [figure for figure in drawn if figure is not None]


def svg_from_chart(chart: "alt.TopLevelMixin", name: str) -> str:
    """Draws an Altair chart."""
    import vl_convert

    return _themed(vl_convert.vegalite_to_svg(chart.to_dict(), allowed_base_urls=[]), name)


def _themed(svg: str, name: str) -> str:
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


def _config(chart: Any) -> Any:
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    font = "Arial, Helvetica, sans-serif"
    return (
        chart.configure(background="transparent", font=font, padding=10)
        .configure_view(stroke=None)
        .configure_axis(
            **text,
            labelOverlap="greedy",
            labelSeparation=6,
            gridColor=FAINT,
            domainColor=FAINT,
            tickColor=FAINT,
            gridOpacity=0.7,
        )
        .configure_legend(
            **text, orient="bottom", columns=2, columnPadding=44, labelLimit=220, symbolStrokeWidth=2, title=None
        )
        .configure_range(category=list(SERIES))
    )


def _colors(labels: Sequence[str]) -> "alt.Scale":
    import altair as alt

    names = list(dict.fromkeys(labels))
    return alt.Scale(domain=names, range=[SERIES[at % len(SERIES)] for at in range(len(names))])


def _axis_scale(values: Sequence[float], padding: int = 12) -> "alt.Scale":
    """Logarithmic where the values span more than a factor of four; a narrow logarithmic axis is all tick labels."""
    import altair as alt

    if values and min(values) > 0 and max(values) / min(values) > 4:
        return alt.Scale(type="log", nice=False, padding=padding)
    return alt.Scale(zero=False, nice=False, padding=padding)


def _rows(report: Report) -> list[dict[str, Any]]:
    found = []
    several = len({(row.scenario, row.mode) for row in report.comparison.rows}) > 1
    for row in report.comparison.rows:
        latency = row.latency_ms.get("p99") or row.latency_ms.get("p50")
        if latency is None or row.throughput_images_per_s is None:
            continue
        found.append(
            {
                "build": f"{row.build}, {row.mode}" if several else row.build,
                "batch size": row.batch_size,
                "latency": latency.value,
                "percentile": "p99" if "p99" in row.latency_ms else "p50",
                "images per second": row.throughput_images_per_s.value,
                "frontier": "on the frontier" if row.on_frontier else "dominated" if row.valid else "INVALID",
                "label": row.label,
                "load": f"{row.scenario}, {row.mode}",
            }
        )
    return found


def _latency_throughput(report: Report) -> Figure | None:
    import altair as alt

    rows = _rows(report)
    if not rows:
        return None
    name = rows[0]["percentile"]
    rates = _axis_scale([row["images per second"] for row in rows])
    times = _axis_scale([row["latency"] for row in rows])
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("images per second:Q", title="images per second", scale=rates, axis=alt.Axis(tickCount=6)),
        y=alt.Y("latency:Q", title=f"{name} latency (ms)", scale=times),
        color=alt.Color("build:N", scale=_colors([row["build"] for row in rows])),
        order="batch size:Q",
        detail="load:N",
    )
    texts = base.mark_text(dy=-10, fontSize=11, aria=False).encode(text="batch size:Q", color=alt.value(INK))
    chart = (
        base.mark_line(strokeWidth=2, aria=False) + base.mark_point(filled=True, size=55, opacity=1) + texts
    ).properties(width=WIDTH, height=HEIGHT)
    caption = "Each line is a build, each point a batch size. Down and to the right is better."
    return Figure(
        "Latency against throughput", caption, svg_from_chart(_config(chart), "latency-throughput"), _sources(report)
    )


def _sources(report: Report) -> tuple[RawFile, ...]:
    return tuple(dict.fromkeys(file for curve in report.latencies for file in curve.files))


def _line(curves: Sequence[Curve], x: str, y: str, name: str, *, log: bool, step: bool, percent: bool = False) -> str:
    import altair as alt

    points = [{"x": px, "y": py, "series": curve.label} for curve in curves for px, py in curve.points]
    scale = _axis_scale([px for curve in curves for px, _ in curve.points], 0) if log else alt.Scale(zero=False)
    y_axis = alt.Y("y:Q", title=y, scale=alt.Scale(zero=percent), axis=alt.Axis(format="%") if percent else alt.Axis())
    labels = [curve.label for curve in curves]
    chart = (
        alt.Chart(alt.InlineData(points))
        .mark_line(strokeWidth=2, interpolate="step-after" if step else "linear", clip=True)
        .encode(x=alt.X("x:Q", title=x, scale=scale), y=y_axis, color=alt.Color("series:N", scale=_colors(labels)))
        .properties(width=WIDTH, height=HEIGHT)
    )
    return svg_from_chart(_config(chart), name)


def _distribution(report: Report) -> Figure | None:
    if not report.latencies:
        return None
    svg = _line(report.latencies, "latency (ms)", "queries answered within", "ecdf", log=True, step=True, percent=True)
    caption = "Share of the queries answered within a time, from the raw samples; nothing is trimmed."
    files = tuple(file for curve in report.latencies for file in curve.files)
    return Figure("Distribution of the latency", caption, svg, files)


def _frontier(report: Report) -> Figure | None:
    import altair as alt

    rows = _rows(report)
    if len(rows) < 2:
        return None
    rates = _axis_scale([row["images per second"] for row in rows], 14)
    times = _axis_scale([row["latency"] for row in rows], 14)
    classes = ["on the frontier", "dominated", "INVALID"]
    color = alt.Color("frontier:N", scale=alt.Scale(domain=classes, range=[GOOD, SERIES[7], BAD]))
    shape = alt.Shape("frontier:N", scale=alt.Scale(domain=classes, range=["circle", "circle", "cross"]))
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("images per second:Q", title="images per second", scale=rates, axis=alt.Axis(tickCount=6)),
        y=alt.Y(
            "latency:Q",
            title=f"{rows[0]['percentile']} latency (ms)",
            scale=times,
        ),
    )
    points = base.mark_point(filled=True, size=70, opacity=0.95).encode(color=color, shape=shape, description="label:N")
    best = base.transform_filter("datum.frontier == 'on the frontier'")
    line = best.mark_line(strokeDash=[4, 3], color=GOOD, aria=False).encode(detail="load:N")
    chart = (line + points).properties(width=WIDTH, height=HEIGHT)
    caption = "A build on the frontier is beaten by no other in everything at once. The table of builds says by what the others are."
    return Figure("Frontier", caption, svg_from_chart(_config(chart), "frontier"), _sources(report))


def _speedup(report: Report) -> Figure | None:
    import altair as alt

    rows: list[dict[str, Any]] = [
        {"label": row.label, "speed-up": row.speedup.value, "low": row.speedup.low, "high": row.speedup.high}
        for row in report.comparison.rows
        if row.speedup is not None and row.change in ("faster", "slower", "no difference shown")
    ]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: -float(row["speed-up"]))[:24]
    y = alt.Y("label:N", title=None, sort=[row["label"] for row in rows], axis=alt.Axis(labelLimit=190))
    base = alt.Chart(alt.InlineData(rows))
    chart = (
        alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(color=INK, strokeDash=[3, 3], aria=False).encode(x="one:Q")
        + base.mark_rule(strokeWidth=3, color=SERIES[0], aria=False).encode(y=y, x="low:Q", x2="high:Q")
        + base.mark_point(filled=True, size=60, color=SERIES[0], opacity=1).encode(
            y=y, x=alt.X("speed-up:Q", title="times as fast as the baseline", scale=alt.Scale(zero=False, padding=10))
        )
    ).properties(width=WIDTH - 130, height=max(90, 22 * len(rows)))
    baseline = (report.comparison.baseline or {}).get("name", "the baseline")
    caption = f"Ratio of the p50 latencies with its interval; the baseline is {baseline}. An interval across 1 shows no difference."
    return Figure("Speed-up", caption, svg_from_chart(_config(chart), "speedup"), _sources(report))


def _stages(report: Report) -> Figure | None:
    import altair as alt

    if not report.stages:
        return None
    rows = [{"build": bar.label, "stage": bar.stage, "seconds": bar.seconds} for bar in report.stages]
    y = alt.Y("build:N", title=None, axis=alt.Axis(labelLimit=190))
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar()
        .encode(
            x=alt.X("seconds:Q", title="seconds"),
            y=y,
            color=alt.Color("stage:N", scale=_colors([bar.stage for bar in report.stages])),
        )
        .properties(width=WIDTH - 130, height=max(60, 26 * len({row["build"] for row in rows})))
    )
    return Figure("Time to build", "Time of each stage when it was made, not when it came from the store.",
                  svg_from_chart(_config(chart), "stages"))  # fmt: skip


def _machine(report: Report) -> list[Figure]:
    drawn = []
    for trace in report.machine:
        name = f"machine-{trace.quantity}"
        svg = _line(
            trace.curves, "seconds from the start of the measurement", trace.quantity, name, log=False, step=False
        )
        files = tuple(file for curve in trace.curves for file in curve.files)
        drawn.append(Figure(trace.quantity, "What the machine did while it was measured.", svg, files))
    return drawn


def _kernels(report: Report) -> Figure | None:
    kernels = (report.profile or {}).get("kernels") or []
    if not kernels:
        return None
    import vl_convert

    total = sum(one["total_ns"] for one in kernels) or 1
    leaves = [
        {
            "id": at,
            "parent": 0,
            "name": one["name"].removeprefix("void ")[:60],
            "size": one["total_ns"],
            "color": SERIES[0] if one.get("tensor_core") else SERIES[1],
            "aria": f"{one['name'][:80]}: {one['total_ns'] / 1e6:.3f} ms, {one['total_ns'] / total:.1%}"
            + (", Tensor Cores" if one.get("tensor_core") else ""),
        }
        for at, one in enumerate(sorted(kernels, key=lambda one: -one["total_ns"])[:40], start=1)
    ]
    svg = vl_convert.vega_to_svg(_treemap([{"id": 0, "parent": None, "name": "all"}, *leaves]), allowed_base_urls=[])
    caption = "Area is time on the GPU. The first colour marks kernels that use Tensor Cores, the second all others."
    return Figure("Kernels", caption, _themed(svg, "kernels"), report.profile_files)


def _treemap(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    box = {
        "x": {"field": "x0"}, "y": {"field": "y0"}, "x2": {"field": "x1"}, "y2": {"field": "y1"},
    }  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega/v5.json",
        "width": WIDTH + 60,
        "height": HEIGHT + 40,
        "background": "transparent",
        "autosize": "none",
        "data": [
            {
                "name": "tree",
                "values": nodes,
                "transform": [
                    {"type": "stratify", "key": "id", "parentKey": "parent"},
                    {"type": "treemap", "field": "size", "sort": {"field": "value", "order": "descending"},
                     "size": [{"signal": "width"}, {"signal": "height"}], "paddingInner": 2, "round": True},
                ],
            },
            {"name": "leaves", "source": "tree", "transform": [{"type": "filter", "expr": "!datum.children"}]},
        ],
        "marks": [
            {"type": "rect", "from": {"data": "leaves"}, "encode": {"enter": {
                **box, "fill": {"field": "color"}, "fillOpacity": {"value": 0.85}, "description": {"field": "aria"}}}},
            {"type": "text", "from": {"data": "leaves"}, "aria": False, "encode": {"enter": {
                "x": {"field": "x0", "offset": 4}, "y": {"field": "y0", "offset": 13}, "fontSize": {"value": 11},
                "fill": {"value": "#ffffff"}, "text": {"field": "name"},
                "limit": {"signal": "max(0, datum.x1 - datum.x0 - 8)"},
                "opacity": {"signal": "datum.y1 - datum.y0 > 16 && datum.x1 - datum.x0 > 40 ? 1 : 0"}}}},
        ],
    }  # fmt: skip


def _tensor_cores(report: Report) -> Figure | None:
    import altair as alt

    cores = (report.profile or {}).get("tensor_cores") or {}
    missed = [one for one in cores.get("missed") or [] if one.get("could_save_ns")]
    if not missed:
        return None
    rows = [
        {"layer": str(one.get("kernel") or one["name"])[:48], "ms": one["could_save_ns"] / 1e6} for one in missed[:15]
    ]
    y = alt.Y("layer:N", title=None, sort="-x", axis=alt.Axis(labelLimit=190))
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar(color=SERIES[1])
        .encode(x=alt.X("ms:Q", title="ms that Tensor Cores could save"), y=y)
        .properties(width=WIDTH - 130, height=22 * len(rows))
    )
    caption = "Layers that could use Tensor Cores and do not, by the time that could be saved."
    return Figure("Missed Tensor Cores", caption, svg_from_chart(_config(chart), "tensor-cores"), report.profile_files)


def _roofline(report: Report) -> Figure | None:
    import altair as alt

    roofline = (report.profile or {}).get("roofline") or {}
    peaks = roofline.get("peaks") or {}
    layers = [one for one in roofline.get("layers") or [] if one.get("intensity") and one.get("bound_ns")]
    types = [one["type"] for one in layers]
    peak = (peaks.get("flops_per_s") or {}).get(max(types, key=types.count)) if types else None
    bandwidth = peaks.get("bytes_per_s")
    if not layers or not peak or not bandwidth:
        return None
    timed = [one for one in layers if one.get("measured_ns")]
    layers = timed or layers
    intensities = [one["intensity"] for one in layers]
    low, high, ridge = min(*intensities, 1.0), max(*intensities, peak / bandwidth * 4), peak / bandwidth
    roof = [{"x": x, "y": min(peak, x * bandwidth) / 1e12} for x in (low, ridge, high)]
    rows = [
        {
            "x": one["intensity"],
            "y": 2e-3 * one["macs"] / one["measured_ns" if timed else "bound_ns"],
            "layer": one["name"],
        }
        for one in layers
    ]
    x = alt.X("x:Q", title="operations per byte", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("y:Q", title="TFLOP/s", scale=alt.Scale(type="log", nice=False))
    chart = (
        alt.Chart(alt.InlineData(roof)).mark_line(color=INK, strokeWidth=2, aria=False).encode(x=x, y=y)
        + alt.Chart(alt.InlineData(rows)).mark_point(filled=True, color=SERIES[0], size=45).encode(x=x, y=y, description="layer:N")
    ).properties(width=WIDTH, height=HEIGHT)  # fmt: skip
    what = "Each point is a layer" if timed else "Each point is a layer at its bound: layers were not timed one by one"
    caption = f"{what}; the line is what the GPU allows (peaks: {peaks.get('source', 'unknown')})."
    return Figure("Roofline", caption, svg_from_chart(_config(chart), "roofline"), report.profile_files)
