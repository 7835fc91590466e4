"""A bench run on the terminal: figures with their intervals, and beneath them what may not be believed and why."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
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
from optpipe.core.measurement import Measurement, Options, Validity, format_option, name_sample
from optpipe.core.measurement_group import MeasurementGroup
from optpipe.core.units import format_bytes, format_duration
from optpipe.report.tables import FittingTable
from optpipe.stats.percentiles import count_samples_needed

_LAST = float("inf")
MAX_REASONS_SHOWN = 4
"""Reasons of one kind that are named one by one."""
TEXT_COLUMNS = ("artifact", "device", "load")
DROPPABLE_COLUMNS = ("memory", "batches/s", "CV", "inside", "p90 ms", "J/image", "J/sample", "between")
"""What a narrow terminal goes without, in this order."""


def _sort_groups(groups: Sequence[MeasurementGroup], sort: BenchSort) -> list[MeasurementGroup]:
    keys: dict[BenchSort, Callable[[MeasurementGroup], float]] = {
        BenchSort.LATENCY: lambda group: _get_value(group, "p50") or _LAST,
        BenchSort.THROUGHPUT: lambda group: -(_get_value(group, "throughput") or 0.0),
        BenchSort.MEMORY: lambda group: _find_peak_bytes(group) or _LAST,
        BenchSort.ENERGY: lambda group: _get_value(group, "energy") or _LAST,
    }
    return sorted(groups, key=keys[sort]) if sort in keys else list(groups)


def render_bench(record: BenchRecord, sort: BenchSort) -> RenderableType:
    """All loads, then the limit's answer, then reasons with their remedies."""
    rows = record.measurements
    called = _name_artifacts(rows)
    groups = _sort_groups(record.groups, sort)
    lines: list[RenderableType] = [_render_figures(groups, called)]
    lines += _render_limit(record.limit, called)
    lines += _render_tuning(record.tuning, called)
    lines += _render_few_processes(groups)
    lines += _render_lengths(rows)
    lines += _render_reasons(rows)
    lines += _render_withheld(rows)
    lines.append(Text(f"run {record.run_dir}", style="dim"))
    return Group(*lines)


def _render_figures(groups: Sequence[MeasurementGroup], called: Mapping[str, str]) -> RenderableType:
    """One line per load; what is the same for all of them stands above the table."""
    tails = [name for name in ("p90", "p99", "p99.9") if any(name in group.figures for group in groups)]
    sample = name_sample(group.load.sample for group in groups)
    columns: list[tuple[str, Sequence[str | Text]]] = [
        ("artifact", [called[group.subject.artifact] for group in groups]),
        ("device", [_format_device(group) for group in groups]),
        ("load", [_format_load(group) for group in groups]),
        ("batch", [str(group.load.batch_size) for group in groups]),
        ("length", ["" if group.load.length is None else str(group.load.length) for group in groups]),
        ("rate/s", [_format_number(group.load.rate_per_s) for group in groups]),
        ("p50 ms", [_format_with_interval(group, "p50") for group in groups]),
        *((f"{name} ms", [_format_with_interval(group, name) for group in groups]) for name in tails),
        ("between", [_format_scatter(group, "between") for group in groups]),
        ("inside", [_format_scatter(group, "inside") for group in groups]),
        ("CV", [f"{value:.1%}" if (value := _get_value(group, "cv")) is not None else "" for group in groups]),
        (f"{sample}s/s", [_format_number(_get_value(group, "throughput")) for group in groups]),
        ("tokens/s", [_format_number(_get_value(group, "tokens")) for group in groups]),
        ("batches/s", [_format_batches_per_s(group) for group in groups]),
        ("memory", [format_bytes(value) if (value := _find_peak_bytes(group)) else "" for group in groups]),
        (f"J/{sample}", [_format_number(_get_value(group, "energy"), "≈") for group in groups]),
        ("processes", [_format_processes(group) for group in groups]),
        ("verdict", [_format_verdict(group) for group in groups]),
    ]
    same = {name for name, cells in columns if name in TEXT_COLUMNS and len(set(cells)) == 1}
    kept = [(name, cells) for name, cells in columns if any(cells) and name not in same]
    models = dict.fromkeys(str(group.subject.model) for group in groups)
    shared = ", ".join(str(cells[0]) for name, cells in columns if name in same)
    heading = ": ".join(each for each in ("" if len(models) > 1 else next(iter(models), ""), shared) if each)
    return Group(Text(heading), FittingTable(kept, (*TEXT_COLUMNS, "verdict"), DROPPABLE_COLUMNS))


def _format_processes(group: MeasurementGroup) -> str:
    """`5`, or `4 of 5` where some are INVALID."""
    tried = group.processes + len(group.left_out)
    return str(tried) if group.processes == tried else f"{group.processes} of {tried}"


def _format_scatter(group: MeasurementGroup, part: str) -> str:
    """The scatter of p50 between processes, or inside one."""
    found = group.figures.get("p50")
    share = None if found is None else found.between if part == "between" else found.inside
    return "" if share is None else f"{share:.1%}"


def _render_few_processes(groups: Sequence[MeasurementGroup]) -> list[Text]:
    few = sorted({group.processes for group in groups if 0 < group.processes < 3})
    if not few:
        return []
    what = "one process" if few == [1] else "fewer than three processes"
    return [Text(f"{what}: the scatter between processes is not known; measure more (--processes 5)", style="yellow")]


def _render_lengths(rows: Sequence[Measurement]) -> list[Text]:
    """Whether texts are padded: to the one length of the build, or as the inputs are."""
    said: dict[str, None] = {}
    for row in rows:
        if row.load.length is None or row.inputs is None or row.inputs.lengths is None:
            continue
        low, high = row.inputs.lengths
        build = (
            f"fixed at {low} tokens: shorter texts are padded to it"
            if low == high
            else f"dynamic, {low} to {high} tokens"
        )
        filled = f"{row.inputs.padding:.0%} padding" if row.inputs.padding else "no padding"
        said[f"sequence length {build}; inputs of {row.load.length} have {filled}"] = None
    return [Text(each, style="dim") for each in said]


def _name_artifacts(rows: Sequence[Measurement]) -> dict[str, str]:
    """What each artifact is called among the others: `onnxruntime fp32`, with its model or its id where that is not enough."""
    model = len({row.subject.model for row in rows}) > 1
    names = {
        row.subject.artifact: f"{row.subject.model if model else ''} {row.subject.backend} {row.subject.precision}".strip()
        for row in rows
    }
    like = [(names[row.subject.artifact], row.subject.device, row.subject.artifact) for row in rows]
    twice = {one[2] for one in like if any(one[:2] == other[:2] and one[2] != other[2] for other in like)}
    return {each: f"{each} {name}" if each in twice else name for each, name in names.items()}


def _format_load(group: MeasurementGroup) -> str:
    load = group.load
    streams = f", {load.streams} streams" if load.streams > 1 else ""
    return f"{load.scenario}, {load.mode}{streams}"


def _format_device(group: MeasurementGroup) -> str:
    graph = {True: ", CUDA graph", False: ", no CUDA graph", None: ""}[group.subject.cuda_graph]
    return f"{group.subject.device}{graph}"


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


def _render_reasons(rows: Sequence[Measurement]) -> list[Text]:
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


def _render_withheld(rows: Sequence[Measurement]) -> list[Text]:
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
    return f"{called[row.subject.artifact]} {row.load.size}{rate}"


def _format_verdict(group: MeasurementGroup) -> Text:
    if group.processes:
        return Text("VALID", style="green")
    return Text("INVALID", style="red")


def _get_value(group: MeasurementGroup, name: str) -> float | None:
    found = group.figures.get(name)
    return None if found is None else found.estimate.value


def _find_peak_bytes(group: MeasurementGroup) -> float:
    """The largest of all processes, as a sign-off judges it; 0 where none was measured."""
    return max(group.figures["memory"].processes, default=0.0) if "memory" in group.figures else 0.0


def _format_batches_per_s(group: MeasurementGroup) -> str:
    rate = _get_value(group, "throughput")
    return "" if rate is None else _format_number(rate / group.load.batch_size)


def _format_with_interval(group: MeasurementGroup, name: str) -> str:
    """`0.2632 ±0.4%`: the value with half its interval over processes; both bounds are in the JSON."""
    if name not in group.figures:
        return ""
    found = group.figures[name].estimate
    text = _format_number(found.value / 1e6)
    return text if found.high is None else f"{text} ±{(found.high - found.value) / found.value:.1%}"


def _format_number(value: float | None, prefix: str = "") -> str:
    if value is None:
        return ""
    return f"{prefix}{value:,.0f}" if value >= 1000 else f"{prefix}{value:.4g}"
