"""How much a build's p50 scatters inside a process, between processes and between runs.

usage: PYTHONPATH=pipeline python3 benchmarks/gpu_scatter.py OUTPUT.json [--runs 3] [--processes 5] [--model resnet50] [--batch 64]
       … OUTPUT.json --model digits --backend onnxruntime --precision fp32 --device cpu --batch 16 --max-cv 900%   (anywhere)
Builds the model (torch, FP16 and the GPU, unless told otherwise; torchvision's weights are drawn, for speed alone is measured), benches
it RUNS times, writes one JSON file and prints a table. On a GPU where a process takes 12 s to start, 15 processes take about
four minutes, after the build.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from optpipe.core.files import Files
from optpipe.core.measurement import Measurement, read_measurements
from optpipe.core.records import plain_from_record
from optpipe.measure.groups import (
    ProcessGroup,
    RecordedMeasurement,
    describe_tries,
    group_processes,
    summarize_group,
)
from optpipe.report.markdown import render_table_lines
from optpipe.workspace.entry import load_run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", default="64")
    parser.add_argument("--max-cv", default="2.5%")
    given = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place = (
            "--backend",
            given.backend,
            "--precision",
            given.precision,
            "--device",
            given.device,
            "--workspace",
            folder,
        )
        weights = () if given.model == "digits" else ("--weights", given.weights)
        optpipe("build", given.model, *place, *weights)
        times = (
            "--min-time",
            "1",
            "--max-time",
            "5",
            "--percentile",
            "90",
            "--max-cv",
            given.max_cv,
        )
        load = ("--batch", given.batch, "--processes", str(given.processes), *times)
        runs = [
            load_run(Path(optpipe("bench", given.model, *place, *load)["run_dir"]))
            for _ in range(given.runs)
        ]
        tries = [
            RecordedMeasurement(one, run.name, run.manifest.environment)
            for run in runs
            for one in read_measurements(Files(run.path))
        ]
    (group,) = group_processes(tries)
    document = describe(group) | {"seconds": time.perf_counter() - begun}
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(render(group, document))
    return 0 if group.valid else 5


def optpipe(*arguments: str):
    ran = subprocess.run(
        [sys.executable, "-m", "optpipe", *arguments, "--json"], stdout=subprocess.PIPE, text=True
    )
    if ran.returncode not in (0, 5):
        sys.exit(f"optpipe {' '.join(arguments)}: exit {ran.returncode}\n{ran.stdout[:800]}")
    return json.loads(ran.stdout)


def describe(group: ProcessGroup) -> dict:
    """Every process of every run, and what they show together."""
    by_run: dict[str, list[Measurement]] = {}
    for one in group.tries:
        by_run.setdefault(one.run, []).append(one.measurement)
    return {
        "group": plain_from_record(summarize_group(group)),
        "between_runs": compute_scatter([mean(values) for values in group.list_values("p50")]),
        "runs": {run: [describe_process(one) for one in found] for run, found in by_run.items()},
        "environment": plain_from_record(group.newest.environment),
    }


def describe_process(one: Measurement) -> dict:
    p50 = one.latency_ns.percentiles.get("p50") if one.latency_ns else None
    return {
        "verdict": one.verdict,
        "reasons": [reason.code for reason in one.reasons],
        "samples": one.samples,
        "p50_ns": p50 and [p50.value, p50.low, p50.high],
        "cv": one.latency_ns.cv.value if one.latency_ns and one.latency_ns.cv else None,
    }


def compute_scatter(values: list[float]) -> float | None:
    """The standard deviation as a share of the mean."""
    return stdev(values) / mean(values) if len(values) > 1 else None


def render(group: ProcessGroup, document: dict) -> str:
    rows = []
    for run, processes in document["runs"].items():
        shown = [one["p50_ns"][0] for one in processes if one["p50_ns"]]
        valid = [
            one["p50_ns"][0] for one in processes if one["p50_ns"] and one["verdict"] == "VALID"
        ]
        values = valid or shown
        p50 = f"{mean(values) / 1e6:.4f}{'' if valid else ' (INVALID)'}" if values else "–"
        scatter = compute_scatter(values)
        rows.append(
            [
                run,
                f"{len(valid)} of {len(processes)}",
                p50,
                "–" if scatter is None else f"{scatter:.3%}",
            ]
        )
    lines = [f"{group.newest.measurement.subject.backend} {group.load}: {describe_tries(group)}"]
    lines += render_table_lines(
        ("run", "VALID processes", "p50 ms", "scatter between them"), rows, right=range(1, 4)
    )
    found = summarize_group(group).figures.get("p50")
    if found is not None and found.between is not None and found.inside is not None:
        runs = document["between_runs"]
        between = "" if runs is None else f", between the runs' means {runs:.3%}"
        low, high = (each / 1e6 for each in found.estimate.interval)
        lines += [
            f"scatter inside a process {found.inside:.3%}, between processes {found.between:.3%}{between}",
            f"p50 {found.estimate.value / 1e6:.4f} ms, 95 % interval over processes {low:.4f} to {high:.4f}",
        ]
    return "\n".join([*lines, f"{document['seconds']:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
