"""The few figures that decide, out of what gpu_preprocess.sh wrote: python benchmarks/preprocess_table.py FOLDER."""

import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The JSON in `path`, or nothing where the step failed."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document


def main(folder: Path) -> None:
    """Prints the table and writes it as Markdown beside the JSON."""
    lines = []
    found = read(folder / "preprocess.json")
    measured = [read(path) for path in sorted(folder.glob("end-to-end*.json"))]
    if "parity" in found:
        parity, proof = found["parity"], found["parity"]["proof"]
        steps = ", ".join(
            f"{each['step']} {each['mean_levels']:.3f}/{each['max_levels']:.0f}"
            for each in parity["steps"]
        )
        lines.append(f"| parity | {proof['verdict']}: {proof['reason']} |")
        lines.append(f"| mean/max levels after each step | {steps} |")
    if tuned := found.get("throughput"):
        for name in ("dataloader", "dali"):
            row = tuned[name]
            interval = "–".join(f"{each:,.0f}" for each in row["ci"] or ())
            lines.append(
                f"| {name} | {row['images_per_s']:,.0f} images/s ({interval}), {row['plan'] or row['loader']} |"
            )
        lines.append(
            f"| DALI over the best DataLoader (≥ 9 wanted) | {tuned['speedup']:.2f}, interval {tuned['speedup_ci']} |"
        )
    for each in (result for document in measured for result in document.get("results", ())):
        figures, what = (
            each["figures"],
            f"files to predictions, {each['label']}, batch {each['plan']['batch_size']}",
        )
        if figures is None:
            lines.append(f"| {what} | failed: {each['error']} |")
            continue
        limit = f"{figures['bottleneck']['name']}, {figures['bottleneck']['reason']}"
        parts = ", ".join(
            f"{name} {rate:,.0f}" for name, rate in figures["parts_images_per_s"].items()
        )
        latency = [figures[name] for name in ("latency_p50_ns", "latency_p99_ns")]
        lines.append(f"| {what} | {figures['images_per_s']:,.0f} images/s; alone: {parts} |")
        lines.append(
            f"| over the slower part (≥ 0.9 wanted) | {figures['of_slower_part']:.3f}; limit: {limit} |"
        )
        lines.append(
            f"| latency p50 and p99 (ns), handover, check | {latency}, {figures['handover']}, {figures['equal']} of {figures['checked']} |"
        )
    text = "\n".join(["| what | measured |", "|---|---|", *lines])
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
