"""A bench run on the terminal: figures with their intervals, and beneath them what may not be believed and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

from optpipe.core.bench_record import (
    ArtifactLimit,
    BenchPairRecord,
    BenchRecord,
    BenchSort,
    Change,
    LimitRecord,
    TuningRecord,
    UnjudgedPoint,
)
from optpipe.core.measurement import Measurement, Options, Validity, format_option
from optpipe.core.units import format_bytes, format_duration
from optpipe.stats.percentiles import count_samples_needed

_LAST = float("inf")
MAX_REASONS_SHOWN = 4
"""Reasons of one kind that are named one by one."""
TEXT_COLUMNS = ("artifact", "device", "load")
DROPPABLE_COLUMNS = ("memory", "CV", "batches/s", "p90 ms", "samples", "J/image")
"""What a narrow terminal goes without, in this order."""
Columns = list[tuple[str, Sequence[str | Text]]]


def _sort_rows(rows: Sequence[Measurement], sort: BenchSort) -> list[Measurement]:
    keys: dict[BenchSort, Callable[[Measurement], float]] = {
        BenchSort.LATENCY: lambda row: _get_value(row, "p50") or _LAST,
        BenchSort.THROUGHPUT: lambda row: -row.throughput_images_per_s.value if row.throughput_images_per_s else 0.0,
        BenchSort.MEMORY: lambda row: row.memory_bytes or _LAST,
        BenchSort.ENERGY: lambda row: row.energy_j_per_image.value if row.energy_j_per_image else _LAST,
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def render_bench(record: BenchRecord, sort: BenchSort) -> RenderableType:
    """All measurements, then the limit's answer, then reasons with their remedies."""
    rows = _sort_rows(record.measurements, sort)
    lines: list[RenderableType] = [_render_figures(rows)]
    called = _name_artifacts(rows)
    lines += _render_limit(record.limit, called)
    lines += _render_tuning(record.tuning, called)
    lines += _render_reasons(rows)
    lines += _render_withheld(rows)
    lines.append(Text(f"run {record.run_dir}", style="dim"))
    return Group(*lines)


def _render_figures(rows: list[Measurement]) -> RenderableType:
    """One line per measurement; what is the same for all of them stands above the table."""
    tails = [name for name in ("p90", "p99", "p99.9") if any(_get_value(row, name) is not None for row in rows)]
    called = _name_artifacts(rows)
    columns: Columns = [
        ("artifact", [called[row.subject.artifact] for row in rows]),
        ("device", [_format_device(row) for row in rows]),
        ("load", [_format_load(row) for row in rows]),
        ("batch", [str(row.load.batch_size) for row in rows]),
        ("rate/s", [_format_number(row.load.rate_per_s) for row in rows]),
        ("p50 ms", [_format_with_interval(row, "p50") for row in rows]),
        *((f"{name} ms", [_format_with_interval(row, name) for row in rows]) for name in tails),
        ("CV", [f"{row.latency_ns.cv.value:.1%}" if row.latency_ns and row.latency_ns.cv else "" for row in rows]),
        (
            "images/s",
            [
                _format_number(row.throughput_images_per_s.value if row.throughput_images_per_s else None)
                for row in rows
            ],
        ),
        ("batches/s", [_format_number(row.throughput_batches_per_s) for row in rows]),
        ("memory", ["" if row.memory_bytes is None else format_bytes(row.memory_bytes) for row in rows]),
        (
            "J/image",
            [_format_number(row.energy_j_per_image.value if row.energy_j_per_image else None, "≈") for row in rows],
        ),
        ("samples", [f"{row.samples:,}" for row in rows]),
        ("verdict", [_format_verdict(row) for row in rows]),
    ]
    same = {name for name, cells in columns if name in TEXT_COLUMNS and len(set(cells)) == 1}
    kept = [(name, cells) for name, cells in columns if any(cells) and name not in same]
    models = dict.fromkeys(str(row.subject.model) for row in rows)
    shared = ", ".join(str(cells[0]) for name, cells in columns if name in same)
    heading = ": ".join(each for each in ("" if len(models) > 1 else next(iter(models), ""), shared) if each)
    return Group(Text(heading), _Fitting(kept)) if rows else _make_table(kept)


@dataclass(frozen=True)
class _Fitting:
    """A table that leaves out whole columns, and says which, where the terminal would cut into figures and verdicts."""

    columns: Columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, dropped = list(self.columns), []
        for name in DROPPABLE_COLUMNS:
            if Width.get(console, options.update(max_width=9999), _make_table(kept)).maximum <= options.max_width:
                break
            dropped += [each for each, _ in kept if each == name]
            kept = [each for each in kept if each[0] != name]
        yield _make_table(kept)
        if dropped:
            yield Text(f"hidden on this narrow terminal: {', '.join(dropped)} (see --json)", style="dim")


def _make_table(columns: Columns) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in (*TEXT_COLUMNS, "verdict") else "right", no_wrap=True)
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _name_artifacts(rows: list[Measurement]) -> dict[str, str]:
    """What each artifact is called among the others: `onnxruntime fp32`, with its model or its id where that is not enough."""
    model = len({row.subject.model for row in rows}) > 1
    names = {
        row.subject.artifact: f"{row.subject.model if model else ''} {row.subject.backend} {row.subject.precision}".strip()
        for row in rows
    }
    like = [(names[row.subject.artifact], row.subject.device, row.subject.artifact) for row in rows]
    twice = {one[2] for one in like if any(one[:2] == other[:2] and one[2] != other[2] for other in like)}
    return {each: f"{each} {name}" if each in twice else name for each, name in names.items()}


def _format_load(row: Measurement) -> str:
    load = row.load
    streams = f", {load.streams} streams" if load.streams > 1 else ""
    return f"{load.scenario}, {load.mode}{streams}"


def _format_device(row: Measurement) -> str:
    graph = {True: ", CUDA graph", False: ", no CUDA graph", None: ""}[row.subject.cuda_graph]
    return f"{row.subject.device}{graph}"


def render_pair(record: BenchPairRecord) -> RenderableType:
    """The ratio first, in words; INVALID processes last."""
    found = record.comparison
    if found is None:
        text = f"interrupted before the last round: no comparison; the measurements are kept in {record.run_dir}"
        return Text(text, style="yellow")
    ratio = found.ratio
    style = {Change.FASTER: "green", Change.SLOWER: "red"}.get(ratio.change, "")
    answer = Text(f"{record.contender} is {ratio.change}", style=style)
    if ratio.change is Change.NO_DIFFERENCE:
        answer = Text(f"no difference shown between {record.baseline} and {record.contender}")
    detail = (
        f"{record.measurements[0].load}: "
        f"{found.metric} ratio {ratio.value:.4f} ({ratio.confidence:.0%} interval {ratio.ci[0]:.4f} to {ratio.ci[1]:.4f}) "
        f"over {ratio.rounds} rounds of fresh processes; a difference of {ratio.smallest_visible:.1%} would be detected"
    )
    codes = ", ".join(f"{code} {count}" for code, count in found.invalid.items())
    invalid = f"INVALID  {found.invalid_processes} of {len(found.measurements)} processes ({codes}); they count"
    return Group(
        answer,
        Text(detail),
        *([Text(invalid, style="yellow")] if found.invalid_processes else []),
        Text(f"run {record.run_dir}", style="dim"),
    )


def _render_limit(limit: LimitRecord | None, called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in limit.artifacts if limit else ():
        what, label = _format_point(each), _format_label(each, called)
        value = "" if each.value_ns is None else f" ({format_duration(each.value_ns)})"
        doubt = "" if each.verdict is Validity.VALID else ", from an INVALID measurement"
        if each.inside:
            text = f"{label}: largest within {each.slo} is {what}{value}{doubt}"
            lines.append(Text(text, style="yellow" if doubt else "green"))
        elif each.measurement is None:
            lines.append(Text(f"{label}: {each.slo} could not be judged", style="yellow"))
        else:
            says = "nothing meets" if each.met is False else "nothing is proven to meet"
            text = f"{label}: {says} {each.slo}; closest is {what}{value}{doubt}"
            lines.append(Text(text, style="red" if each.met is False else "yellow"))
        if unknown := each.not_judged:
            points = ", ".join(_format_point(one) for one in unknown)
            text = f"{label}: not judged at {points}: {unknown[0].why}; measure longer (--min-time)"
            lines.append(Text(text, style="yellow"))
    return lines


def _format_point(record: ArtifactLimit | UnjudgedPoint) -> str:
    rate = record.rate_per_s
    return f"batch {record.batch_size}" if rate is None else f"{rate:.4g} queries/s"


def _format_options(label: str, options: Options) -> str:
    backend = label.partition(" ")[0]
    return " ".join(f"--option {backend}.{name}={format_option(value)}" for name, value in options.items())


def _format_label(record: ArtifactLimit | TuningRecord, called: Mapping[str, str]) -> str:
    """`onnxruntime fp32 (cpu)`, or what tells the artifact from the others of the run."""
    plain, _, device = record.label.partition(" (")
    return f"{called.get(record.artifact, plain)} ({device}" if device else plain


def _render_tuning(tuning: Sequence[TuningRecord], called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in tuning:
        found: dict[str, list[str]] = {}
        for size, options in each.chosen.items():
            found.setdefault(_format_options(each.label, options), []).append(str(size))
        lines += [
            Text(f"tuned {_format_label(each, called)}, batch {', '.join(sizes)}: {text} (of {len(each.trials)} tried)")
            for text, sizes in found.items()
        ]
        if not found:
            text = (
                f"tuning {_format_label(each, called)} was interrupted ({len(each.trials)} tried): nothing was chosen"
            )
            lines.append(Text(text, style="yellow"))
        lines += [
            Text(
                f"rejected for wrong outputs, batch {', '.join(map(str, trial.wrong_outputs))}: "
                f"{_format_options(each.label, trial.options)}",
                style="red",
            )
            for trial in each.trials
            if trial.wrong_outputs
        ]
    return lines


def _render_reasons(rows: list[Measurement]) -> list[Text]:
    """Reasons of one kind together, each with what was seen where, and the remedy once."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    called = _name_artifacts(rows)
    for row in rows:
        for reason in row.reasons:
            where = _format_where(row, called)
            key = (reason.invalidates, reason.code, reason.remedy)
            found.setdefault(key, []).append(f"{where}: {reason.message}")
    return [
        Text(
            _format_with_remedy(f"{'INVALID' if invalid else 'note'}  {code}", seen, remedy),
            style="yellow" if invalid else "dim",
        )
        for (invalid, code, remedy), seen in found.items()
    ]


def _render_withheld(rows: list[Measurement]) -> list[Text]:
    """Why a percentile is missing that has samples enough; one that was given too few was not asked for, or is INVALID."""
    called = _name_artifacts(rows)
    seen = [
        f"{_format_where(row, called)}: {name}: {why}"
        for row in rows
        for name, why in (row.latency_ns.withheld if row.latency_ns else {}).items()
        if row.samples >= count_samples_needed(float(name[1:]))
    ]
    remedy = "measure longer (--min-time), or on a quieter machine"
    return [Text(_format_with_remedy("note  withheld", seen, remedy), style="dim")] if seen else []


def _format_with_remedy(heading: str, seen: Sequence[str], remedy: str) -> str:
    more = [f"… and {len(seen) - MAX_REASONS_SHOWN} more"] if len(seen) > MAX_REASONS_SHOWN else []
    return "\n".join([heading, *(f"    {each}" for each in (*seen[:MAX_REASONS_SHOWN], *more)), f"    → {remedy}"])


def _format_where(row: Measurement, called: Mapping[str, str]) -> str:
    rate = "" if row.load.rate_per_s is None else f" at {row.load.rate_per_s:.4g}/s"
    return f"{called[row.subject.artifact]} batch {row.load.batch_size}{rate}"


def _format_verdict(row: Measurement) -> Text:
    if row.is_valid:
        return Text("VALID", style="green")
    return Text("INVALID", style="red")


def _get_value(row: Measurement, name: str) -> float | None:
    found = row.latency_ns.percentiles.get(name) if row.latency_ns else None
    return None if found is None else found.value


def _format_with_interval(row: Measurement, name: str) -> str:
    """`0.2632 ±0.4%`: the value with the wider side of its interval; both sides are in the JSON."""
    found = row.latency_ns.percentiles.get(name) if row.latency_ns else None
    if found is None:
        return ""
    low, high = found.bounds
    return f"{_format_number(found.value / 1e6)} ±{max(high - found.value, found.value - low) / found.value:.1%}"


def _format_number(value: float | None, prefix: str = "") -> str:
    if value is None:
        return ""
    return f"{prefix}{value:,.0f}" if value >= 1000 else f"{prefix}{value:.4g}"
