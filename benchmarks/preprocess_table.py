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
    answers = [read(path) for path in sorted(folder.glob("from-images*.json"))]
    if "parity" in found:
        proof = found["parity"]
        steps = ", ".join(
            f"{each['step']} {each['mean_levels']:.3f}/{each['max_levels']:.0f}" for each in proof["steps"]
        )
        lines.append(f"| parity | {proof['verdict']}: {proof['reason']} |")
        lines.append(f"| mean/max levels after each step | {steps} |")
        odd = [each for each in proof["odd_files"] if each["outcome"] not in ("equal", "refused by both")]
        names = ", ".join(f"{each['file']} {each['outcome']} {each['max_levels']}" for each in odd) or "all alike"
        lines.append(f"| odd files | {names} |")
    if found.get("tuned"):
        tuned = found["tuned"]
        for name in ("dataloader", "dali", "decode_only"):
            row = tuned[name]
            interval = "–".join(f"{each:,.0f}" for each in row["ci"] or ())
            lines.append(f"| {name} | {row['images_per_s']:,.0f} images/s ({interval}), {row['settings']} |")
        lines.append(
            f"| DALI over the best DataLoader (≥ 9 wanted) | {tuned['speedup']:.2f}, interval {tuned['speedup_ci']} |"
        )
        lines.append(f"| DALI over decoding alone (≥ 0.9 wanted) | {tuned['share_of_decode_only']:.3f} |")
    for each in (result for document in answers for result in document.get("results", ())):
        if each["error"] is not None:
            lines.append(f"| files to answers, {each['label']} | failed: {each['error']} |")
            continue
        limit = f"{each['bottleneck']['name']}, {each['bottleneck']['reason']}"
        parts = ", ".join(f"{name} {rate:,.0f}" for name, rate in each["parts_images_per_s"].items())
        lines.append(
            f"| files to answers, {each['label']}, batch {each['batch_size']} | {each['images_per_s']:,.0f} images/s; alone: {parts} |"
        )
        lines.append(f"| over the slower part (≥ 0.9 wanted) | {each['of_slower_part']:.3f}; limit: {limit} |")
        lines.append(
            f"| latency, handover, answers | {each['latency_ms']}, {each['handover']}, {each['answers_checked']} |"
        )
    text = "\n".join(["| what | measured |", "|---|---|", *lines])
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
