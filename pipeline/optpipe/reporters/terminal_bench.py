"""A bench run on the terminal: figures with their intervals, and beneath them what may not be believed and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optpipe.core.measurement import format_option
from optpipe.core.units import format_bytes
from optpipe.errors import BadInputError
from optpipe.stats.percentiles import count_samples_needed

MeasurementRow = Mapping[str, Any]
_LAST = float("inf")
MAX_REASONS_SHOWN = 4
"""Reasons of one kind that are named one by one."""
TEXT_COLUMNS = ("artifact", "device", "load")
DROPPABLE_COLUMNS = ("memory", "CV", "batches/s", "p90 ms", "samples", "J/image")
"""What a narrow terminal goes without, in this order."""
Columns = list[tuple[str, Sequence[str | Text]]]


def sort_key_from_name(name: str) -> Callable[[MeasurementRow], Any] | None:
    """How `--sort NAME` orders rows; raises BadInputError for another name."""
    keys: dict[str, Callable[[MeasurementRow], Any] | None] = {
        "given": None,
        "latency": lambda row: _get_value(row, "p50") or _LAST,
        "throughput": lambda row: -(row["throughput_images_per_s"] or 0.0),
        "memory": lambda row: row["memory_bytes"] or _LAST,
        "energy": lambda row: row["energy_j_per_image"] or _LAST,
    }
    if name not in keys:
        raise BadInputError(f"--sort {name}: choose one of {', '.join(keys)}")
    return keys[name]


def render_bench(document: Mapping[str, Any], sort: str) -> RenderableType:
    """All measurements, then the limit's answer, then reasons with their remedies."""
    key = sort_key_from_name(sort)
    rows = document["measurements"] if key is None else sorted(document["measurements"], key=key)
    lines: list[RenderableType] = [_render_figures(rows)]
    called = _name_artifacts(rows)
    lines += _render_limit(document.get("limit"), called)
    lines += _render_tuning(document.get("tuning") or [], called)
    lines += _render_reasons(rows)
    lines += _render_withheld(rows)
    lines.append(Text(f"run {document['run_dir']}", style="dim"))
    return Group(*lines)


def _render_figures(rows: list[MeasurementRow]) -> RenderableType:
    """One line per measurement; what is the same for all of them stands above the table."""
    tails = [name for name in ("p90", "p99", "p99.9") if any(_get_value(row, name) is not None for row in rows)]
    called = _name_artifacts(rows)
    columns: Columns = [
        ("artifact", [called[row["artifact"]] for row in rows]),
        ("device", [_format_device(row) for row in rows]),
        ("load", [_format_load(row) for row in rows]),
        ("batch", [str(row["batch_size"]) for row in rows]),
        ("rate/s", [_format_number(row["offered_rate_per_s"]) for row in rows]),
        ("p50 ms", [_format_with_interval(row, "p50") for row in rows]),
        *((f"{name} ms", [_format_with_interval(row, name) for row in rows]) for name in tails),
        ("CV", ["" if row["latency_ms"] is None else f"{row['latency_ms']['cv']:.1%}" for row in rows]),
        ("images/s", [_format_number(row["throughput_images_per_s"]) for row in rows]),
        ("batches/s", [_format_number(row["throughput_batches_per_s"]) for row in rows]),
        ("memory", ["" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"]) for row in rows]),
        ("J/image", [_format_number(row["energy_j_per_image"], "≈") for row in rows]),
        ("samples", [f"{row['samples']:,}" for row in rows]),
        ("verdict", [_format_verdict(row) for row in rows]),
    ]
    same = {name for name, cells in columns if name in TEXT_COLUMNS and len(set(cells)) == 1}
    kept = [(name, cells) for name, cells in columns if any(cells) and name not in same]
    models = dict.fromkeys(str(row["model"]) for row in rows)
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
            if Measurement.get(console, options.update(max_width=9999), _make_table(kept)).maximum <= options.max_width:
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


def _name_artifacts(rows: list[MeasurementRow]) -> dict[str, str]:
    """What each artifact is called among the others: `onnxruntime fp32`, with its model or its id where that is not enough."""
    model = len({row["model"] for row in rows}) > 1
    names = {
        row["artifact"]: f"{row['model'] if model else ''} {row['backend']} {row['precision']}".strip() for row in rows
    }
    like = [(names[row["artifact"]], row["subject"]["device"], row["artifact"]) for row in rows]
    twice = {one[2] for one in like if any(one[:2] == other[:2] and one[2] != other[2] for other in like)}
    return {each: f"{each} {name}" if each in twice else name for each, name in names.items()}


def _format_load(row: MeasurementRow) -> str:
    streams = f", {row['streams']} streams" if row["streams"] > 1 else ""
    return f"{row['scenario']}, {row['mode']}{streams}"


def _format_device(row: MeasurementRow) -> str:
    graph = {True: ", CUDA graph", False: ", no CUDA graph", None: ""}[row["subject"]["cuda_graph"]]
    return f"{row['subject']['device']}{graph}"


def render_pair(document: Mapping[str, Any]) -> RenderableType:
    """The ratio first, in words."""
    first, second = document["baseline"], document["contender"]
    found = document["comparison"]
    if found is None:
        text = f"interrupted before the last round: no comparison; the measurements are kept in {document['run_dir']}"
        return Text(text, style="yellow")
    ratio, metric = found["ratio"], found["metric"]
    low, high = ratio["ci"]
    style = {"faster": "green", "slower": "red"}.get(found["verdict"], "")
    answer = Text(f"{second} is {found['verdict']}", style=style)
    if found["verdict"] == "no difference shown":
        answer = Text(f"no difference shown between {first} and {second}")
    row = document["measurements"][0]
    detail = (
        f"batch {row['batch_size']}, {_format_load(row)}: "
        f"{metric} ratio {ratio['value']:.4f} ({ratio['confidence']:.0%} interval {low:.4f} to {high:.4f}) "
        f"over {ratio['rounds']} rounds of fresh processes; a difference of {ratio['smallest_visible']:.1%} would be detected"
    )
    return Group(answer, Text(detail), Text(f"run {document['run_dir']}", style="dim"))


def _render_limit(limit: Mapping[str, Any] | None, called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in (limit or {}).get("artifacts", []):
        what, label = _format_point(each), _format_label(each, called)
        value = "" if each["value_ms"] is None else f" ({each['value_ms']:.3g} ms)"
        doubt = "" if each["verdict"] == "VALID" else ", from an INVALID measurement"
        if each["inside"]:
            text = f"{label}: largest within {each['slo']} is {what}{value}{doubt}"
            lines.append(Text(text, style="yellow" if doubt else "green"))
        elif each["measurement"] is None:
            lines.append(Text(f"{label}: {each['slo']} could not be judged", style="yellow"))
        else:
            says = "nothing meets" if each["met"] is False else "nothing is proven to meet"
            text = f"{label}: {says} {each['slo']}; closest is {what}{value}{doubt}"
            lines.append(Text(text, style="red" if each["met"] is False else "yellow"))
        if unknown := each["not_judged"]:
            points = ", ".join(_format_point(one) for one in unknown)
            text = f"{label}: not judged at {points}: {unknown[0]['why']}; measure longer (--min-time)"
            lines.append(Text(text, style="yellow"))
    return lines


def _format_point(record: Mapping[str, Any]) -> str:
    rate = record["rate_per_s"]
    return f"batch {record['batch_size']}" if rate is None else f"{rate:.4g} queries/s"


def _format_options(label: str, options: Mapping[str, Any]) -> str:
    backend = label.partition(" ")[0]
    return " ".join(f"--option {backend}.{name}={format_option(value)}" for name, value in options.items())


def _format_label(record: Mapping[str, Any], called: Mapping[str, str]) -> str:
    """`onnxruntime fp32 (cpu)`, or what tells the artifact from the others of the run."""
    plain, _, device = record["label"].partition(" (")
    return f"{called.get(record.get('artifact', ''), plain)} ({device}" if device else plain


def _render_tuning(tuning: list[Mapping[str, Any]], called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in tuning:
        found: dict[str, list[str]] = {}
        for size, options in each["chosen"].items():
            found.setdefault(_format_options(each["label"], options), []).append(size)
        lines += [
            Text(
                f"tuned {_format_label(each, called)}, batch {', '.join(sizes)}: {text} (of {len(each['trials'])} tried)"
            )
            for text, sizes in found.items()
        ]
        if not found:
            text = f"tuning {_format_label(each, called)} was interrupted ({len(each['trials'])} tried): nothing was chosen"
            lines.append(Text(text, style="yellow"))
        lines += [
            Text(
                f"rejected for wrong outputs, batch {', '.join(map(str, trial['wrong_answers']))}: "
                f"{_format_options(each['label'], trial['options'])}",
                style="red",
            )
            for trial in each["trials"]
            if trial["wrong_answers"]
        ]
    return lines


def _render_reasons(rows: list[MeasurementRow]) -> list[Text]:
    """Reasons of one kind together, each with what was seen where, and the remedy once."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    called = _name_artifacts(rows)
    for row in rows:
        for reason in row["reasons"]:
            where = _format_where(row, called)
            key = (bool(reason["invalidates"]), reason["code"], reason["remedy"])
            found.setdefault(key, []).append(f"{where}: {reason['message']}")
    return [
        Text(
            _format_with_remedy(f"{'INVALID' if invalid else 'note'}  {code}", seen, remedy),
            style="yellow" if invalid else "dim",
        )
        for (invalid, code, remedy), seen in found.items()
    ]


def _render_withheld(rows: list[MeasurementRow]) -> list[Text]:
    """Why a percentile is missing that has samples enough; one that was given too few was not asked for, or is INVALID."""
    called = _name_artifacts(rows)
    seen = [
        f"{_format_where(row, called)}: {name}: {why}"
        for row in rows
        for name, why in (row["latency_ms"] or {}).get("withheld", {}).items()
        if row["samples"] >= count_samples_needed(float(name[1:]))
    ]
    remedy = "measure longer (--min-time), or on a quieter machine"
    return [Text(_format_with_remedy("note  withheld", seen, remedy), style="dim")] if seen else []


def _format_with_remedy(heading: str, seen: Sequence[str], remedy: str) -> str:
    more = [f"… and {len(seen) - MAX_REASONS_SHOWN} more"] if len(seen) > MAX_REASONS_SHOWN else []
    return "\n".join([heading, *(f"    {each}" for each in (*seen[:MAX_REASONS_SHOWN], *more)), f"    → {remedy}"])


def _format_where(row: MeasurementRow, called: Mapping[str, str]) -> str:
    rate = "" if row["offered_rate_per_s"] is None else f" at {row['offered_rate_per_s']:.4g}/s"
    return f"{called[row['artifact']]} batch {row['batch_size']}{rate}"


def _format_verdict(row: MeasurementRow) -> Text:
    if row["verdict"] == "VALID":
        return Text("VALID", style="green")
    return Text("INVALID", style="red")


def _get_value(row: MeasurementRow, name: str) -> float | None:
    found = (row["latency_ms"] or {}).get(name)
    return None if found is None else float(found["value"])


def _format_with_interval(row: MeasurementRow, name: str) -> str:
    """`0.2632 ±0.4%`: the value with the wider side of its interval; both sides are in the JSON."""
    found = (row["latency_ms"] or {}).get(name)
    if found is None:
        return ""
    value, (low, high) = found["value"], found["ci"]
    return f"{_format_number(value)} ±{max(high - value, value - low) / value:.1%}"


def _format_number(value: float | None, prefix: str = "") -> str:
    if value is None:
        return ""
    return f"{prefix}{value:,.0f}" if value >= 1000 else f"{prefix}{value:.4g}"
