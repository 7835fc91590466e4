"""The report's figures of a profile: kernels, Tensor Cores, roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

from optpipe.reporters.drawing import (
    HEIGHT,
    INK,
    SERIES,
    WIDTH,
    Figure,
    apply_theme,
    configure_chart,
    svg_from_chart,
)
from optpipe.reporters.report import RawFile, Report
from optpipe.trace.timeline.kernels import shorten_name


def draw_kernels(report: Report) -> Figure | None:
    """A treemap of the kernels by time."""
    profile = report.profile or {}
    kernels = profile.get("measured_views", profile).get("kernels") or []
    if not kernels:
        return None
    import vl_convert

    total = sum(one["total_ns"] for one in kernels) or 1
    leaves = [
        {
            "id": at,
            "parent": 0,
            "name": shorten_name(one["name"], 44),
            "size": one["total_ns"],
            "color": SERIES[0] if one.get("tensor_core") else SERIES[1],
            "aria": f"{one['name'][:80]}: {one['total_ns'] / 1e6:.3f} ms, {one['total_ns'] / total:.1%}"
            + (", Tensor Cores" if one.get("tensor_core") else ""),
        }
        for at, one in enumerate(sorted(kernels, key=lambda one: -one["total_ns"])[:40], start=1)
    ]
    svg = vl_convert.vega_to_svg(_treemap([{"id": 0, "parent": None, "name": "all"}, *leaves]), allowed_base_urls=[])
    caption = "Area is GPU time. The first color marks kernels that use Tensor Cores; the second marks all others."
    return Figure("Kernels", caption, apply_theme(svg, "kernels"), report.profile_files)


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
                "limit": {"signal": "max(0, datum.x1 - datum.x0 - 12)"},
                "opacity": {"signal": "datum.y1 - datum.y0 > 16 && datum.x1 - datum.x0 > 40 ? 1 : 0"}}}},
        ],
    }  # fmt: skip


def draw_tensor_cores(report: Report) -> list[Figure]:
    """Kernel time by kind of work with the part on Tensor Cores, and what the layers that miss them could save."""
    cores = (report.profile or {}).get("tensor_cores") or {}
    drawn = (_draw_kinds(cores.get("groups") or [], report.profile_files), _draw_missed(cores, report.profile_files))
    return [figure for figure in drawn if figure is not None]


def _draw_kinds(groups: Sequence[Mapping[str, Any]], files: tuple[RawFile, ...]) -> Figure | None:
    import altair as alt

    rows = [
        {"kind": one["kind"], "ms": ns / 1e6, "on": on}
        for one in groups
        for on, ns in (
            ("Tensor Cores", one["tensor_core_ns"]),
            ("other units", one["total_ns"] - one["tensor_core_ns"]),
        )
        if ns > 0
    ]
    if not rows:
        return None
    names = ["Tensor Cores", "other units"]
    order = [one["kind"] for one in groups]
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", title="ms of kernel time"),
            y=alt.Y("kind:N", title=None, sort=order, axis=alt.Axis(labelLimit=190)),
            color=alt.Color("on:N", scale=alt.Scale(domain=names, range=[SERIES[0], SERIES[1]])),
            order=alt.Order("on:N", sort="descending"),
        )
        .properties(width=WIDTH - 130, height=max(60, 24 * len(order)))
    )
    total, on = (sum(one[name] for one in groups) for name in ("total_ns", "tensor_core_ns"))
    caption = f"Kernel time by kind of work; {on / max(total, 1):.0%} of it runs on Tensor Cores."
    return Figure("Tensor Core use by kind of work", caption, svg_from_chart(configure_chart(chart), "kinds"), files)


def _draw_missed(cores: Mapping[str, Any], files: tuple[RawFile, ...]) -> Figure | None:
    import altair as alt

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
        .properties(width=WIDTH - 130, height=max(40, 22 * len(rows)))
    )
    caption = "Layers that could use Tensor Cores but do not, by the time they could save."
    return Figure("Missed Tensor Cores", caption, svg_from_chart(configure_chart(chart), "tensor-cores"), files)


def draw_roofline(report: Report) -> Figure | None:
    """The layers under the device's ceilings: as measured where most of the arithmetic was timed, else at their bounds."""
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
    if 2 * sum(one["macs"] for one in timed) < sum(one["macs"] for one in layers):
        timed = []
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
    what = (
        "Each point is a layer" if timed else "Each point is a layer at its bound: layers were not timed individually"
    )
    caption = f"{what}; the line is the device's limit (peaks: {peaks.get('source', 'unknown')})."
    return Figure("Roofline", caption, svg_from_chart(configure_chart(chart), "roofline"), report.profile_files)
