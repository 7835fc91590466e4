"""Stored builds of a model against torch.compile of it (FP16, channels last; on a CPU FP32), in one process, in turns.

usage: python benchmarks/gpu_against_compile.py MODEL WORKSPACE [--device cuda] [--batch 64,256,1,8] [--rows ROWS.json]

ROWS.json is written anew after each batch size; all rows are printed at the end, as one JSON document.
"""

import json
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

from gpu_turns import compile_source, draw_arrays, load_artifact, time_in_turns

from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.stats.ratio import ratio_from_rounds
from optpipe.workspace.store import Store


def main() -> None:
    """Batch by batch, all builds and the compiled module."""
    parser = ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", default="64,256,1,8")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--mode", default="reduce-overhead", help="torch.compile's")
    given = parser.parse_args()
    name = Path(given.model).stem
    builds = [
        each
        for each in find_artifacts(name, Store(given.workspace))
        if each.entry.info.device == given.device
    ]
    rows = []
    for size in map(int, given.batch.split(",")):
        arrays = draw_arrays(builds[0].entry.id, size, given.workspace)
        theirs = compile_source(given.model, given.device, given.mode, "default")(arrays.values())
        sides = [load_artifact(each.entry.id, size, given.workspace).launch for each in builds]
        *times, compiled = time_in_turns([*sides, theirs], given.device)
        for build, ours in zip(builds, times, strict=True):
            ratio = ratio_from_rounds(ours, compiled)
            row = {
                "build": build.label,
                "batch": size,
                "ms": median(ours),
                "compiled_ms": median(compiled),
            }
            rows.append({**row, "speed": ratio.value, "speed_ci": ratio.ci})
        if given.rows:
            given.rows.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
