"""One network of each of 40 families of torchvision and timm, and eight that predict for each pixel or read long sequences.

usage: gpu_families.py OUT.json [NETWORK…]

Each is measured at two batch sizes as `gpu_compiled.py` does: FP16 with optpipe's kernels, without them, INT8, and torch.compile in
FP16, in turns in one process, raw times kept. A part takes PART_S seconds (by default 570): it starts no build after three quarters
of them, and the next call with the same file goes on with the cells that are missing. Cells that failed are not tried again.
VARIANTS and MOST (processes at once) are those of `gpu_compiled.py`; `TABLE=1` only prints the table.
"""

import json
import os
import sys
import time
from pathlib import Path

PART_S = float(os.environ.get("PART_S", "570"))
os.environ.setdefault("START", str(time.time()))
os.environ.setdefault("WAIT_S", str(PART_S * 0.75))
os.environ.setdefault("LAST_S", str(PART_S * 0.93))
os.environ.setdefault("VARIANTS", "compile fused plain int8")
os.environ.setdefault("ENERGY_S", "0")

from benchmarks.gpu_compiled import VARIANTS, measure_networks  # noqa: E402 - reads the settings above
from benchmarks.gpu_networks import FAMILIES  # noqa: E402 - likewise

DENSE = {
    "unet": (16, 1),
    "segformer_b2": (8, 1),
    "dpt": (8, 1),
    "hrnet": (64, 1),
    "fpn_detector": (8, 1),
    "whisper_small": (8, 1),
    "bert_large_384": (16, 1),
    "vit_l_16": (64, 1),
}
WITHOUT_INT8 = ("dpt", "whisper_small", "bert_large_384", "vit_l_16")
"""Whose export and calibration alone take minutes."""
OURS = ("fused", "plain", "int8")
GOAL = 1.25


def list_cells():
    return {**DENSE, **{each.name: (64, 1) for each in FAMILIES}}


def print_table(file):
    """A line for each cell, then the three figures: fastest build, FP16 alone, and the worst cell."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    fastest, half = {}, {}
    for row in rows:
        cell = f"{row['network']} {row['batch']}"
        times = {name: row[name].get("ms") for name in ("compile", *OURS) if name in row}
        known = {name: each for name, each in times.items() if each}
        said = " ".join(f"{name} {known.get(name, 'failed')}" for name in times)
        ours = [known[each] for each in OURS if each in known]
        if "compile" in known and ours:
            fastest[cell] = known["compile"] / min(ours)
            fp16 = [known[each] for each in ("fused", "plain") if each in known]
            if fp16:
                half[cell] = known["compile"] / min(fp16)
            said += f" | fp16 {half.get(cell, 0):.2f} fastest {fastest[cell]:.2f}"
        print(f"{cell:42} {said}")
    for name, ratios in (("fastest", fastest), ("FP16 alone", half)):
        if ratios:
            worst = min(ratios, key=ratios.get)
            faster = sum(each >= 1 for each in ratios.values())
            much = sum(each >= GOAL for each in ratios.values())
            print(
                f"{name}: at least as fast in {faster} of {len(ratios)} cells, {GOAL} times in {much}; worst {worst} {ratios[worst]:.2f}"
            )


def main():
    file, wanted = Path(sys.argv[1]), sys.argv[2:]
    if "TABLE" not in os.environ:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
        done = {(row["network"], row["batch"]) for row in rows if "TimeIsUp" not in str(row)}
        networks = []
        for name, sizes in {**dict.fromkeys(wanted, (64, 1)), **list_cells()}.items():
            left = [size for size in sizes if (name, size) not in done]
            chosen = [each for each in VARIANTS if each != "int8" or name not in WITHOUT_INT8]
            if left and (not wanted or name in wanted):
                networks.append((name, left, chosen))
        measure_networks(file, networks)
    print_table(file)


if __name__ == "__main__":
    main()
