"""Prints what benchmarks/gpu_sweep.sh wrote as Markdown: usage gpu_sweep_table.py FOLDER."""

import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median


def read(folder, name):
    path = folder / f"sweep-{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def get_cell(row):
    """Model, precision and batch size."""
    recipe = row["cell"]["recipe"]
    return recipe["model"], recipe["precision"], row["cell"]["load"]["batch_size"]


def p50s(record):
    """p50 in ns by model, precision and batch size, VALID or not, with the slot."""
    found = {}
    for row in record.get("rows", []):
        figure = (row["figures"] or {}).get("p50")
        if figure:
            found[get_cell(row)] = figure["value"], row["state"], row["slot"]
    return found


def compare(title, one, other):
    """How far the p50 of the same cells lie apart."""
    both = [(key, other[key][0] / one[key][0] - 1) for key in one if key in other]
    if not both:
        return f"| {title} | no common cell | | | |"
    apart = sorted(abs(each) for _, each in both)
    key, worst = max(both, key=lambda each: abs(each[1]))
    inside = sum(each <= 0.02 for each in apart)
    shift = median(each for _, each in both)
    return (
        f"| {title} | {len(both)} | {shift:+.2%} | {inside} of {len(both)} | {worst:+.1%} ({' '.join(map(str, key))}) |"
    )


def main():
    folder = Path(sys.argv[1])
    many, one, other = (read(folder, name) for name in ("many", "one", "other"))
    if not many.get("rows") or not one.get("rows"):
        print("no sweep to compare; see the logs")
        return
    cells, alone = len(many["rows"]), len(one["rows"])
    print("| sweep | GPUs | jobs | states | wall clock |\n|---|---|---|---|---|")
    for name, record in (("all GPUs", many), ("one GPU", one), ("another GPU", other)):
        states = ", ".join(
            f"{count} {state}" for state, count in Counter(r["state"] for r in record.get("rows", [])).items()
        )
        gpus = "; ".join(record.get("slots", []))
        print(f"| {name} | {gpus} | {len(record.get('rows', []))} | {states} | {record.get('seconds', 0):.1f} s |")
    known = {get_cell(row) for row in one["rows"]}
    rest = sum(row["seconds"] for row in many["rows"] if get_cell(row) not in known)
    ratio = (one["seconds"] + rest) / many["seconds"]
    how = f"one GPU: {one['seconds']:.1f} s for {alone} jobs alone and {rest:.1f} s for the other {cells - alone} side by side"
    print(f"\nwall clock: {how}, over {many['seconds']:.1f} s: {ratio:.2f} ×\n")
    print("| p50 of the same cells | cells | median shift | within 2 % | largest |\n|---|---|---|---|---|")
    print(compare("side by side against alone", p50s(one), p50s(many)))
    print(compare("A/A: second GPU against first, both alone", p50s(one), p50s(other)))
    print(
        "\n| model | precision | batch | alone, p50 ms | side by side, p50 ms | other GPU, p50 ms |\n|---|---|---:|---:|---:|---:|"
    )
    beside, second = p50s(many), p50s(other)
    for key, (value, state, _) in p50s(one).items():
        if key[2] in (1, 8, 64):
            texts = [f"{each[key][0] / 1e6:.3g}" if key in each else "–" for each in (beside, second)]
            mark = "" if state == "done" else f" ({state})"
            print(f"| {' | '.join(map(str, key))} | {value / 1e6:.3g}{mark} | {texts[0]} | {texts[1]} |")


if __name__ == "__main__":
    main()
