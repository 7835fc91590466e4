"""Markdown tables out of the JSON documents of `optpipe profile` in a folder: `python profile_table.py FOLDER [--compact TO]`.

`--compact` also writes each document to the folder TO without its long tables: what is worth keeping of a measurement.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

KERNELS = 10
LAYERS = 15
KEPT = ("source", "tracer", "gpus", "trace_quality", "scope", "iterations", "gaps", "bottleneck")
HEAD = [
    "profile",
    "stage",
    "ms",
    "GPU ms",
    "busy",
    "Tensor Cores",
    "× bound",
    "limited by",
    "quality",
    "first finding",
]
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


def row(profile: dict) -> list[str]:
    """Iteration, share of the GPU, Tensor-Core share, roofline, verdict, quality and the first finding."""
    iterations, cores, found = profile["iterations"], profile["tensor_cores"], profile["bottleneck"]
    bound = profile["roofline"]["times_bound"] if profile["roofline"] else None
    first = profile["findings"][0] if profile["findings"] else None
    return [
        f"{_time_ns(profile) / 1e6:.3f}",
        f"{iterations['median_gpu_ns'] / 1e6:.3f}"
        if iterations and iterations["median_gpu_ns"]
        else "",
        f"{found['busy_share']:.0%}" if found["busy_share"] else "",
        f"{cores['time_share']:.0%}" if cores else "",
        f"{bound:.1f}" if bound else "",
        found["verdict"],
        profile["trace_quality"]["verdict"],
        f"{first['rule']} {first['gain_share']:.0%}" if first else "",
    ]


def layer_row(profile: dict) -> list[str] | None:
    """How many layers could use Tensor Cores, did, and what the others could save; None where layers are not known."""
    cores = profile["tensor_cores"]
    if not cores or cores["basis"] != "layers":
        return None
    without = sorted(cores["layers"], key=lambda each: -each["could_save_ns"])
    named = [
        f"{each['name']} {each['could_save_ns'] / cores['iterations'] / 1e3:.1f}"
        for each in without[:4]
        if each["could_save_ns"]
    ]
    return [str(len(cores["layers"])), str(cores["eligible"]), str(cores["used"]), ", ".join(named)]


def compact(stage: dict) -> dict:
    """The stage without its long tables."""
    profile = stage["profile"]
    kept = {key: profile[key] for key in KEPT}
    kept["measured"] = profile["measured"]["totals"]
    kept["findings"] = [{**finding, "rows": finding["rows"][:2]} for finding in profile["findings"]]
    kept["kernels"] = [_short(one) for one in profile["measured"]["kernels"][:KERNELS]]
    cores, roofline = profile["tensor_cores"], profile["roofline"]
    kept["tensor_cores"] = cores and {
        **cores,
        "layers": [_short(one) for one in cores["layers"][:LAYERS]],
    }
    kept["roofline"] = roofline and {**roofline, "layers": roofline["layers"][:LAYERS]}
    counters = stage.get("counters")
    if counters:
        counters = {**counters, "kernels": [_short(one) for one in counters["kernels"]]}
    return {**stage, "profile": kept, "counters": counters}


def _short(one: dict) -> dict:
    return {**one, "name": one["name"][:160]}


def _time_ns(profile: dict) -> float:
    """One iteration without the profiler where that was measured, else under it, else the whole stage."""
    iterations = profile["iterations"] or {}
    span_ns = profile["measured"]["totals"]["span_ns"]
    return float(iterations.get("unprofiled_ns") or iterations.get("period_ns") or span_ns)


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
    found = [
        (name, stage)
        for name, document in documents(arguments.folder)
        for stage in document["stages"]
    ]
    rows = [[name, stage["subject"]["name"], *row(stage["profile"])] for name, stage in found]
    rows += [
        [name, stage, f"failed: {error.splitlines()[0][:60]}", *[""] * 7]
        for name, document in documents(arguments.folder)
        for stage, error in document["failed"].items()
    ]
    _print(HEAD, rows)
    layers = [
        [name, stage["subject"]["name"], *cells]
        for name, stage in found
        if (cells := layer_row(stage["profile"])) is not None
    ]
    _print(LAYER_HEAD, layers)
    if arguments.compact is not None:
        arguments.compact.mkdir(parents=True, exist_ok=True)
        for name, document in documents(arguments.folder):
            stages = [compact(stage) for stage in document["stages"]]
            text = json.dumps({**document, "stages": stages}, indent=1)
            (arguments.compact / f"profile-{name}.json").write_text(text + "\n", encoding="utf-8")


main()
