"""Judges what benchmarks/gpu_sweep.sh measured.

usage: gpu_sweep_table.py kill WORKSPACE       kills the worker of one slot once there are results of another
       gpu_sweep_table.py table WORK OUTPUT    prints the tables, and writes OUTPUT/sweep-fleet.json
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from optpipe.core.files import Files
from optpipe.core.measurement import read_measurements
from optpipe.stats.means import mean_from_values

SWEEPS = {
    "build": "builds and batch 1",
    "all": "all GPUs",
    "half": "half of the GPUs",
    "one": "one GPU",
    "ray": "all GPUs, Ray",
    "kill": "all GPUs, a worker killed",
    "rest": "the same, continued",
    "other": "the last GPU alone",
}
FOLDERS = {"build": "built", "rest": "kill"}
BESIDE = "all", "ray", "kill"
"""Sweeps that measured on all GPUs at once."""
MOST = 0.02


def list_workers(workspace):
    """Processes that measure for this workspace: process id, GPU, cells."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, KeyError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if "optpipe.sweep.task" not in words or not words[3].startswith(str(workspace)):
                continue
            task = json.loads(Path(words[3]).read_text())
            shown = dict(
                each.partition("=")[::2] for each in (path / "environ").read_text().split("\0")
            )
            if task["cells"]:
                yield (
                    int(path.name),
                    shown["CUDA_VISIBLE_DEVICES"],
                    [get_cell({"cell": each}) for each in task["cells"]],
                )


def kill_worker(workspace):
    """Kills with SIGKILL, in the middle of its loads, a worker that has measured for two seconds."""
    runs, before = workspace / "runs", {path.name for path in (workspace / "runs").glob("job-*")}
    begun, seen = time.monotonic(), {}
    while True:
        done = sum(path.name not in before for path in runs.glob("job-*"))
        for pid, gpu, cells in list_workers(workspace):
            seen.setdefault(pid, time.monotonic())
            if done and time.monotonic() - seen[pid] > 2:
                os.kill(pid, signal.SIGKILL)
                return {
                    "gpu": gpu,
                    "cells": cells,
                    "recorded": done,
                    "seconds": round(time.monotonic() - begun, 1),
                }
        time.sleep(0.1)


def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def get_cell(row):
    """Model, precision and batch size."""
    recipe = row["cell"]["recipe"]
    return recipe["model"], recipe["precision"], row["cell"]["load"]["batch_size"]


def read_median(workspace, row):
    """Median latency in ns of the run's raw samples, which a row without a VALID process and one with a withheld p50 have too."""
    with suppress(Exception):
        for one in read_measurements(Files(workspace / "runs" / row["run"])):
            if (
                one.load.batch_size == row["cell"]["load"]["batch_size"]
                and one.latency_ns is not None
            ):
                return one.latency_ns.median
    return None


def read_sweep(work, name):
    """The sweep's document with a short form of its rows."""
    record = read(work / f"{name}.json")
    rows = []
    for row in record.get("rows", []):
        model, precision, batch = get_cell(row)
        kept = ("state", "reason", "fingerprint", "slot", "run", "seconds", "attempts", "stored")
        figure = (row["figures"] or {}).get("p50") or {}
        medians = {
            "p50_ns": figure.get("value"),
            "median_ns": read_median(work / FOLDERS.get(name, name), row),
        }
        rows.append(
            {
                "model": model,
                "precision": precision,
                "batch": batch,
                **medians,
                **{key: row[key] for key in kept},
            }
        )
    told = ("slots", "seconds", "warnings", "exit_status", "message", "error")
    return {key: record[key] for key in told if key in record} | {"rows": rows}


def list_medians(sweep):
    """Rows by cell, of jobs that this sweep measured."""
    cells = {(row["model"], row["precision"], row["batch"]): row for row in sweep["rows"]}
    return {cell: row for cell, row in cells.items() if row["median_ns"] and not row["stored"]}


def compare(title, alone, beside):
    """Logarithms of the ratio of the cells' medians, with t intervals over cells, and over the processes that measured alone."""
    ratios = {
        cell: log(row["median_ns"] / alone[cell]["median_ns"])
        for cell, row in beside.items()
        if cell in alone
    }
    return describe(title, alone, ratios)


def describe(title, alone, ratios):
    if not ratios:
        return {"title": title, "cells": 0}
    runs = {}
    for cell, ratio in ratios.items():
        runs.setdefault(alone[cell]["run"], []).append(ratio)
    worst = max(ratios, key=lambda cell: abs(ratios[cell]))
    found = {
        "title": title,
        "cells": len(ratios),
        "mean": exp(fmean(ratios.values())) - 1,
        "median": exp(median(ratios.values())) - 1,
        "within": sum(abs(exp(each) - 1) <= MOST for each in ratios.values()),
        "worst": {"cell": worst, "change": exp(ratios[worst]) - 1},
    }
    for unit, values in (
        ("cells", list(ratios.values())),
        ("processes", [fmean(each) for each in runs.values()]),
    ):
        mean = mean_from_values(values)
        found[f"over_{unit}"] = (
            None if mean is None else [exp(each) - 1 for each in mean.interval(0.95)]
        )
    return found


def print_comparison(found):
    if not found["cells"]:
        print(f"| {found['title']} | no common cell | | | | | |")
        return
    low_high = [
        "–" if each is None else f"{each[0]:+.2%} … {each[1]:+.2%}"
        for each in (found["over_cells"], found["over_processes"])
    ]
    worst = f"{found['worst']['change']:+.1%} ({' '.join(map(str, found['worst']['cell']))})"
    inside = f"{found['within']} of {found['cells']}"
    print(
        f"| {found['title']} | {found['cells']} | {found['mean']:+.2%} | {' | '.join(low_high)} | {inside} | {worst} |"
    )


def print_sweeps(sweeps):
    print(
        "| sweep | slots | jobs | states | wall clock | one GPU over it |\n|---|---|---|---|---|---|"
    )
    one = sweeps["one"].get("seconds")
    for name, title in SWEEPS.items():
        rows, seconds = sweeps[name]["rows"], sweeps[name].get("seconds")
        if not rows or seconds is None:
            print(f"| {title} | failed | | | | |")
            continue
        states = Counter("stored" if row["stored"] else row["state"] for row in rows)
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        used = len({row["slot"] for row in rows if row["slot"] and not row["stored"]})
        faster = f"{one / seconds:.2f} ×" if one and name in ("all", "half", "ray", "kill") else ""
        print(f"| {title} | {used} | {len(rows)} | {told} | {seconds:.1f} s | {faster} |")


def print_medians(sweeps):
    names = ("one", *BESIDE, "half", "other")
    print("\nMedians of the raw samples, ms (! not VALID, × of another slot than alone):\n")
    print(f"| cell | {' | '.join(SWEEPS[name] for name in names)} |\n|---|{'---:|' * len(names)}")
    medians = {name: list_medians(sweeps[name]) for name in names}
    for cell in medians["one"]:
        texts = []
        for name in names:
            row = medians[name].get(cell)
            moved = row and row["slot"] != medians["one"][cell]["slot"]
            mark = f"{'' if row['state'] == 'done' else ' !'}{' ×' if moved else ''}" if row else ""
            texts.append(f"{row['median_ns'] / 1e6:.4g}{mark}" if row else "–")
        print(f"| {' '.join(map(str, cell))} | {' | '.join(texts)} |")


def print_kill_and_merge(work, sweeps):
    killed, merged, compared = (
        read(work / f"{name}.json") for name in ("killed", "merge", "compare")
    )
    cells = {(row["model"], row["precision"], row["batch"]) for row in sweeps["all"]["rows"]}
    rows = sweeps["rest"]["rows"] or sweeps["kill"]["rows"]
    after = {
        (row["model"], row["precision"], row["batch"]): row["state"] for row in rows if row["run"]
    }
    lost = Counter(after.get(tuple(cell), "lost") for cell in killed.get("cells", []))
    print(
        f"\nkilled: the worker on {killed.get('gpu') or '–'} after {killed.get('seconds')} s; its cells at the end: {dict(lost)}"
    )
    print(f"of {len(cells)} cells {len(after)} are there at the end, in {len(rows)} rows")
    told = {key: merged.get(key) for key in ("added", "present", "conflicts", "damaged")}
    print(f"merged: {told}")
    rows = compared.get("rows", [])
    print(f"compare: {len(rows)} rows, {sum(row['on_frontier'] for row in rows)} on the frontier")
    return {"killed": killed, "merged": merged, "compare": compared}


def main():
    if sys.argv[1] == "kill":
        print(json.dumps(kill_worker(Path(sys.argv[2]))))
        return
    work, out = Path(sys.argv[2]), Path(sys.argv[3])
    sweeps = {name: read_sweep(work, name) for name in SWEEPS}
    kept: dict[str, object] = {"sweeps": sweeps}
    try:
        print_sweeps(sweeps)
        medians = {name: list_medians(sweep) for name, sweep in sweeps.items()}
        alone = medians["one"]
        found = [
            compare(f"{SWEEPS[name]} against one GPU", alone, medians[name])
            for name in (*BESIDE, "half")
        ]
        pooled, same = {}, {}
        for cell, row in alone.items():
            every = [medians[name][cell] for name in BESIDE if cell in medians[name]]
            on_it = [each for each in every if each["slot"] == row["slot"]]
            for into, values in ((pooled, every), (same, on_it)):
                if values:
                    into[cell] = fmean(log(each["median_ns"] / row["median_ns"]) for each in values)
        found += [
            describe("all side by side, mean of each cell", alone, pooled),
            describe("the same on the GPU of the one alone", alone, same),
            compare("A/A: the last GPU alone against one GPU", alone, medians["other"]),
        ]
        kept["comparisons"] = found
        head = "median of the same cells | cells | mean change | 95% over cells | over processes | within 2% | largest"
        print(f"\n| {head} |\n|---|---|---|---|---|---|---|")
        for each in found:
            print_comparison(each)
        kept |= print_kill_and_merge(work, sweeps)
        print_medians(sweeps)
    finally:
        (out / "sweep-fleet.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
