"""The figures of a profile: kernels, Tensor Cores, roofline."""

from collections.abc import Sequence

from optpipe.report.charts import (
    FONT_SIZE,
    HEIGHT,
    INK,
    PAPER,
    SERIES,
    WIDTH,
    apply_theme,
    configure_chart,
    encode_color,
    legend_from_labels,
    svg_from_chart,
)
from optpipe.report.document import Figure, RawFile
from optpipe.trace.kernels import shorten_name
from optpipe.trace.records import KindRow, TraceProfile
from optpipe.trace.tensor_cores import LayerUse


def draw_profile(profile: TraceProfile, files: tuple[RawFile, ...]) -> list[Figure]:
    """Kernels by time, their time by kind of work, what Tensor Cores could save, and the roofline, as far as they are known."""
    drawn = [_draw_kernels(profile, files)]
    if profile.tensor_cores is not None:
        drawn += [_draw_kinds(profile.measured.kernel_kinds, files), _draw_missed(profile.tensor_cores.missed, files)]
    drawn.append(_draw_roofline(profile, files))
    return [figure for figure in drawn if figure is not None]


def _draw_kernels(profile: TraceProfile, files: tuple[RawFile, ...]) -> Figure | None:
    """A treemap of the kernels by time."""
    kernels = profile.measured.kernels
    if not kernels:
        return None
    import vl_convert

    leaves = [
        {
            "id": at,
            "parent": 0,
            "name": shorten_name(row.name, 44),
            "size": row.total_ns,
            "color": SERIES[0] if row.tensor_core else SERIES[1],
            "aria": f"{row.name[:80]}: {row.total_ns / 1e6:.3f} ms, {row.share:.1%}"
            + (", Tensor Cores" if row.tensor_core else ""),
        }
        for at, row in enumerate(kernels[:40], start=1)
    ]
    svg = vl_convert.vega_to_svg(_treemap([{"id": 0, "parent": None, "name": "all"}, *leaves]), allowed_base_urls=[])
    legend = legend_from_labels(["Tensor Cores", "other units"], "■")
    return Figure("Kernels", "Area is GPU time.", apply_theme(svg, "kernels"), files, legend)


def _treemap(nodes: list[dict[str, object]]) -> dict[str, object]:
    box = {
        "x": {"field": "x0"}, "y": {"field": "y0"}, "x2": {"field": "x1"}, "y2": {"field": "y1"},
    }  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega/v5.json",
        "width": WIDTH + 60,
        "height": HEIGHT + 80,
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
                "x": {"field": "x0", "offset": 4}, "y": {"field": "y0", "offset": 14}, "fontSize": {"value": FONT_SIZE},
                "fill": {"value": PAPER}, "text": {"field": "name"},
                "limit": {"signal": "max(0, 0.75 * (datum.x1 - datum.x0) - 8)"},
                "opacity": {"signal": "datum.y1 - datum.y0 > 18 && datum.x1 - datum.x0 > 60 ? 1 : 0"}}}},
        ],
    }  # fmt: skip


def _draw_kinds(kinds: Sequence[KindRow], files: tuple[RawFile, ...]) -> Figure | None:
    import altair as alt

    rows = [
        {"kind": str(row.kind), "ms": ns / 1e6, "on": on}
        for row in kinds
        for on, ns in (("Tensor Cores", row.tensor_core_ns), ("other units", row.total_ns - row.tensor_core_ns))
        if ns > 0
    ]
    if not rows:
        return None
    names = ["Tensor Cores", "other units"]
    order = [str(row.kind) for row in kinds]
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="ms of kernel time"),
            y=alt.Y("kind:N", title=None, sort=order, axis=alt.Axis(labelLimit=130)),
            color=encode_color("on", names),
            order=alt.Order("on:N", sort="descending"),
        )
        .properties(width=WIDTH - 90, height=max(60, 24 * len(order)))
    )
    on = sum(row.tensor_core_ns for row in kinds) / max(sum(row.total_ns for row in kinds), 1)
    caption = f"Kernel time by kind of work; {on:.0%} of it runs on Tensor Cores."
    svg = svg_from_chart(configure_chart(chart), "kinds")
    return Figure("Tensor Core use by kind of work", caption, svg, files, legend_from_labels(names, "■"))


def _draw_missed(layers: Sequence[LayerUse], files: tuple[RawFile, ...]) -> Figure | None:
    import altair as alt

    missed = [each for each in layers if each.could_save_ns]
    if not missed:
        return None
    rows = [{"layer": (each.kernel or each.name)[:48], "ms": each.could_save_ns / 1e6} for each in missed[:15]]
    y = alt.Y("layer:N", title=None, sort="-x", axis=alt.Axis(labelLimit=170))
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar(color=SERIES[1])
        .encode(x=alt.X("ms:Q", title="ms that Tensor Cores could save"), y=y)
        .properties(width=WIDTH - 130, height=max(40, 22 * len(rows)))
    )
    caption = "Layers that could use Tensor Cores but do not, by the time they could save."
    return Figure("Missed Tensor Cores", caption, svg_from_chart(configure_chart(chart), "tensor-cores"), files)


def _draw_roofline(profile: TraceProfile, files: tuple[RawFile, ...]) -> Figure | None:
    """The layers under the device's ceilings: as measured where most of the arithmetic was timed, else at their bounds."""
    import altair as alt

    found = profile.roofline
    layers = [each for each in found.layers if each.intensity and each.bound_ns] if found else []
    types = [each.cost.type for each in layers]
    peak = found.peaks.flops_per_s.get(max(types, key=types.count)) if found and types else None
    if found is None or not peak:
        return None
    bandwidth = found.peaks.bytes_per_s
    timed = [each for each in layers if each.measured_ns]
    if 2 * sum(each.cost.macs for each in timed) < sum(each.cost.macs for each in layers):
        timed = []
    layers = timed or layers
    intensities = [each.intensity for each in layers]
    low, high, ridge = min(*intensities, 1.0), max(*intensities, peak / bandwidth * 4), peak / bandwidth
    roof = [{"x": x, "y": min(peak, x * bandwidth) / 1e12} for x in (low, ridge, high)]
    rows = [
        {
            "x": each.intensity,
            "y": 2e-3 * each.cost.macs / ((each.measured_ns if timed else None) or each.bound_ns),
            "layer": each.cost.name,
        }
        for each in layers
    ]
    x = alt.X("x:Q", title="operations per byte", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("y:Q", title="TFLOP/s", scale=alt.Scale(type="log", nice=False))
    chart = (
        alt.Chart(alt.InlineData(roof)).mark_line(color=INK, strokeWidth=2, aria=False).encode(x=x, y=y)
        + alt.Chart(alt.InlineData(rows)).mark_point(filled=True, color=SERIES[0], size=45).encode(x=x, y=y, description="layer:N")
    ).properties(width=WIDTH, height=HEIGHT)  # fmt: skip
    what = (
        "Each point is a layer" if timed else "Each point is a layer at its bound: layers were not timed individually"
    )
    caption = f"{what}; the line is the device's limit (peaks: {found.peaks.source})."
    return Figure("Roofline", caption, svg_from_chart(configure_chart(chart), "roofline"), files)
