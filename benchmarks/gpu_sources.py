"""What each source of `optpipe profile --record` adds to the time of a step, on a GPU, and a recording with all of them.

usage: PYTHONPATH=pipeline python benchmarks/gpu_sources.py FOLDER [--steps 100] [--rounds 1] [--seconds 200] [--sources NAME…]
       PYTHONPATH=pipeline python benchmarks/gpu_sources.py FOLDER --steps 30 -- resnet50 --stage inference …

The program is `training_loop.py`, which times its steps itself: without a profiler, under nsys alone (`none`), and with each source.
The first fifth of the steps does not count. What follows `--` are arguments of `optpipe profile` instead: iterations of a model, each
run of which times them without a profiler first.

FOLDER receives `sources.json`, the profile with all sources as JSON and as text (`profile-all.*`), its timeline (`perfetto.json.gz`),
and, of the loop, `golden/`: the last three steps as optpipe stores them, tables without the environment of the process.
No run starts after SECONDS.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from optpipe.report.markdown import render_table_lines
from optpipe.trace.nsys import ITERATION_RANGE
from optpipe.trace.program import STEP_RANGE
from optpipe.trace.read import DETAIL_SCHEMAS, SCHEMAS, match_names, trace_from_folder, write_trace
from optpipe.trace.sources import Source

LOOP = Path(__file__).with_name("training_loop.py")
BARE, NONE, ALL = "no profiler", "none", "all"
TIMELINE, LARGEST_TIMELINE = "perfetto.json", 4 << 20
GOLDEN_STEPS = 3
GOLDEN_METRICS = r"SMs? Active|Tensor Active|DRAM (Read|Write)|GPC Clock|PCIe (RX|TX)"


def run_loop(source: str, steps: int, scratch: Path) -> dict[str, Any]:
    """Median milliseconds of a step of the training loop, and the profile."""
    times = scratch / "times.json"
    program = [sys.executable, str(LOOP), "--steps", str(steps), "--times", str(times)]
    row = run_program(source, program if source == BARE else ["--", *program], scratch)
    if "error" not in row:
        row["step_ms"] = median(json.loads(times.read_text())[steps // 5 :])
    return row


def run_model(source: str, steps: int, scratch: Path, model: list[str]) -> dict[str, Any]:
    """Mean milliseconds of an iteration under the profiler, the median of those before it, and the profile."""
    row = run_program(source, [*model, "--iterations", str(steps)], scratch)
    if "error" not in row:
        stage = row["profile"]["stages"][0]
        ranges = {each["name"]: each for each in stage["profile"]["measured"]["ranges"]}
        recorded = ranges[ITERATION_RANGE]
        row["step_ms"] = recorded["wall_ns"] / recorded["count"] / 1e6
        row["bare_ms"] = stage["facts"]["unprofiled_iteration_ns"] / 1e6
        row["energy"] = stage["energy"]
    return row


def run_program(source: str, program: list[str], scratch: Path) -> dict[str, Any]:
    """Runs `program`, or `optpipe profile` with it, and reads what was refused."""
    command = program
    if source != BARE:
        record = [] if source == NONE else ["--record", source]
        if source == ALL:
            record += ["--output", str(scratch / TIMELINE)]
        command = [sys.executable, "-m", "optpipe", "profile", *record, "--json", *program]
    begun = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"source": source, "wall_s": round(time.monotonic() - begun, 1)}
    if ended.returncode:
        row["error"] = ended.stderr.strip().splitlines()[-2:]
    elif source != BARE:
        row["profile"] = json.loads(ended.stdout)
        details = row["profile"]["stages"][0]["details"]
        states = details["sources"] if details else []
        row["refused"] = {each["name"]: each["why"] for each in states if not each["recorded"]}
    return row


def keep_profile(profile: dict[str, Any], folder: Path, scratch: Path) -> None:
    """Writes the profile with all sources, as JSON and as text, without the paths of this machine, and its timeline."""
    run, stage = Path(profile["run_dir"]), profile["stages"][0]
    shown = [sys.executable, "-m", "optpipe", "profile", "--trace", str(run / stage["folder"])]
    if stage["range"] is not None:
        shown += ["--range", stage["range"]]
    text = subprocess.run(
        shown, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "120"}
    )
    (folder / "profile-all.txt").write_text(text.stdout + text.stderr, encoding="utf-8")
    profile["run_dir"] = ""
    if profile["program"]:
        profile["program"]["command"] = ["python", LOOP.name]
        size = cut_golden(run, folder / "golden")
        print(f"golden: {size} bytes")
    document = json.dumps(profile, indent=1) + "\n"
    (folder / "profile-all.json").write_text(document, encoding="utf-8")
    timeline = (scratch / TIMELINE).read_bytes()
    events = json.loads(timeline)["traceEvents"]
    kinds = {kind: sum(each["ph"] == kind for each in events) for kind in "MXbeC"}
    print(f"timeline: {len(timeline)} bytes, events by phase {kinds}")
    packed = gzip.compress(timeline)
    if len(packed) < LARGEST_TIMELINE:
        (folder / f"{TIMELINE}.gz").write_bytes(packed)


def cut_golden(run: Path, target: Path) -> int:
    """Writes the last steps of a recording; returns their bytes."""
    trace = trace_from_folder(run / "program")
    steps = trace.ranges.filter(match_names(trace.ranges, f"^{STEP_RANGE}$")).sort("start_ns")
    begin, end = steps["start_ns"][-GOLDEN_STEPS], steps["end_ns"][-1]
    inside = {}
    for table in (*SCHEMAS, *DETAIL_SCHEMAS):
        frame = getattr(trace, table)
        at = "start_ns" if "start_ns" in frame.columns else "time_ns"
        inside[table] = frame.filter((pl.col(at) >= begin) & (pl.col(at) < end))
    inside["metrics"] = inside["metrics"].filter(match_names(inside["metrics"], GOLDEN_METRICS))
    shutil.rmtree(target, ignore_errors=True)
    write_trace(replace(trace, **inside), target)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--sources", nargs="*", default=[BARE, NONE, ALL, *Source])
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given, model = parser.parse_args(own), sys.argv[len(own) + 2 :]
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    begun, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ.setdefault("OPTPIPE_WORKSPACE", str(scratch / "workspace"))
        for turn, source in product(range(given.rounds), given.sources):
            if model and source == BARE:
                continue
            if time.monotonic() - begun > given.seconds:
                print(f"{source} in round {turn + 1}: left out, the time was over")
                continue
            run = partial(run_model, model=model) if model else run_loop
            row = run(source, given.steps, scratch)
            profile = row.pop("profile", None)
            if source == ALL and profile is not None:
                keep_profile(profile, given.folder, scratch)
            rows.append(row)
            print(json.dumps(row), flush=True)
            document = {"steps": given.steps, "rows": rows}
            text = json.dumps(document, indent=1) + "\n"
            (given.folder / "sources.json").write_text(text, encoding="utf-8")
    print("\n".join(tabulate(rows)))


def tabulate(rows: list[dict[str, Any]]) -> list[str]:
    """The median over rounds of each source, and the share that it adds to a step."""
    times: dict[str, list[float]] = {}
    bare: dict[str, list[float]] = {}
    for row in rows:
        if "step_ms" in row:
            times.setdefault(row["source"], []).append(row["step_ms"])
        if "bare_ms" in row:
            bare.setdefault(row["source"], []).append(row["bare_ms"])
    cells = []
    for source, steps in times.items():
        without = bare.get(source) or times.get(BARE)
        shares = [
            f"{median(steps) / median(base) - 1:+.1%}" if base else ""
            for base in (without, times.get(NONE))
        ]
        refused = {why for row in rows if row["source"] == source for why in row.get("refused", {})}
        own = f"{median(without):.2f}" if without else ""
        cells.append([source, f"{median(steps):.2f}", own, *shares, ", ".join(sorted(refused))])
    failed = {row["source"]: row["error"] for row in rows if "error" in row}
    cells += [
        [source, "failed", "", "", "", " ".join(lines)[:200]] for source, lines in failed.items()
    ]
    head = ["source", "step ms", "without profiler", "added to that", "added to nsys alone"]
    return list(render_table_lines([*head, "refused"], cells))


if __name__ == "__main__":
    main()
