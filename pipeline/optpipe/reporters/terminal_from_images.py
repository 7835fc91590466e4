"""Files to answers on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optpipe.reporters.records import format_rate_interval


def render_end_to_end(record: Mapping[str, Any]) -> RenderableType:
    """One row per artifact, then what limits each, and where its time went."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("artifact", overflow="fold")
    for name in (
        "batch",
        "images/s",
        "95 % interval",
        "p50",
        "p99",
        "preprocess alone",
        "inference alone",
        "vs. slower part",
    ):
        table.add_column(name, justify="right")
    table.add_column("bottleneck")
    lines: list[RenderableType] = []
    for each in record["results"]:
        if each["error"] is not None:
            lines.append(Text(f"failed  {each['label']}: {each['error']}", style="red"))
            continue
        table.add_row(*_format_row(each))
        lines.append(Text(f"{each['label']}  {each['bottleneck']['name']}: {each['bottleneck']['reason']}"))
        lines.append(Text(f"  {_format_timeline(each)}", style="dim"))
        if each["sharing"] is not None:
            lines += [Text(f"  {line}", style="dim") for line in _render_sharing(each["sharing"])]
        lines.append(_format_outputs_check(each))
        if each["environment"]:
            settings = " ".join(f"{name}={value}" for name, value in each["environment"].items())
            lines.append(Text(f"  also set in your own process: {settings}", style="dim"))
    source = record["from_images"]
    head = Text(f"{source['count']} images from {source['folder']}, page cache {source['page_cache']}")
    return Group(head, table, *lines, Text(f"evidence  {record['run_dir']}"))


def _format_row(each: Mapping[str, Any]) -> list[str]:
    latency, parts = each["latency_ms"], each["parts_images_per_s"]
    return [
        each["label"],
        str(each["batch_size"]),
        f"{each['images_per_s']:,.0f}",
        format_rate_interval(each["ci"]),
        *(f"{latency[name]:.1f} ms" if name in latency else "too few" for name in ("p50", "p99")),
        f"{parts['preprocess']:,.0f}",
        f"{parts['inference']:,.0f}",
        f"{each['of_slower_part']:.2f}",
        each["bottleneck"]["name"],
    ]


def _format_timeline(each: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in each["timeline"].items())
    return f"timeline: {shares}; handover {each['handover']}"


def _render_sharing(sharing: Mapping[str, Any]) -> tuple[str, ...]:
    """Who has which threads, what shared cores allow at best, and the ratio without the loss of threads."""
    division, cost, alone = sharing["division"], sharing["cpu_ms_per_image"], sharing["same_threads_images_per_s"]
    threads = _format_count(division["threads"], "thread") if division["threads"] else "the runtime's own threads"
    return (
        f"cores: {_format_count(division['streams'], 'stream')} of {threads}, spinning {'on' if division['spinning'] else 'off'}, "
        f"{_format_count(division['dali_threads'], 'thread')} of DALI; the fastest of {len(sharing['tried'])} divisions",
        f"at best {sharing['bound_images_per_s']:,.0f} images/s, {sharing['bound_of_slower_part']:.2f} of the slower part: "
        f"{cost['preprocess']:.3g} + {cost['inference']:.3g} ms of processor time per image on {sharing['cores']} shared "
        f"cores; reached {sharing['of_bound']:.2f} of that",
        f"{sharing['of_slower_part_with_same_threads']:.2f} of the slower part alone with the same threads "
        f"(preprocessing {alone['preprocess']:,.0f}, inference {alone['inference']:,.0f} images/s)",
    )


def _format_count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _format_outputs_check(each: Mapping[str, Any]) -> Text:
    checked = each["answers_checked"]
    text = f"  outputs of the timed run: {checked['equal']} of {checked['answers']} match the reference"
    if checked["classes"] < 2:
        text += ", all of one class, so this proves nothing"
    return Text(text, style={"PASS": "dim", "FAIL": "red"}.get(each["verdict"], "yellow"))
