"""The figures of a comparison of builds, and the sentences that state few values."""

from collections.abc import Sequence
from dataclasses import replace

from optpipe.core.comparison import Comparison, ComparisonRow, Goal
from optpipe.core.load import name_sample
from optpipe.core.metrics.measured import P50, P99
from optpipe.core.quantity import Estimate
from optpipe.report.charts import (
    FEWEST_POINTS,
    Bar,
    Curve,
    Point,
    draw_bars,
    draw_distributions,
    draw_or_state_points,
    draw_processes,
)
from optpipe.report.document import Figure, RawFiles, Sentence

MAX_SPEEDUPS = 24


def draw_comparison(
    comparison: Comparison, latencies: Sequence[Curve] = (), processes: Sequence[Point] = ()
) -> list[Figure | Sentence]:
    """Draws every figure with enough data, in reading order; the first three state what they show.

    Figures of fewer than FEWEST_POINTS points are sentences.

    `latencies` are empirical distribution functions: ms, share of the queries in [0, 1].
    """
    files = tuple(dict.fromkeys(file for curve in latencies for file in curve.files))
    measured = [row for row in comparison.rows if row.latency_ns and row.throughput_images_per_s]
    # p99 if every row has it, otherwise p50 for all
    percentile = (P99 if all(P99.read_row(row) for row in measured) else P50).name
    rows = [row for row in measured if percentile in row.latency_ns]

    drawn: list[Figure | Sentence] = []
    if rows:
        drawn.append(_draw_throughput(comparison, rows, percentile, files))
    if latencies:
        drawn.append(_draw_latencies(latencies, len(comparison.rows)))
    if processes:
        figure = draw_processes(processes, files)
        few = len(processes) < FEWEST_POINTS
        drawn.append(Sentence(figure.finding, label="Processes") if few else figure)

    sample = name_sample(row.load.sample for row in rows)
    drawn += _draw_against_latency(
        [(row, row.top1.scale(100.0)) for row in rows if row.top1 is not None],
        percentile,
        files,
        title="Accuracy vs. latency",
        y="top-1 accuracy (%)",
        caption="Top-1 accuracy with its interval, at the latency of each build and batch size. Up and to the left is better.",
    )
    drawn += _draw_against_latency(
        [
            (row, energy.scale(1e3))
            for row in rows
            if (energy := row.energy_j_per_image) is not None
        ],
        percentile,
        files,
        title="Energy vs. latency",
        y=f"mJ per {sample}",
        caption=f"Energy per {sample} with its interval; approximate. Down and to the left is better.",
    )
    return drawn + _draw_speedups(comparison, files)


def _draw_throughput(
    comparison: Comparison, rows: Sequence[ComparisonRow], percentile: str, files: RawFiles
) -> Figure | Sentence:
    points = [
        _make_point(row, rate.value, row.latency_ns[percentile].value / 1e6)
        for row in rows
        if (rate := row.throughput_images_per_s) is not None
    ]
    best, reason = comparison.best[Goal.THROUGHPUT], comparison.best_reason[Goal.THROUGHPUT]
    leader = f"{comparison.row(best).label} has the highest throughput" if best else "Throughput"
    return draw_or_state_points(
        "Latency vs. throughput",
        "Each line is a build, each point a batch size. Down and to the right is better. No other build beats one on the "
        "frontier in every metric at once.",
        points,
        f"{name_sample(row.load.sample for row in rows)}s per second",
        f"{percentile} latency (ms)",
        files,
        finding=leader + ": " + reason if len(points) > 1 else "",
    )


def _draw_latencies(latencies: Sequence[Curve], measurements: int) -> Figure:
    caption = (
        "Share of queries completed within a given time, from the raw samples; nothing is trimmed."
    )
    if len(latencies) < measurements:
        caption += f" {len(latencies)} of {measurements} measurements."
    first = latencies[0]
    times = [x for x, share in first.points if share >= 0.5]
    figure = draw_distributions(
        "Latency distribution", caption, latencies, "latency (ms)", "queries completed within"
    )
    finding = f"{first.label}: half of the queries complete within {times[0]:.3g} ms, all within {times[-1]:.3g} ms"
    return replace(figure, finding=finding)


def _draw_against_latency(
    figures: Sequence[tuple[ComparisonRow, Estimate]],
    percentile: str,
    files: RawFiles,
    *,
    title: str,
    y: str,
    caption: str,
) -> list[Figure | Sentence]:
    """The rows' figures over their latency; nothing if no row has one."""
    points = [
        _make_point(row, row.latency_ns[percentile].value / 1e6, figure.value, figure)
        for row, figure in figures
    ]
    if not points:
        return []
    return [draw_or_state_points(title, caption, points, f"{percentile} latency (ms)", y, files)]


def _draw_speedups(comparison: Comparison, files: RawFiles) -> list[Figure | Sentence]:
    bars = [
        Bar(row.label, "", row.speedup.value, row.speedup.low, row.speedup.high)
        for row in comparison.rows
        if row.change in ("faster", "slower", "no difference shown") and row.speedup is not None
    ]
    if not bars:
        return []
    bars = sorted(bars, key=lambda bar: -bar.value)[:MAX_SPEEDUPS]
    baseline = comparison.baseline or "the baseline"
    if len(bars) < FEWEST_POINTS:
        stated = "; ".join(_state_speedup(bar) for bar in bars)
        return [Sentence(f"over {baseline}: {stated}", label="Speed-up")]
    caption = (
        f"Ratio of the p50 latencies with its interval; the baseline is {baseline}. "
        "An interval that contains 1 shows no difference."
    )
    return [draw_bars("Speed-up", caption, bars, "speedup over the baseline", files, reference=1.0)]


def _state_speedup(bar: Bar) -> str:
    interval = "" if bar.low is None or bar.high is None else f" [{bar.low:.2f}, {bar.high:.2f}]"
    return f"{bar.label} {bar.value:.2f}×{interval}"


def _make_point(row: ComparisonRow, x: float, y: float, interval: Estimate | None = None) -> Point:
    load = ", ".join([*row.load.list_lengths(), row.load.scenario, row.load.mode])
    flag = "INVALID" if not row.valid else "frontier" if row.on_frontier else ""
    bounds = (None, None) if interval is None else (interval.low, interval.high)
    group = "" if interval else f"{row.series} {load}"
    tooltip = f"{row.label}; batch size: {row.load.batch_size}"
    return Point(row.series, tooltip, x, y, str(row.load.batch_size), flag, group, *bounds)
