"""`optpipe.sweep.fleet` against measured servers: p99 of `bench --scenario server` at three utilizations against the simulation's.

usage: [chrt -f 10] sweep_capacity.py FOLDER [BATCH]     `digits` on one core, no GPU; about 2 minutes at batch 1

The simulation knows one service time per batch size, the run's median. `replayed` are the run's own arrivals and service times through the
same queue: what lies between it and the simulation is the scatter of service times, between it and the measurement the tool's own delay.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars

from optpipe.sweep.fleet import simulate_queue

UTILIZATIONS = (0.3, 0.5, 0.7)
SEEDS = 20
CORE = ("--affinity", "0", "--option", "onnxruntime.threads=1", "--device", "cpu")


def run(folder, command, *arguments):
    """The JSON document of a command; one that was INVALID is still measured."""
    words = [sys.executable, "-m", "optpipe", command, "digits", "--backend", "onnxruntime", *arguments]
    done = subprocess.run([*words, "--workspace", folder, "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def read_samples(document):
    """Columns of the measured samples in ns, and the one measurement."""
    (measurement,) = document["measurements"]
    frame = polars.read_parquet(Path(document["run_dir"]) / measurement["samples_file"]).filter(
        polars.col("phase") == 1
    )
    return {name: frame[name].to_numpy() for name in ("scheduled_ns", "start_ns", "end_ns")}, measurement


def replay(scheduled, service):
    """Latencies in ns of one server, first come first served (Lindley 1952)."""
    free, found = 0, []
    for due, takes in zip(scheduled.tolist(), service.tolist(), strict=True):
        free = max(free, due) + takes
        found.append(free - due)
    return np.asarray(found)


def main():
    folder, batch = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "1"
    run(folder, "build", "--precision", "fp32", "--device", "cpu")
    load = (*CORE, "--batch", batch, "--processes", "1", "--max-cv", "500%", "--max-time", "60")
    alone, _ = read_samples(run(folder, "bench", *load))
    mean_s = float(np.mean(alone["end_ns"] - alone["start_ns"])) / 1e9
    columns = (
        "utilization",
        "queries",
        "service p50, p99",
        "measured p99",
        "replayed",
        "simulated",
        "simulated/measured",
        "verdict",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for share in UTILIZATIONS:
        rate = share / mean_s
        found, measurement = read_samples(run(folder, "bench", *load, "--scenario", "server", "--rate", f"{rate:.3f}"))
        service = found["end_ns"] - found["start_ns"]
        measured = np.percentile(found["end_ns"] - found["scheduled_ns"], 99) / 1e6
        replayed = np.percentile(replay(found["scheduled_ns"], service), 99) / 1e6
        times = {1: float(np.median(service)) / 1e9}
        draws = [
            np.percentile(simulate_queue(rate, 1, times, requests=len(service), seed=seed), 99) * 1e3
            for seed in range(SEEDS)
        ]
        simulated = float(np.mean(draws))
        spread = f"{simulated:.3g} ({min(draws):.3g} … {max(draws):.3g})"
        typical, rare = np.percentile(service, [50, 99]) / 1e6
        cells = (
            f"{rate * float(np.mean(service)) / 1e9:.2f}", f"{len(service):,}", f"{typical:.3g}, {rare:.3g} ms", f"{measured:.3g} ms",
            f"{replayed:.3g} ms", f"{spread} ms", f"{simulated / measured:.2f}", measurement["verdict"],
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
