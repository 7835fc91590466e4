"""One Markdown row per profiled stage out of the JSON documents in a folder: `python profile_table.py FOLDER`."""

import json
import sys
from pathlib import Path


def rows(folder: Path) -> list[list[str]]:
    """Stage, iteration, share of the GPU, Tensor-Core share, roofline, verdict, quality and the first finding."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            stages = json.loads(path.read_text(encoding="utf-8")).get("stages", [])
        except ValueError:
            found.append([path.stem, "no document", *[""] * 8])
            continue
        found += [[path.stem, stage["name"], *_cells(stage)] for stage in stages]
    return found


def _cells(stage: dict) -> list[str]:
    if "error" in stage:
        return [f"failed: {stage['error'].splitlines()[0][:60]}", *[""] * 7]
    totals, iterations, cores = stage["measured"], stage["iterations"], stage["tensor_cores"]
    bound = stage["roofline"].get("times_bound")
    first = stage["findings"][0] if stage["findings"] else None
    return [
        f"{_time_ns(stage) / 1e6:.3f}",
        f"{iterations['median_gpu_ns'] / 1e6:.3f}" if iterations.get("median_gpu_ns") else "",
        f"{totals['busy_ns'] / totals['span_ns']:.0%}" if totals["busy_ns"] else "",
        f"{cores['time_share']:.0%}" if cores.get("time_share") is not None else "",
        f"{bound:.1f}" if bound else "",
        stage["bottleneck"]["verdict"],
        stage["trace_quality"]["verdict"],
        f"{first['rule']} {first['gain_share']:.0%}" if first else "",
    ]


def _time_ns(stage: dict) -> float:
    """One iteration without the profiler where that was measured, else under it, else the whole stage."""
    iterations = stage["iterations"]
    return iterations.get("unprofiled_ns") or iterations.get("period_ns") or stage["measured"]["span_ns"]


HEAD = ["profile", "stage", "ms", "GPU ms", "busy", "Tensor Cores", "× bound", "limited by", "quality", "first finding"]


def main() -> None:
    """Prints the table."""
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for row in rows(Path(sys.argv[1])):
        print("| " + " | ".join(row) + " |")


main()
