"""A bench run on the terminal: figures with their intervals, and beneath them what may not be believed and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optpipe.core.measurement import option_text
from optpipe.core.units import bytes_text
from optpipe.errors import BadInputError
from optpipe.stats.percentiles import samples_needed

Row = Mapping[str, Any]
_LAST = float("inf")
SHOWN = 4
"""Reasons of one kind that are named one by one."""
WORDS = ("artifact", "device", "load")
LEAST = ("memory", "CV", "batches/s", "p90 ms", "samples", "J/image")
"""What a narrow terminal goes without, in this order."""
Columns = list[tuple[str, Sequence[str | Text]]]


def sort_key(name: str) -> Callable[[Row], Any] | None:
    """How `--sort NAME` orders rows; raises BadInputError for another name."""
    keys: dict[str, Callable[[Row], Any] | None] = {
        "given": None,
        "latency": lambda row: _value(row, "p50") or _LAST,
        "throughput": lambda row: -(row["throughput_images_per_s"] or 0.0),
        "memory": lambda row: row["memory_bytes"] or _LAST,
        "energy": lambda row: row["energy_j_per_image"] or _LAST,
    }
    if name not in keys:
        raise BadInputError(f"--sort {name}: give one of {', '.join(keys)}")
    return keys[name]


def bench_table(document: Mapping[str, Any], sort: str) -> RenderableType:
    """All measurements, then the limit's answer, then reasons with their remedies."""
    key = sort_key(sort)
    rows = document["measurements"] if key is None else sorted(document["measurements"], key=key)
    lines: list[RenderableType] = [_figures(rows)]
    called = _called(rows)
    lines += _limit_lines(document.get("limit"), called)
    lines += _tuning_lines(document.get("tuning") or [], called)
    lines += _reason_lines(rows)
    lines += _withheld_lines(rows)
    lines.append(Text(f"run {document['run_dir']}", style="dim"))
    return Group(*lines)


def _figures(rows: list[Row]) -> RenderableType:
    """One line per measurement; what is the same for all of them stands above the table."""
    tails = [name for name in ("p90", "p99", "p99.9") if any(_value(row, name) is not None for row in rows)]
    called = _called(rows)
    columns: Columns = [
        ("artifact", [called[row["artifact"]] for row in rows]),
        ("device", [_device(row) for row in rows]),
        ("load", [_load(row) for row in rows]),
        ("batch", [str(row["batch_size"]) for row in rows]),
        ("rate/s", [_number(row["offered_rate_per_s"]) for row in rows]),
        ("p50 ms", [_with_interval(row, "p50") for row in rows]),
        *((f"{name} ms", [_with_interval(row, name) for row in rows]) for name in tails),
        ("CV", ["" if row["latency_ms"] is None else f"{row['latency_ms']['cv']:.1%}" for row in rows]),
        ("images/s", [_number(row["throughput_images_per_s"]) for row in rows]),
        ("batches/s", [_number(row["throughput_batches_per_s"]) for row in rows]),
        ("memory", ["" if row["memory_bytes"] is None else bytes_text(row["memory_bytes"]) for row in rows]),
        ("J/image", [_number(row["energy_j_per_image"], "≈") for row in rows]),
        ("samples", [f"{row['samples']:,}" for row in rows]),
        ("verdict", [_verdict_text(row) for row in rows]),
    ]
    same = {name for name, cells in columns if name in WORDS and len(set(cells)) == 1}
    kept = [(name, cells) for name, cells in columns if any(cells) and name not in same]
    models = dict.fromkeys(str(row["model"]) for row in rows)
    shared = ", ".join(str(cells[0]) for name, cells in columns if name in same)
    heading = ": ".join(each for each in ("" if len(models) > 1 else next(iter(models), ""), shared) if each)
    return Group(Text(heading), _Fitting(kept)) if rows else _table(kept)


@dataclass(frozen=True)
class _Fitting:
    """A table that leaves out whole columns, and says which, where the terminal would cut into figures and verdicts."""

    columns: Columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, dropped = list(self.columns), []
        for name in LEAST:
            if Measurement.get(console, options.update(max_width=9999), _table(kept)).maximum <= options.max_width:
                break
            dropped += [each for each, _ in kept if each == name]
            kept = [each for each in kept if each[0] != name]
        yield _table(kept)
        if dropped:
            yield Text(f"too narrow for {', '.join(dropped)}: --json has them, a wider terminal too", style="dim")


def _table(columns: Columns) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in (*WORDS, "verdict") else "right", no_wrap=True)
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _called(rows: list[Row]) -> dict[str, str]:
    """What each artifact is called among the others: `onnxruntime fp32`, with its model or its id where that is not enough."""
    model = len({row["model"] for row in rows}) > 1
    names = {
        row["artifact"]: f"{row['model'] if model else ''} {row['backend']} {row['precision']}".strip() for row in rows
    }
    like = [(names[row["artifact"]], row["subject"]["device"], row["artifact"]) for row in rows]
    twice = {one[2] for one in like if any(one[:2] == other[:2] and one[2] != other[2] for other in like)}
    return {each: f"{each} {name}" if each in twice else name for each, name in names.items()}


def _load(row: Row) -> str:
    streams = f", {row['streams']} streams" if row["streams"] > 1 else ""
    return f"{row['scenario']}, {row['mode']}{streams}"


def _device(row: Row) -> str:
    graph = {True: ", CUDA graph", False: ", no CUDA graph", None: ""}[row["subject"]["cuda_graph"]]
    return f"{row['subject']['device']}{graph}"


def pair_table(document: Mapping[str, Any]) -> RenderableType:
    """The ratio first, in words."""
    first, second = document["baseline"], document["contender"]
    found = document["comparison"]
    if found is None:
        text = f"interrupted before the last round: no comparison; what was measured is kept in {document['run_dir']}"
        return Text(text, style="yellow")
    ratio, metric = found["ratio"], found["metric"]
    low, high = ratio["ci"]
    style = {"faster": "green", "slower": "red"}.get(found["verdict"], "")
    answer = Text(f"{second} is {found['verdict']}", style=style)
    if found["verdict"] == "no difference shown":
        answer = Text(f"no difference shown between {first} and {second}")
    row = document["measurements"][0]
    detail = (
        f"batch {row['batch_size']}, {_load(row)}: "
        f"{metric} ratio {ratio['value']:.4f} ({ratio['confidence']:.0%} interval {low:.4f} to {high:.4f}) "
        f"over {ratio['rounds']} rounds of fresh processes; a difference of {ratio['smallest_visible']:.1%} would show"
    )
    return Group(answer, Text(detail), Text(f"run {document['run_dir']}", style="dim"))


def _limit_lines(limit: Mapping[str, Any] | None, called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in (limit or {}).get("artifacts", []):
        what, label = _point(each), _label(each, called)
        value = "" if each["value_ms"] is None else f" ({each['value_ms']:.3g} ms)"
        doubt = "" if each["verdict"] == "VALID" else ", by an INVALID measurement"
        if each["inside"]:
            text = f"{label}: largest inside {each['slo']} is {what}{value}{doubt}"
            lines.append(Text(text, style="yellow" if doubt else "green"))
        elif each["measurement"] is None:
            lines.append(Text(f"{label}: {each['slo']} could not be judged", style="yellow"))
        else:
            says = "nothing meets" if each["met"] is False else "nothing is shown to meet"
            text = f"{label}: {says} {each['slo']}; nearest is {what}{value}{doubt}"
            lines.append(Text(text, style="red" if each["met"] is False else "yellow"))
        if unknown := each["not_judged"]:
            points = ", ".join(_point(one) for one in unknown)
            text = f"{label}: not judged at {points}: {unknown[0]['why']}; measure longer (--min-time)"
            lines.append(Text(text, style="yellow"))
    return lines


def _point(record: Mapping[str, Any]) -> str:
    rate = record["rate_per_s"]
    return f"batch {record['batch_size']}" if rate is None else f"{rate:.4g} queries/s"


def _options(label: str, options: Mapping[str, Any]) -> str:
    backend = label.partition(" ")[0]
    return " ".join(f"--option {backend}.{name}={option_text(value)}" for name, value in options.items())


def _label(record: Mapping[str, Any], called: Mapping[str, str]) -> str:
    """`onnxruntime fp32 (cpu)`, or what tells the artifact from the others of the run."""
    plain, _, device = record["label"].partition(" (")
    return f"{called.get(record.get('artifact', ''), plain)} ({device}" if device else plain


def _tuning_lines(tuning: list[Mapping[str, Any]], called: Mapping[str, str]) -> list[Text]:
    lines = []
    for each in tuning:
        found: dict[str, list[str]] = {}
        for size, options in each["chosen"].items():
            found.setdefault(_options(each["label"], options), []).append(size)
        lines += [
            Text(f"tuned {_label(each, called)}, batch {', '.join(sizes)}: {text} (of {len(each['trials'])} tried)")
            for text, sizes in found.items()
        ]
        if not found:
            text = f"tuning {_label(each, called)} was interrupted, {len(each['trials'])} tried: nothing is chosen"
            lines.append(Text(text, style="yellow"))
        lines += [
            Text(
                f"answers wrongly, so not chosen, batch {', '.join(map(str, trial['wrong_answers']))}: "
                f"{_options(each['label'], trial['options'])}",
                style="red",
            )
            for trial in each["trials"]
            if trial["wrong_answers"]
        ]
    return lines


def _reason_lines(rows: list[Row]) -> list[Text]:
    """Reasons of one kind together, each with what was seen where, and the remedy once."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    called = _called(rows)
    for row in rows:
        for reason in row["reasons"]:
            where = _where(row, called)
            key = (bool(reason["invalidates"]), reason["code"], reason["remedy"])
            found.setdefault(key, []).append(f"{where}: {reason['message']}")
    return [
        Text(
            _with_remedy(f"{'INVALID' if invalid else 'note'}  {code}", seen, remedy),
            style="yellow" if invalid else "dim",
        )
        for (invalid, code, remedy), seen in found.items()
    ]


def _withheld_lines(rows: list[Row]) -> list[Text]:
    """Why a percentile is missing that has samples enough; one that was given too few was not asked for, or is INVALID."""
    called = _called(rows)
    seen = [
        f"{_where(row, called)}: {name}: {why}"
        for row in rows
        for name, why in (row["latency_ms"] or {}).get("withheld", {}).items()
        if row["samples"] >= samples_needed(float(name[1:]))
    ]
    remedy = "measure longer (--min-time), or on a quieter machine"
    return [Text(_with_remedy("note  withheld", seen, remedy), style="dim")] if seen else []


def _with_remedy(heading: str, seen: Sequence[str], remedy: str) -> str:
    more = [f"… and {len(seen) - SHOWN} more"] if len(seen) > SHOWN else []
    return "\n".join([heading, *(f"    {each}" for each in (*seen[:SHOWN], *more)), f"    → {remedy}"])


def _where(row: Row, called: Mapping[str, str]) -> str:
    rate = "" if row["offered_rate_per_s"] is None else f" at {row['offered_rate_per_s']:.4g}/s"
    return f"{called[row['artifact']]} batch {row['batch_size']}{rate}"


def _verdict_text(row: Row) -> Text:
    if row["verdict"] == "VALID":
        return Text("VALID", style="green")
    return Text("INVALID", style="red")


def _value(row: Row, name: str) -> float | None:
    found = (row["latency_ms"] or {}).get(name)
    return None if found is None else float(found["value"])


def _with_interval(row: Row, name: str) -> str:
    """`0.2632 ±0.4%`: the value with the wider side of its interval; both sides are in the JSON."""
    found = (row["latency_ms"] or {}).get(name)
    if found is None:
        return ""
    value, (low, high) = found["value"], found["ci"]
    return f"{_number(value)} ±{max(high - value, value - low) / value:.1%}"


def _number(value: float | None, prefix: str = "") -> str:
    if value is None:
        return ""
    return f"{prefix}{value:,.0f}" if value >= 1000 else f"{prefix}{value:.4g}"
