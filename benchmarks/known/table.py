"""The README's table of the sign-offs in reports/gallery.

usage: python -m benchmarks.known.table [--check]   writes it between its marks; with --check it exits with 1 if it would change
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GALLERY, README = ROOT / "reports" / "gallery", ROOT / "README.md"
BEGIN, END = "<!-- benchmarks.known.table: begin -->\n", "<!-- benchmarks.known.table: end -->\n"
ROWS = {
    "text-lines": ("Text recognition", "PP-OCRv4", "printed lines in 20 typefaces"),
    "text-detection": ("Text detection", "PP-OCRv4", "printed pages"),
    "text-direction": ("Text direction", "PP-OCR", "printed lines, half of them upside down"),
    "voice-activity": ("Voice activity", "silero VAD", "espeak-ng's speech, noise, hum, silence"),
    "file-types": ("File types", "Magika", "files of 20 types"),
    "sentence-pairs": ("Sentence pairs", "all-MiniLM-L6-v2", "paraphrases and near misses"),
    "image-classes": ("ImageNet classes", "EfficientNet-Lite0", "photographs, against FP32's own answer"),
}  # fmt: skip
"""By dossier: task, network, and data."""


def find(criteria: list[dict[str, Any]], prefix: str) -> dict[str, Any]:
    return next(each for each in criteria if each["name"].startswith(prefix))


def show(one: dict[str, Any], sign: str = "") -> str:
    """A figure with its interval."""
    if one["observed"] is None:
        return "not measured"
    low, high = one["ci"]
    return f"{one['observed']:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def make_table() -> str:
    heads = ("task and report", "network", "data", "verdict", "speed over FP32", "points lost")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, (task, network, data) in ROWS.items():
        folder = GALLERY / name
        if not folder.is_dir():
            continue
        record = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        speed = show(find(record["criteria"], "speedup"))
        drop = show(find(record["criteria"], "accuracy"), "+")
        link = f"[{task}](reports/gallery/{name}/report.md)"
        lines.append(
            f"| {link} | {network} | {data} | **{record['verdict']}** | {speed} | {drop} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    made = make_table()
    if "--check" in sys.argv:
        if text[start:end] != made:
            print("README.md: python -m benchmarks.known.table makes another table")
            return 1
        return 0
    README.write_text(text[:start] + made + text[end:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
