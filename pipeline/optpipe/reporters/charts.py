"""The report's figures of measurements: latency, throughput, frontier, speed-up, the machine."""

from collections.abc import Sequence
from typing import Any

from optpipe.reporters.charts_profile import draw_kernels, draw_roofline, draw_tensor_cores
from optpipe.reporters.drawing import (
    BAD,
    GOOD,
    HEIGHT,
    INK,
    LONGEST_LABEL,
    SERIES,
    WIDTH,
    Figure,
    choose_axis_scale,
    configure_chart,
    encode_color,
    encode_shape,
    svg_from_chart,
)
from optpipe.reporters.report import Curve, RawFile, Report


def draw_figures(report: Report) -> list[Figure]:
    """Every figure that `report` has the data for, in reading order."""
    drawn = (
        _draw_latency_throughput(report),
        _draw_distribution(report),
        _draw_frontier(report),
        _draw_accuracy(report),
        _draw_energy(report),
        _draw_speedup(report),
        _draw_stages(report),
        *_draw_machine(report),
        draw_kernels(report),
        *draw_tensor_cores(report),
        draw_roofline(report),
    )
    return [figure for figure in drawn if figure is not None]


def _rows(report: Report) -> list[dict[str, Any]]:
    found = []
    for row in report.comparison.rows:
        latency = row.latency_ns.get("p99") or row.latency_ns.get("p50")
        if latency is None or row.throughput_images_per_s is None:
            continue
        found.append(
            {
                "build": row.series,
                "batch size": row.load.batch_size,
                "latency": latency.value / 1e6,
                "percentile": "p99" if "p99" in row.latency_ns else "p50",
                "images per second": row.throughput_images_per_s.value,
                "frontier": "on the frontier" if row.on_frontier else "dominated" if row.valid else "INVALID",
                "label": row.label,
                "load": f"{row.load.scenario}, {row.load.mode}",
                "top1": row.top1,
                "energy": row.energy_j_per_image,
            }
        )
    return found


def _plain_rows(report: Report) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("top1", "energy")} for row in _rows(report)]


def _draw_latency_throughput(report: Report) -> Figure | None:
    import altair as alt

    rows = _plain_rows(report)
    if not rows:
        return None
    name = rows[0]["percentile"]
    rates = choose_axis_scale([row["images per second"] for row in rows])
    times = choose_axis_scale([row["latency"] for row in rows])
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("images per second:Q", title="images per second", scale=rates, axis=alt.Axis(tickCount=6)),
        y=alt.Y("latency:Q", title=f"{name} latency (ms)", scale=times),
        color=encode_color("build", [row["build"] for row in rows]),
        order="batch size:Q",
        detail="load:N",
    )
    texts = base.mark_text(dy=-10, fontSize=11, aria=False).encode(text="batch size:Q", color=alt.value(INK))
    chart = (
        base.mark_line(strokeWidth=2, aria=False)
        + base.mark_point(filled=True, size=55, opacity=1).encode(
            shape=encode_shape("build", [row["build"] for row in rows])
        )
        + texts
    ).properties(width=WIDTH, height=HEIGHT)
    caption = "Each line is a build, each point a batch size. Down and to the right is better."
    return Figure(
        "Latency vs. throughput",
        caption,
        svg_from_chart(configure_chart(chart), "latency-throughput"),
        _sources(report),
    )


def _sources(report: Report) -> tuple[RawFile, ...]:
    return tuple(dict.fromkeys(file for curve in report.latencies for file in curve.files))


def _draw_lines(
    curves: Sequence[Curve], x: str, y: str, name: str, *, log: bool, step: bool, percent: bool = False
) -> str:
    import altair as alt

    points = [{"x": px, "y": py, "series": curve.label} for curve in curves for px, py in curve.points]
    scale = choose_axis_scale([px for curve in curves for px, _ in curve.points], 0) if log else alt.Scale(zero=False)
    y_axis = alt.Y("y:Q", title=y, scale=alt.Scale(zero=percent), axis=alt.Axis(format="%") if percent else alt.Axis())
    labels = [curve.label for curve in curves]
    chart = (
        alt.Chart(alt.InlineData(points))
        .mark_line(strokeWidth=2, interpolate="step-after" if step else "linear", clip=True)
        .encode(x=alt.X("x:Q", title=x, scale=scale), y=y_axis, color=encode_color("series", labels))
        .properties(width=WIDTH, height=HEIGHT)
    )
    return svg_from_chart(configure_chart(chart), name)


def _draw_distribution(report: Report) -> Figure | None:
    if not report.latencies:
        return None
    svg = _draw_lines(
        report.latencies, "latency (ms)", "queries completed within", "ecdf", log=True, step=True, percent=True
    )
    caption = "Share of queries completed within a given time, from the raw samples; nothing is trimmed."
    files = tuple(file for curve in report.latencies for file in curve.files)
    return Figure("Latency distribution", caption, svg, files)


def _draw_frontier(report: Report) -> Figure | None:
    import altair as alt

    rows = _plain_rows(report)
    if len(rows) < 2:
        return None
    rates = choose_axis_scale([row["images per second"] for row in rows], 14)
    times = choose_axis_scale([row["latency"] for row in rows], 14)
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
    caption = "No other build beats a frontier build on every metric at once. The table of builds shows what dominates the others."
    return Figure("Frontier", caption, svg_from_chart(configure_chart(chart), "frontier"), _sources(report))


def _draw_accuracy(report: Report) -> Figure | None:
    caption = (
        "Top-1 accuracy with its interval, at the latency of each build and batch size. Up and to the left is better."
    )
    return _draw_beside_latency(report, "top1", "Accuracy vs. latency", "top-1 accuracy (%)", 100.0, caption)


def _draw_energy(report: Report) -> Figure | None:
    caption = "Energy per image with its interval; approximate. Down and to the left is better."
    return _draw_beside_latency(report, "energy", "Energy vs. latency", "mJ per image", 1e3, caption)


def _draw_beside_latency(
    report: Report, what: str, title: str, unit: str, factor: float, caption: str
) -> Figure | None:
    """A figure of each row, times `factor`, over its latency; nothing where fewer than two rows have it."""
    import altair as alt

    rows = [
        {
            **{name: row[name] for name in ("build", "batch size", "latency", "label", "load")},
            "value": factor * row[what].value,
            "low": factor * row[what].bounds[0],
            "high": factor * row[what].bounds[1],
        }
        for row in _rows(report)
        if row[what] is not None
    ]
    if len(rows) < 2:
        return None
    times = choose_axis_scale([row["latency"] for row in rows], 14)
    y_title = alt.Y("value:Q", title=unit, scale=alt.Scale(zero=False, padding=10))
    builds = [row["build"] for row in rows]
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("latency:Q", title=f"{_rows(report)[0]['percentile']} latency (ms)", scale=times),
        color=encode_color("build", builds),
    )
    points = base.mark_point(filled=True, size=55, opacity=1)
    chart = (
        base.mark_rule(strokeWidth=2, opacity=0.6, aria=False).encode(y=alt.Y("low:Q", title=unit), y2="high:Q")
        + points.encode(y=y_title, shape=encode_shape("build", builds), description="label:N")
        + base.mark_text(dx=11, fontSize=11, aria=False).encode(y=y_title, text="batch size:Q", color=alt.value(INK))
    ).properties(width=WIDTH, height=HEIGHT)
    return Figure(title, caption, svg_from_chart(configure_chart(chart), title), _sources(report))


def _draw_speedup(report: Report) -> Figure | None:
    import altair as alt

    rows: list[dict[str, Any]] = [
        {"label": row.label, "speed-up": row.speedup.value, "low": row.speedup.low, "high": row.speedup.high}
        for row in report.comparison.rows
        if row.speedup is not None and row.change in ("faster", "slower", "no difference shown")
    ]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: -float(row["speed-up"]))[:24]
    y = alt.Y("label:N", title=None, sort=[row["label"] for row in rows], axis=alt.Axis(labelLimit=LONGEST_LABEL))
    base = alt.Chart(alt.InlineData(rows))
    chart = (
        alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(color=INK, strokeDash=[3, 3], aria=False).encode(x="one:Q")
        + base.mark_rule(strokeWidth=3, color=SERIES[0], aria=False).encode(y=y, x="low:Q", x2="high:Q")
        + base.mark_point(filled=True, size=60, color=SERIES[0], opacity=1).encode(
            y=y, x=alt.X("speed-up:Q", title="speed-up over the baseline", scale=alt.Scale(zero=False, padding=10))
        )
    ).properties(width=WIDTH - 130, height=max(90, 22 * len(rows)))
    baseline = report.comparison.baseline.name if report.comparison.baseline else "the baseline"
    caption = f"Ratio of the p50 latencies with its interval; the baseline is {baseline}. An interval that contains 1 shows no difference."
    return Figure("Speed-up", caption, svg_from_chart(configure_chart(chart), "speedup"), _sources(report))


def _draw_stages(report: Report) -> Figure | None:
    import altair as alt

    if not report.stages:
        return None
    rows = [{"build": bar.label, "stage": bar.stage, "seconds": bar.seconds} for bar in report.stages]
    y = alt.Y("build:N", title=None, axis=alt.Axis(labelLimit=LONGEST_LABEL))
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar()
        .encode(
            x=alt.X("seconds:Q", title="seconds"),
            y=y,
            color=encode_color("stage", [bar.stage for bar in report.stages]),
        )
        .properties(width=WIDTH - 130, height=max(60, 26 * len({row["build"] for row in rows})))
    )
    return Figure("Build time", "Time each stage took when it ran, not when its result was reused from the store.",
                  svg_from_chart(configure_chart(chart), "stages"), report.stage_files)  # fmt: skip


def _draw_machine(report: Report) -> list[Figure]:
    drawn = []
    for trace in report.machine:
        name = f"machine-{trace.quantity}"
        svg = _draw_lines(
            trace.curves, "seconds from the start of the measurement", trace.quantity, name, log=False, step=False
        )
        files = tuple(file for curve in trace.curves for file in curve.files)
        drawn.append(Figure(trace.quantity, "State of the machine during the measurement.", svg, files))
    return drawn
