"""What each source of `optpipe profile --record` adds to the time of a step, on a GPU, and a short recording with all of them.

usage: PYTHONPATH=pipeline python benchmarks/gpu_sources.py FOLDER [--steps 100] [--rounds 1] [--seconds 200] [--sources NAME…]

The program is `training_loop.py`, which times its steps itself: without a profiler, under nsys alone (`none`), and with each source.
The first fifth of the steps does not count. FOLDER receives `sources.json`, the profile with all sources (`profile-training-loop.json`),
and `golden/`, the last three steps of that recording as optpipe stores them: tables without the environment of the process.
No run starts after SECONDS.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from optpipe.report.markdown import render_table_lines
from optpipe.trace.program import STEP_RANGE
from optpipe.trace.read import DETAIL_SCHEMAS, SCHEMAS, match_names, trace_from_folder, write_trace
from optpipe.trace.sources import Source

LOOP = Path(__file__).with_name("training_loop.py")
BARE, NONE, ALL = "no profiler", "none", "all"
GOLDEN_STEPS = 3
GOLDEN_METRICS = r"SMs? Active|Tensor Active|DRAM (Read|Write)|GPC Clock|PCIe (RX|TX)"


def run_loop(source: str, steps: int, scratch: Path) -> dict[str, Any]:
    """Median milliseconds of a step, and what the profile says about the source."""
    times = scratch / "times.json"
    program = [sys.executable, str(LOOP), "--steps", str(steps), "--times", str(times)]
    command = program
    if source != BARE:
        record = [] if source == NONE else ["--record", source]
        place = ["--workspace", str(scratch / "workspace"), "--json"]
        command = [sys.executable, "-m", "optpipe", "profile", *record, *place, "--", *program]
    begun = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"source": source, "wall_s": round(time.monotonic() - begun, 1)}
    if ended.returncode:
        row["error"] = ended.stderr.strip().splitlines()[-2:]
        return row
    row["step_ms"] = median(json.loads(times.read_text())[steps // 5 :])
    if source != BARE:
        row["profile"] = json.loads(ended.stdout)
        states = row["profile"]["stages"][0]["details"]["sources"]
        row["refused"] = {each["name"]: each["why"] for each in states if not each["recorded"]}
    return row


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
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    begun, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.rounds):
            for source in given.sources:
                if time.monotonic() - begun > given.seconds:
                    print(f"{source} in round {turn + 1}: left out, the time was over")
                    continue
                row = run_loop(source, given.steps, Path(folder))
                profile = row.pop("profile", None)
                if source == ALL and profile is not None:
                    size = cut_golden(Path(profile["run_dir"]), given.folder / "golden")
                    profile["run_dir"] = ""
                    profile["program"]["command"] = ["python", LOOP.name]
                    name = given.folder / "profile-training-loop.json"
                    name.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
                    print(f"golden: {size} bytes")
                rows.append(row)
                print(json.dumps(row), flush=True)
                document = {"steps": given.steps, "rows": rows}
                text = json.dumps(document, indent=1) + "\n"
                (given.folder / "sources.json").write_text(text, encoding="utf-8")
    print("\n".join(tabulate(rows)))


def tabulate(rows: list[dict[str, Any]]) -> list[str]:
    """The median over rounds of each source, and the share that it adds to a step."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if "step_ms" in row:
            times.setdefault(row["source"], []).append(row["step_ms"])
    cells = []
    for source, steps in times.items():
        shares = [
            f"{median(steps) / median(times[base]) - 1:+.1%}" if base in times else ""
            for base in (BARE, NONE)
        ]
        refused = {why for row in rows if row["source"] == source for why in row.get("refused", {})}
        cells.append([source, f"{median(steps):.2f}", *shares, ", ".join(sorted(refused))])
    head = ["source", "step ms", "added to no profiler", "added to nsys alone", "refused"]
    return list(render_table_lines(head, cells))


if __name__ == "__main__":
    main()
