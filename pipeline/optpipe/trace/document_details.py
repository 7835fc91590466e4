"""The parts of a profile's document that come from sources recorded on request, modules, loops, counters, and comparisons."""

from collections.abc import Iterator, Sequence

import polars as pl

from optpipe.core.quantity import Dimension, format_bytes, format_duration, format_quantity
from optpipe.report.charts import Bar, Curve, draw_distributions, draw_timeline
from optpipe.report.document import (
    Cell,
    Column,
    ColumnKind,
    Figure,
    Part,
    RawFiles,
    Row,
    Section,
    Sentence,
    Table,
    Tone,
    figure_column,
    figure_columns,
    make_table,
)
from optpipe.trace.analysis import Analysis
from optpipe.trace.counters import Counters, weigh_counters
from optpipe.trace.details import OsCalls, Stacks, StageDetails, select_devices
from optpipe.trace.differences import (
    Change,
    Difference,
    ProfileDifference,
    Side,
    StageDifference,
)
from optpipe.trace.kernels import shorten_name
from optpipe.trace.loops import Loop, Spread
from optpipe.trace.modules import ModuleRow, ModuleTree, group_paths
from optpipe.trace.read import match_names
from optpipe.trace.report import StageProfile, TraceProfile
from optpipe.trace.workers import WorkerTrial, choose_trial
from optpipe.workspace.energy import EnergyUse

_ROWS, _STACK_ROWS, _MODULE_ROWS, _WIDTH = 12, 10, 25, 56
_SHOWN_METRICS = (
    "SMs Active", "SM Active", "SM Issue", "Tensor Active", "DRAM Read", "DRAM Write", "PCIe RX", "PCIe TX", "NVLink RX",
    "NVLink TX", "GR Active", "Compute Warps in Flight [Throughput", "GPC Clock",
)  # fmt: skip
_LANGUAGES = {"python": "Python lines", "native": "CPU functions"}


def list_detail_parts(
    profile: TraceProfile,
    details: StageDetails | None,
    modules: ModuleTree | None,
    loop: Loop | None,
    counters: Counters | None,
    energy: EnergyUse | None,
    batch_size: int | None = None,
) -> Iterator[Part]:
    """Nothing for a part that was not recorded; a sentence with the way out for one that was refused."""
    if loop is not None:
        yield from describe_loop_parts(loop)
    if energy is not None:
        yield describe_energy(energy, batch_size)
    if modules is not None:
        yield from tabulate_modules(modules, energy)
    if counters is not None:
        yield from _describe_counted(counters, profile)
        yield from tabulate_counters(counters)
    if details is not None:
        yield from _tabulate_metrics(details)
        if details.os_calls is not None:
            yield from _tabulate_os_calls(details.os_calls)
        for stacks in (details.python, details.native):
            if stacks is not None:
                yield from _tabulate_stacks(stacks)
        if (switches := details.switches) is not None:
            off = f"{format_duration(switches.off_cpu_ns)} off the CPU"
            yield Sentence(
                f"{switches.count} times, {off}, {switches.threads} threads",
                Tone.PLAIN,
                "context switches",
            )
        for state in details.sources:
            if not state.recorded:
                text = f"{state.name} is not recorded: {state.why}"
                yield Sentence(text, Tone.DOUBTFUL, remedy=state.remedy)


def describe_energy(energy: EnergyUse, batch_size: int | None = None) -> Sentence:
    """Joules of the GPU and of the CPU packages, each with the reason if it is not known, and performance per watt."""
    texts = []
    for what, joules, why_not in (
        ("GPU", energy.gpu_j, energy.gpu_why_not),
        ("CPU packages", energy.cpu_j, energy.cpu_why_not),
    ):
        if joules is None:
            texts.append(f"{what}: not counted ({why_not})")
            continue
        joules_each = joules / (energy.iterations or 1)
        unit = " an iteration" if energy.iterations else ""
        text = f"{what}: {_format_joules(joules_each)}{unit}, {joules / energy.seconds:.0f} W"
        if batch_size and energy.iterations and joules > 0:
            rate = batch_size * energy.iterations / joules
            text += f", {format_quantity(rate, Dimension.SAMPLE_EFFICIENCY)}"
        texts.append(text)
    known = energy.gpu_j is not None or energy.cpu_j is not None
    over = f"; approximate, over {energy.seconds:.1f} s" if known else ""
    return Sentence("; ".join(texts) + over, Tone.PLAIN if known else Tone.FAINT, "energy")


def _format_joules(joules: float) -> str:
    if joules >= 100:
        return f"{joules:,.0f} J"
    return f"{joules:.3g} J" if joules >= 1 else f"{joules * 1e3:.3g} mJ"


def describe_loop_parts(loop: Loop) -> Iterator[Part]:
    period = loop.period_ns
    text = f"{loop.iterations_per_s:.3g} iterations/s, {_format_spread(period)} each ({loop.iterations} of {loop.range})"
    yield Sentence(text, Tone.STRONG, "loop")
    rows: list[Row] = []
    for name, spread in (
        (f"wait for data ({loop.data_range})", loop.data_wait_ns),
        ("GPU busy", loop.gpu_busy_ns),
        ("GPU idle before the first launch", loop.idle_before_first_launch_ns),
    ):
        if spread is not None:
            share = f"{spread.median / period.median:.0%}" if period.median else ""
            rows.append((name, format_duration(spread.median), _format_quartiles(spread), share))
    if loop.blocking_copies:
        rows.append(
            (
                f"blocking copies ({loop.blocking_copies:.3g})",
                format_duration(loop.blocking_copy_ns),
                "",
                f"{loop.blocking_copy_ns / period.median:.0%}" if period.median else "",
            )
        )
    if rows:
        columns: list[Column | str] = [
            "per iteration",
            *figure_columns("median", "quartiles", "share"),
        ]
        yield make_table(columns, rows)


def tabulate_trials(trials: Sequence[WorkerTrial]) -> Iterator[Part]:
    """What each number of DataLoader workers does to the wait, and the fewest that end it."""
    if not trials:
        return
    rows: list[Row] = []
    for trial in trials:
        loop, share = trial.loop, trial.wait_share
        wait = "" if loop.data_wait_ns is None else format_duration(loop.data_wait_ns.median)
        name = "as it is" if trial.workers is None else str(trial.workers)
        spread = _format_spread(loop.period_ns)
        rows.append((name, spread, wait, "" if share is None else f"{share:.0%}"))
    columns = figure_columns("each iteration", "wait for data", "share")
    yield make_table(["workers", *columns], rows)
    chosen = choose_trial(trials)
    if chosen is None:
        fastest = min(trials, key=lambda trial: trial.loop.period_ns.median)
        name = "the program as it is" if fastest.workers is None else f"{fastest.workers} workers"
        text = f"the loop waits for data with every number that was tried; {name} took least time"
    else:
        text = f"{chosen.workers} workers end the wait: the fewest that were tried with which it takes at most 5% of an iteration"
    yield Sentence(text, Tone.STRONG)


def _format_spread(spread: Spread) -> str:
    return f"{format_duration(spread.median)} [{_format_quartiles(spread)}]"


def _format_quartiles(spread: Spread) -> str:
    return f"{format_duration(spread.low)}, {format_duration(spread.high)}"


def tabulate_modules(tree: ModuleTree, energy: EnergyUse | None = None) -> Iterator[Part]:
    """The modules that take at least 1%, in the order in which they run; times per iteration.

    The energy of a module is estimated as its share of the kernel time.
    """
    iteration_j = None
    if energy is not None and energy.gpu_j is not None and energy.iterations:
        iteration_j = energy.gpu_j / energy.iterations
    named = tree.named_ns / tree.kernel_ns if tree.kernel_ns else 0.0
    yield Sentence(f"{named:.0%} of kernel time belongs to a named module", Tone.STRONG, "modules")
    worth = [row for row in tree.rows if row.share >= 0.01]
    shown = sorted(sorted(worth, key=lambda row: -row.time_ns)[:_MODULE_ROWS], key=tree.rows.index)
    cells: list[Row] = [
        (
            f"{'  ' * (row.depth - 1)}{_shorten(row.path)}",
            f"{row.share:.1%}",
            format_duration(row.time_ns / tree.iterations),
            f"{row.kernels / tree.iterations:.0f}",
            _format_tensor_cores(row),
            ", ".join(row.precisions[:3]),
            "" if iteration_j is None else f"≈ {_format_joules(row.share * iteration_j)}",
        )
        for row in shown
    ]
    columns: list[Column | str] = [
        "module",
        *figure_columns("share", "time", "kernels"),
        figure_column("Tensor Cores"),
        "types",
        figure_column("energy"),
    ]
    more = len(tree.rows) - len(shown)
    caption = "Tensor Cores: share of the module's matrix work that uses them"
    if iteration_j is not None:
        caption += "; energy: the GPU's, by the share of kernel time"
    caption += f"\n{more} smaller modules are in the JSON" if more else ""
    yield make_table(columns, cells, caption=caption)
    groups: list[Row] = [
        (
            group_paths(group.paths),
            str(len(group.paths)),
            f"{group.share:.1%}",
            format_duration(group.time_ns / tree.iterations),
            format_duration(group.time_ns / tree.iterations / len(group.paths)),
        )
        for group in tree.groups[:_ROWS]
    ]
    if groups:
        yield make_table(
            ["equal blocks", *figure_columns("count", "share", "time", "each")], groups
        )


def _format_tensor_cores(row: ModuleRow) -> str:
    return f"{min(row.tensor_core_ns / row.matrix_ns, 1):.0%}" if row.matrix_ns else ""


def _describe_counted(counters: Counters, profile: TraceProfile) -> Iterator[Sentence]:
    """What the counted kernels move, beside the roofline's estimate for all layers."""
    iterations = profile.iterations.count if profile.iterations else 1
    kernels = ((row.name, row.total_ns, row.count) for row in profile.measured.kernels)
    counted = weigh_counters(counters, kernels, iterations)
    if counted is None:
        return
    text = (
        f"{counted.share:.0%} of kernel time; DRAM at {counted.dram_peak_share:.0%} of its peak, "
    )
    text += f"multiprocessors at {counted.sm_peak_share:.0%}"
    if counted.dram_bytes is not None:
        text += f"; {format_bytes(counted.dram_bytes)} of DRAM per iteration"
        if profile.roofline is not None:
            layers = profile.roofline.layers
            estimate = sum(
                row.cost.bytes if row.cost.fused_bytes is None else row.cost.fused_bytes
                for row in layers
            )
            text += f", where the graph's layers need {format_bytes(estimate)} with elementwise operators fused"
    yield Sentence(text, Tone.STRONG, "counted")


def tabulate_counters(counters: Counters) -> Iterator[Part]:
    if not counters.kernels:
        yield Sentence(
            f"kernels were not counted: {counters.why}", Tone.DOUBTFUL, remedy=counters.remedy
        )
        return
    cells: list[Row] = [
        (
            _shorten(shorten_name(row.name)),
            format_duration(row.duration_ns) if row.duration_ns else "",
            _percent(row.occupancy_percent),
            format_bytes(row.dram_bytes) if row.dram_bytes is not None else "",
            _percent(row.dram_peak_percent),
            _percent(row.sm_peak_percent),
            _percent(row.tensor_pipe_percent),
            "" if row.waves is None else f"{row.waves:.2f}",
            row.limiter,
        )
        for row in counters.kernels
    ]
    figures = figure_columns("time", "occupancy", "DRAM", "of peak", "SM", "Tensor pipe", "waves")
    caption = f"{counters.tool}, clocks as they are, caches emptied before each launch; DRAM, SM, Tensor pipe: of the sustained "
    caption += "peak; waves: blocks of the GPU's places"
    yield make_table(["counted kernels", *figures, "limited by"], cells, caption=caption)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def _tabulate_metrics(details: StageDetails) -> Iterator[Table]:
    cells: list[Row] = []
    for row in details.metrics:
        if any(word in row.name for word in _SHOWN_METRICS) and not row.name.endswith(
            ("[Avg]", "Cycle]")
        ):
            unit = "%" if "%" in row.name else ""
            busy = "" if row.mean_busy is None else f"{row.mean_busy:.0f}{unit}"
            name = row.name.replace(" [Throughput %]", "")
            cells.append((name, f"{row.mean:.0f}{unit}", busy, f"{row.maximum:.0f}{unit}"))
    if cells:
        samples = max(row.samples for row in details.metrics)
        columns: list[Column | str] = [
            "GPU metric",
            *figure_columns("mean", "in kernels", "maximum"),
        ]
        yield make_table(columns, cells, caption=f"{samples} samples")


def _tabulate_os_calls(calls: OsCalls) -> Iterator[Part]:
    by_kind = sorted(calls.by_kind_ns.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{kind} {format_duration(ns)}" for kind, ns in by_kind)
    threads = "1 thread" if calls.threads == 1 else f"{calls.threads} threads"
    yield Sentence(f"{text} ({threads})", Tone.STRONG, "OS calls")
    cells: list[Row] = [
        (row.name, row.kind, f"{row.share:.1%}", format_duration(row.total_ns), str(row.count))
        for row in calls.rows[:_ROWS]
    ]
    yield make_table(["OS call", "kind", *figure_columns("share", "total", "count")], cells)


def _tabulate_stacks(stacks: Stacks) -> Iterator[Part]:
    cells: list[Row] = [
        (
            _shorten(row.function),
            row.place,
            f"{row.self_share:.1%}",
            f"{row.total_share:.1%}",
        )
        for row in stacks.rows[:_STACK_ROWS]
        if row.self_samples
    ]
    name = _LANGUAGES[stacks.language]
    columns: list[Column | str] = [name, "where", *figure_columns("self", "with callees")]
    yield make_table(
        columns, cells, caption=f"{stacks.samples} samples of {stacks.threads} threads"
    )


CHANGES = {
    Change.APPEARED: Tone.BAD,
    Change.SLOWER: Tone.BAD,
    Change.VANISHED: Tone.GOOD,
    Change.FASTER: Tone.GOOD,
    Change.FUSED: Tone.GOOD,
    Change.SAME: Tone.FAINT,
}


def list_difference_parts(difference: ProfileDifference) -> Iterator[Part]:
    for stage in difference.stages:
        title = f"{stage.after} against {stage.before} of {difference.against}"
        yield Section(title, tuple(_list_stage_difference(stage)))
    if difference.unmatched:
        yield Sentence(f"only in one profile: {', '.join(difference.unmatched)}", Tone.DOUBTFUL)
    if not difference.stages:
        yield Sentence("the profiles have no stage in common", Tone.DOUBTFUL)


def _list_stage_difference(stage: StageDifference) -> Iterator[Part]:
    unit = "per iteration" if stage.per_iteration else "in total, because nothing repeats"
    if stage.notes:
        text = "the two differ: " + "; ".join(stage.notes)
        yield Sentence(text, Tone.DOUBTFUL)
    yield _tabulate_differences(f"total {unit}", stage.totals, notable=False)
    yield _tabulate_differences("kind of work", stage.kinds, notable=False)
    for what, rows in (("module", stage.modules), ("kernel", stage.kernels)):
        changed = [row for row in rows if row.change is not Change.SAME]
        if changed:
            yield _tabulate_differences(what, changed)
        elif rows:
            yield Sentence(f"no {what} changed by more than its scatter", Tone.FAINT)


def _tabulate_differences(what: str, rows: Sequence[Difference], *, notable: bool = True) -> Table:
    cells: list[Row] = [
        (
            _shorten(shorten_name(row.name) if what == "kernel" else row.name),
            _format_side(row.before),
            _format_side(row.after),
            _format_change(row),
            _format_interval(row),
            _format_counts(row) if notable else "",
            Cell(row.change, CHANGES[row.change]),
        )
        for row in rows[:_ROWS]
    ]
    more = f"and {len(rows) - len(cells)} more" if len(rows) > len(cells) else ""
    before, after, change, launches = figure_columns("before", "after", "change", "launches")
    interval = Column("95% interval", ColumnKind.FIGURE, below=True)
    state = Column("is", ColumnKind.STATE)
    columns: list[Column | str] = [what, before, after, change, interval, launches, state]
    return make_table(columns, cells, caption=more)


def _format_side(side: Side) -> str:
    if not side.mean_ns:
        return ""
    scatter = "" if side.deviation_ns is None else f" ± {format_duration(side.deviation_ns)}"
    return f"{format_duration(side.mean_ns)}{scatter}"


def _format_change(row: Difference) -> str:
    if not row.before.mean_ns:
        return "new"
    if not row.after.mean_ns:
        return "gone"
    return f"{row.change_ns / row.before.mean_ns:+.1%}"


def _format_interval(row: Difference) -> str:
    if row.interval_ns is None or not row.before.mean_ns:
        return ""
    low, high = (f"{edge / row.before.mean_ns:+.1%}" for edge in row.interval_ns)
    return f"[{low}, {high}]"


def _format_counts(row: Difference) -> str:
    earlier, later = row.before.count, row.after.count
    return f"{earlier:.3g}" if earlier == later else f"{earlier:.3g} → {later:.3g}"


_MOST_BARS = 1_500


_DRAWN_METRICS = (
    "SMs Active",
    "SM Active",
    "Tensor Active",
    "DRAM Read",
    "DRAM Write",
    "PCIe RX",
    "PCIe TX",
)
_MOST_POINTS = 240
"""A drawing is 272 pixels wide."""


def draw_details(
    stage: StageProfile, files: RawFiles, measured: Analysis | None
) -> Iterator[Figure]:
    """GPU metrics over time, if `measured` has them, and the network's modules as an icicle, if the stage names them."""
    if measured is not None:
        yield from draw_metrics(measured, files)
    if stage.modules is not None:
        yield from draw_module_tree(stage.modules, files)


def draw_metrics(measured: Analysis, files: RawFiles) -> Iterator[Figure]:
    """Activity of the GPU's units in the measured part; samples of one point of the drawing are averaged."""
    start_ns, end_ns = measured.timeline.start_ns, measured.timeline.end_ns
    during = pl.col("time_ns").is_between(start_ns, end_ns, closed="left")
    inside = select_devices(measured.trace.metrics.filter(during), measured.trace)
    width_ns = max((end_ns - start_ns) // _MOST_POINTS, 1)
    curves = []
    for word in _DRAWN_METRICS:
        mine = inside.filter(match_names(inside, rf"^{word}\b.*%"))
        mine = mine.filter(pl.col("name") == mine["name"].first()) if mine.height else mine
        table = (
            mine.group_by((pl.col("time_ns") - start_ns) // width_ns)
            .agg(pl.col("value").mean())
            .sort("time_ns")
        )
        if table.height > 1 and table["value"].max():
            points = tuple((at * width_ns / 1e6, value / 100) for at, value in table.iter_rows())
            curves.append(Curve(word, points, files))
    if curves:
        caption = "Hardware counters of the GPU over the measured part of the recording."
        yield draw_distributions("GPU activity", caption, curves, "ms", "share of the peak")


def draw_module_tree(tree: ModuleTree, files: RawFiles) -> Iterator[Figure]:
    """An icicle: each module over those below it, as wide as its time; color: whether its matrix work uses Tensor Cores."""
    bars: list[Bar] = []
    cursor: dict[str, float] = {}
    placed: dict[str, float] = {"": 0.0}
    for row in tree.rows:
        parent = row.path.rpartition(".")[0]
        start = cursor.get(parent, placed.get(parent, 0.0))
        width = row.time_ns / tree.iterations / 1e6
        cursor[parent] = start + width
        placed[row.path] = start
        name = f"{row.path} ({row.share:.1%})"
        bars.append(Bar(f"level {row.depth}", _color(row), width, start, start + width, name))
    shown = sorted(bars, key=lambda bar: -bar.value)[:_MOST_BARS]
    shown.sort(key=lambda bar: (bar.label, bar.low))
    if shown:
        caption = "Each bar is a module, as wide as the kernel time of one iteration in it; below it are its parts."
        yield draw_timeline("GPU time by module", caption, shown, "ms of kernel time", files)


def _color(row: ModuleRow) -> str:
    if not row.matrix_ns:
        return "no matrix work"
    share = row.tensor_core_ns / row.matrix_ns
    return "Tensor Cores" if share >= 0.5 else "matrix work without Tensor Cores"


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
