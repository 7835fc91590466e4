"""What `build --recover auto` wins back on trained networks that lose by calibration alone, on a CPU and without labels.

`pairs` ships with optpipe: squared ReLUs between depthwise convolutions. `mobile` and `vit` are trained first, by `trained_small.py`.
Calibration pictures and 6,000 labeled ones are drawn by rule from digits that training did not see. Each network is built in INT8
with and without `--recover`, evaluated on the same pictures, and signed off by one policy: at most one point lost.

Writes FOLDER/recovery.json: per network, the rows of the steps, both drops with their intervals, and both verdicts.

usage: python -m benchmarks.recovery FOLDER [pairs|mobile|vit ...] [--calibration 2000] [--validation 6000]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.trained_small import FACTORIES, PAIRS, load_file, train

EPOCHS = {"mobile": 14, "vit": 40}
ON_CPU = ("--backend", "onnxruntime", "--device", "cpu")
POLICY = """
schema = 1
name = "recovery"

[build]
backend = "onnxruntime"
precision = "int8"

[precision]
int8 = "90%"

[accuracy]
maximum_drop = "1 point"
"""


def draw_pictures(folder: Path, split: str, count: int, seed: int) -> Path:
    """Writes pictures in a folder for each label. Seeds differ from those of training and of the shipped sets."""
    from PIL import Image

    if folder.is_dir():
        return folder
    pairs = load_file(PAIRS)
    pictures, numbers = pairs.draw(*pairs.read_digits(split), count, seed)
    for index, (picture, number) in enumerate(zip(pictures, numbers, strict=True)):
        file = folder / f"{number:02d}" / f"{index:05d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(file)
    return folder


def run(folder: Path, *words: str, statuses: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The document that optpipe prints."""
    command = [sys.executable, "-m", "optpipe", *words, "--json"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3600)
    if ran.returncode not in statuses:
        sys.exit(f"{' '.join(words)} ended with {ran.returncode}\n{ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def examine(folder: Path, name: str, calibration: Path, validation: Path) -> dict[str, Any]:
    model = "pairs" if name == "pairs" else f"{name}.toml"
    if name in FACTORIES and not (folder / model).is_file():
        train(name, folder, EPOCHS[name])
    built, seconds = {}, {}
    for kind, more in (("calibrated", ()), ("recovered", ("--recover", "auto"))):
        started = time.monotonic()
        words = ("build", model, "--precision", "int8", *ON_CPU, "--calibration", str(calibration))
        # a build that fails verification is what recovery is for
        document = run(folder, *words, *more, statuses=(0, 1, 4))
        built[kind] = document["artifacts"][0]
        seconds[kind] = round(time.monotonic() - started, 1)

    evaluated = run(folder, "evaluate", model, "--data", str(validation))
    (folder / "policy.toml").write_text(POLICY, encoding="utf-8")
    verdicts = {}
    for kind, artifact in built.items():
        judged = ("signoff", model, "--policy", "policy.toml", "--artifact", artifact["id"])
        output = ("--output", f"{name}-{kind}", "--no-figures")
        verdicts[kind] = run(folder, *judged, *output, statuses=(0, 1, 5))
    return {
        "name": name,
        "built": built,
        "seconds": seconds,
        "evaluated": evaluated,
        "verdicts": verdicts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["pairs", *FACTORIES])
    parser.add_argument("--calibration", type=int, default=2000)
    parser.add_argument("--validation", type=int, default=6000)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    calibration = draw_pictures(folder / "calibration", "calibration", given.calibration, 5001)
    validation = draw_pictures(folder / "validation", "validation", given.validation, 5002)
    rows = []
    for name in given.names:
        rows.append(examine(folder, name, calibration, validation))
        (folder / "recovery.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
