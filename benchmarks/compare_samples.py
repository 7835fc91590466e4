"""`optpipe compare` over millions of raw samples: time and peak memory, process start included.

usage: python benchmarks/compare_samples.py [SAMPLES]        (default 5,000,000, in 50 measurements)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from optpipe.core.load import LoadSpec
from optpipe.core.measurement import SAMPLE_COLUMNS, Measurement, Subject, Validity
from optpipe.measure.measure import write_measurements
from optpipe.workspace.runs import begin_run, finish_run

MEASUREMENTS = 50


def write_run(workspace: Path, total: int) -> None:
    """One run of 50 measurements: five builds at ten batch sizes."""
    run, count, found = begin_run(workspace, "bench"), total // MEASUREMENTS, []
    (run.path / "samples").mkdir()
    for at in range(MEASUREMENTS):
        generator, batch = np.random.default_rng(at), 2 ** (at % 10)
        durations = generator.gamma(50, 2e4 * (1 + at / 10), count).astype(np.int64)
        ends = np.cumsum(durations)
        columns: dict[str, np.ndarray] = dict.fromkeys(SAMPLE_COLUMNS, np.zeros(count))
        columns |= {
            "phase": np.ones(count),
            "images": np.full(count, batch),
            "end_ns": ends,
            "enqueue_ns": durations,
        }
        columns |= {
            "scheduled_ns": ends - durations,
            "start_ns": ends - durations,
            "input": np.arange(count) % 64,
        }
        frame = pl.DataFrame(columns).cast(
            {name: getattr(pl, kind) for name, kind in SAMPLE_COLUMNS.items()}
        )
        frame.write_parquet(run.path / "samples" / f"m{at}.parquet")
        subject = Subject(
            f"artifact{at // 10}",
            "onnxruntime",
            ("fp32", "tf32", "fp16", "bf16", "int8")[at // 10],
            "cpu",
            "m",
        )
        found.append(
            Measurement(
                f"m{at}",
                subject,
                LoadSpec(batch),
                Validity.VALID,
                (),
                samples_file=f"samples/m{at}.parquet",
            )
        )
    write_measurements(run.path, found)
    finish_run(run, command="optpipe bench m")


def main(total: int) -> None:
    """Writes the run, compares it in a fresh process, prints one row of a table."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), total)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        program = [sys.executable, "-m", "optpipe", "compare", "--workspace", folder, "--json"]
        timed = [sys.executable, "-c", _TIMER, *program]
        done = subprocess.run(timed, capture_output=True, text=True, check=True)
        rows = len(json.loads(done.stdout)["rows"])
        seconds, kib = re.search(r"measured ([\d.]+) s (\d+) KiB", done.stderr).groups()
    print("| samples | measurements | on disk | seconds | peak memory |")
    print("|---:|---:|---:|---:|---:|")
    print(
        f"| {total:,} | {rows} | {size / 2**20:.0f} MiB | {float(seconds):.1f} | {int(kib) / 1024:.0f} MiB |"
    )


_TIMER = """
import resource, subprocess, sys, time
start = time.monotonic()
subprocess.run(sys.argv[1:], check=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(f"measured {time.monotonic() - start:.2f} s {peak} KiB", file=sys.stderr)
"""

if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000)
