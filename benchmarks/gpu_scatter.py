"""How much a build's figures scatter inside a process, between processes and between runs, on a machine with an NVIDIA GPU.

usage: PYTHONPATH=pipeline:$PYTHONPATH python3 -m benchmarks.gpu_scatter OUTPUT.json [--runs 3] [--model resnet50] [--batch 64]
Builds the model in FP16 for torch (random weights: speed alone is measured), benches it RUNS times with five processes each, and
prints a table of p50. Under three minutes on one H200; run from the project's root.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import stdev

from optpipe.core.measurement import read_measurements
from optpipe.measuring.groups import ProcessGroup, describe_tries, group_processes, summarize_group
from optpipe.measuring.measured import RecordedMeasurement


def optpipe(*arguments):
    ran = subprocess.run([sys.executable, "-m", "optpipe", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if ran.returncode not in (0, 5):
        sys.exit(f"optpipe {' '.join(arguments)}: exit {ran.returncode}\n{ran.stdout[:800]}")
    return json.loads(ran.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", default="64")
    given = parser.parse_args()
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
        optpipe("build", given.model, *place)
        times = (
            "--batch",
            given.batch,
            "--min-time",
            "1",
            "--max-time",
            "10",
            "--percentile",
            "90",
            "--processes",
            "5",
        )
        documents = [optpipe("bench", given.model, *place, *times) for _ in range(given.runs)]
        tries = [
            RecordedMeasurement(one, document["run_id"])
            for document in documents
            for one in read_measurements(Path(document["run_dir"]))
        ]
    for group in group_processes(tries):
        report(group, given.output)


def report(group: ProcessGroup, output: Path) -> None:
    print(f"{group.newest.measurement.subject.backend} {group.load}: {describe_tries(group)}")
    means = []
    for number, values in enumerate(group.list_values("p50")):
        mean = sum(values) / len(values)
        means.append(mean)
        scatter = f"{stdev(values) / mean:.3%}" if len(values) > 1 else "–"
        print(f"run {number}: {len(values)} processes, p50 {mean / 1e6:.4f} ms, scatter between them {scatter}")
    found = summarize_group(group).figures.get("p50")
    between_runs = stdev(means) / (sum(means) / len(means)) if len(means) > 1 else None
    if found is not None and found.between is not None and found.estimate.low is not None:
        low, high = found.estimate.low / 1e6, found.estimate.high / 1e6
        print(
            f"all: inside a process {found.inside:.3%}, between processes {found.between:.3%}, between runs' means {between_runs}"
        )
        print(f"p50 {found.estimate.value / 1e6:.4f} ms, 95 % interval {low:.4f} to {high:.4f}")
    output.write_text(
        json.dumps({"p50_ns_by_run": group.list_values("p50"), "between_runs": between_runs}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
