"""Files to answers on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def from_images_table(record: Mapping[str, Any]) -> RenderableType:
    """One row per artifact, then what limits each, and where its time went."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("artifact", overflow="fold")
    for name in ("batch", "images/s", "p50", "p99", "preprocess alone", "inference alone", "of the slower part"):
        table.add_column(name, justify="right")
    table.add_column("bottleneck")
    lines: list[RenderableType] = []
    for each in record["results"]:
        if each["error"] is not None:
            lines.append(Text(f"failed  {each['label']}: {each['error']}", style="red"))
            continue
        table.add_row(*_row(each))
        lines.append(Text(f"{each['label']}  {each['bottleneck']['name']}: {each['bottleneck']['reason']}"))
        lines.append(Text(f"  {_timeline_text(each)}", style="dim"))
        lines.append(_answers_text(each))
        if each["environment"]:
            settings = " ".join(f"{name}={value}" for name, value in each["environment"].items())
            lines.append(Text(f"  set in your own process too: {settings}", style="dim"))
    source = record["from_images"]
    head = Text(f"{source['count']} images from {source['folder']}, page cache {source['page_cache']}")
    return Group(head, table, *lines, Text(f"evidence  {record['run_dir']}"))


def _row(each: Mapping[str, Any]) -> list[str]:
    latency, parts = each["latency_ms"], each["parts_images_per_s"]
    return [
        each["label"],
        str(each["batch_size"]),
        f"{each['images_per_s']:,.0f}",
        *(f"{latency[name]:.1f} ms" if name in latency else "too few" for name in ("p50", "p99")),
        f"{parts['preprocess']:,.0f}",
        f"{parts['inference']:,.0f}",
        f"{each['of_slower_part']:.2f}",
        each["bottleneck"]["name"],
    ]


def _timeline_text(each: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in each["timeline"].items())
    return f"timeline: {shares}; handover {each['handover']}"


def _answers_text(each: Mapping[str, Any]) -> Text:
    checked = each["answers_checked"]
    text = f"  answers of the timed run: {checked['equal']} of {checked['answers']} equal the reference's"
    if checked["classes"] < 2:
        text += ", all of one class, which proves nothing"
    return Text(text, style={"PASS": "dim", "FAIL": "red"}.get(each["verdict"], "yellow"))
