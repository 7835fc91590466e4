"""Markdown tables out of the JSON documents of `optpipe profile` in a folder: `python profile_table.py FOLDER [--compact TO]`.

`--compact` also writes each document to the folder TO without its long tables: what is worth keeping of a measurement.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

KERNELS = 10
LAYERS = 15
KEPT = (
    "name", "kind", "backend", "precision", "device", "batch_size", "options", "implementation", "tracer", "gpus",
    "trace_quality", "scope", "measured", "iterations", "gaps", "memory", "gpu_metrics", "bottleneck", "findings", "error",
)  # fmt: skip
HEAD = ["profile", "stage", "ms", "GPU ms", "busy", "Tensor Cores", "× bound", "limited by", "quality", "first finding"]
LAYER_HEAD = [
    "profile",
    "stage",
    "layers",
    "eligible",
    "used",
    "missed or shut out, by what it could save (µs per inference)",
]


def documents(folder: Path) -> Iterator[tuple[str, dict]]:
    """The documents by name; a file that holds none is said."""
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            print(f"{path.name}: no document")
            continue
        if "stages" in document:
            yield path.stem, document


def row(stage: dict) -> list[str]:
    """Iteration, share of the GPU, Tensor-Core share, roofline, verdict, quality and the first finding."""
    if "error" in stage:
        return [f"failed: {stage['error'].splitlines()[0][:60]}", *[""] * 7]
    totals, iterations, cores = stage["measured"], stage["iterations"], stage["tensor_cores"]
    bound = stage["roofline"].get("times_bound")
    first = stage["findings"][0] if stage["findings"] else None
    return [
        f"{_time_ns(stage) / 1e6:.3f}",
        f"{iterations['median_gpu_ns'] / 1e6:.3f}" if iterations.get("median_gpu_ns") else "",
        f"{_busy_share(stage):.0%}" if totals["busy_ns"] else "",
        f"{cores['time_share']:.0%}" if cores.get("time_share") is not None else "",
        f"{bound:.1f}" if bound else "",
        stage["bottleneck"]["verdict"],
        stage["trace_quality"]["verdict"],
        f"{first['rule']} {first['gain_share']:.0%}" if first else "",
    ]


def layer_row(stage: dict) -> list[str] | None:
    """How many layers could use Tensor Cores, did, and what the others could save; None where layers are not known."""
    cores = stage.get("tensor_cores") or {}
    if cores.get("basis") != "layers":
        return None
    without = sorted((*cores["missed"], *cores["ineligible"]), key=lambda each: -each["could_save_ns"])
    named = [f"{each['name']} {each['could_save_ns'] / cores['iterations'] / 1e3:.1f}" for each in without[:4]]
    return [str(len(cores["layers"])), str(cores["eligible"]), str(cores["used"]), ", ".join(named)]


def compact(stage: dict) -> dict:
    """The stage without its long tables."""
    kept = {key: stage[key] for key in KEPT if key in stage}
    if "error" in stage:
        return kept
    kept["findings"] = [{**finding, "rows": finding["rows"][:2]} for finding in stage["findings"]]
    kept["kernels"] = [_short(one) for one in stage["measured_views"]["kernels"][:KERNELS]]
    kept["functions"] = stage.get("functions", [])[:KERNELS]
    cores = stage["tensor_cores"]
    cut = {key: cores[key][:LAYERS] for key in ("layers", "missed", "ineligible") if key in cores}
    kept["tensor_cores"] = {**cores, **{key: [_short(one) for one in rows] for key, rows in cut.items()}}
    roofline = stage["roofline"]
    kept["roofline"] = {**roofline, "layers": roofline.get("layers", [])[:LAYERS]}
    kept["roofline"]["ncu"] = [_short(one) for one in roofline.get("ncu") or []]
    return kept


def _short(one: dict) -> dict:
    return {**one, "name": one["name"][:160]}


def _busy_share(stage: dict) -> float:
    """Of the time without the profiler where that slowed the host too much."""
    totals = stage["measured"]
    return stage["bottleneck"].get("busy_share", totals["busy_ns"] / totals["span_ns"])


def _time_ns(stage: dict) -> float:
    """One iteration without the profiler where that was measured, else under it, else the whole stage."""
    iterations = stage["iterations"]
    return iterations.get("unprofiled_ns") or iterations.get("period_ns") or stage["measured"]["span_ns"]


def _print(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")
    print()


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compact", type=Path)
    arguments = parser.parse_args()
    found = [(name, stage) for name, document in documents(arguments.folder) for stage in document["stages"]]
    _print(HEAD, [[name, stage["name"], *row(stage)] for name, stage in found])
    layers = [[name, stage["name"], *cells] for name, stage in found if (cells := layer_row(stage)) is not None]
    _print(LAYER_HEAD, layers)
    if arguments.compact is not None:
        arguments.compact.mkdir(parents=True, exist_ok=True)
        for name, document in documents(arguments.folder):
            stages = [compact(stage) for stage in document["stages"]]
            text = json.dumps({"stages": stages, "warnings": document.get("warnings", [])}, indent=1)
            (arguments.compact / f"profile-{name}.json").write_text(text + "\n", encoding="utf-8")


main()
