"""One network of each of 40 families of torchvision and timm, and eight that predict for each pixel or read long sequences.

usage: gpu_families.py OUT.json [NETWORK…]

Each is measured at two batch sizes as `gpu_compiled.py` does: FP16 with optpipe's kernels, without them, INT8, and torch.compile in
FP16, in turns in one process, raw times kept. A part takes PART_S seconds (by default 570): it starts no build after three quarters
of them, and the next call with the same file goes on with the cells that are missing. Cells that failed are not tried again.
The ratios leave out cells whose torch.compile gives numbers that are not finite, and builds of ours that do.
VARIANTS and MOST (processes at once) are those of `gpu_compiled.py`; `TABLE=1` only prints the table.
"""

import json
import os
import sys
import time
from math import isnan
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
PEERS = ("compile", "cast")
"""Of torch.compile: the first, which gets FP16 and casts nothing, is the harder one, and the one of the ratios."""
OURS = ("fused", "plain", "int8")
GOAL = 1.25


def list_cells():
    return {**DENSE, **{each.name: (64, 1) for each in FAMILIES}}


def print_table(file):
    """A line for each cell, then the three figures: fastest build, FP16 alone, and the worst cell."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    fastest, half, without = {}, {}, []
    for row in rows:
        cell = f"{row['network']} {row['batch']}"
        said = " ".join(
            f"{name} {describe_variant(row[name])}" for name in (*PEERS, *OURS) if name in row
        )
        times = {name: row[name]["ms"] for name in (*PEERS, *OURS) if answers(row.get(name, {}))}
        ours = [times[each] for each in OURS if each in times]
        if "compile" in times and ours:
            fastest[cell] = times["compile"] / min(ours)
            fp16 = [times[each] for each in ("fused", "plain") if each in times]
            if fp16:
                half[cell] = times["compile"] / min(fp16)
            said += f" | fp16 {half.get(cell, 0):.2f} fastest {fastest[cell]:.2f}"
        else:
            without.append(cell)
        print(f"{cell:42} {said}{' (no CUDA graphs)' if 'without_graphs' in row else ''}")
    for name, ratios in (("fastest", fastest), ("FP16 alone", half)):
        if ratios:
            worst = min(ratios, key=ratios.get)
            faster = sum(each >= 1 for each in ratios.values())
            much = sum(each >= GOAL for each in ratios.values())
            print(
                f"{name}: at least as fast in {faster} of {len(ratios)} cells, {GOAL} times in {much}; worst {worst} {ratios[worst]:.2f}"
            )
    if without:
        print(f"no comparison: {', '.join(without)}")


def answers(variant):
    """Whether a variant was timed and its numbers are finite, as far as they were looked at."""
    snr = variant.get("snr_db", 0.0)
    return "ms" in variant and snr is not None and not isnan(snr)


def describe_variant(variant):
    if "ms" not in variant:
        return "failed"
    return f"{variant['ms']}" if answers(variant) else f"{variant['ms']} but not finite"


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
