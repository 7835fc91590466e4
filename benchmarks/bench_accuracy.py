"""optpipe's figures against a bare timing loop, and what the harness itself costs per call. On the CPU.

usage: bench_accuracy.py WORKSPACE ARTIFACT [--batch 1] [--rounds 5]
Rounds alternate: a fresh process with nothing but ONNX Runtime and two readings of the clock, then `optpipe bench`'s worker;
both one thread, same artifact, same input size. The harness cost is the time per iteration outside the timed call,
measured with a session that does nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from optpipe.backends.registry import resolve_effective_options
from optpipe.core.load import LoadSpec
from optpipe.core.measurement import Measurement, Subject, Validity
from optpipe.measure.measure import BenchPlan, measure_load, prepare_subject
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.worker.messages import SessionSpec
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.workspace.store import Store

BARE = """
import sys, time, numpy as np, onnxruntime as ort
path, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
options = ort.SessionOptions(); options.intra_op_num_threads = 1
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
given = session.get_inputs()[0]
shape = [batch] + [size for size in given.shape[1:]]
inputs = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed in range(4)]
bindings = []
for array in inputs:
    binding = session.io_binding(); binding.bind_cpu_input(given.name, array)
    binding.bind_output(session.get_outputs()[0].name, "cpu"); bindings.append(binding)
end = time.perf_counter() + 0.5
while time.perf_counter() < end: session.run_with_iobinding(bindings[0])
times, end, turn = [], time.perf_counter() + seconds, 0
while time.perf_counter() < end:
    binding = bindings[turn % 4]; turn += 1
    start = time.perf_counter_ns(); session.run_with_iobinding(binding); times.append(time.perf_counter_ns() - start)
print(sorted(times)[len(times) // 2] / 1e6)
"""


def bare_ms(path, batch, seconds):
    found = subprocess.run(
        [sys.executable, "-c", BARE, str(path), str(batch), str(seconds)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(found.stdout)


def tool_ms(artifact, store, batch, seconds):
    load = LoadSpec(
        batch, min_seconds=seconds, percentile=50.0, warm_up_seconds=0.5, max_warm_up_seconds=2.0
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject = prepare_subject(
            artifact, BenchPlan(load), store, WorkerPool(folder), folder / "inputs", folder
        )
        subject = subject.with_options(
            resolve_effective_options(artifact.entry.info, {"threads": 1})
        )
        with subject.open() as worker:
            found = subject.measure(worker, load, "m0")
    return found.latency_ns.percentile(50.0).value / 1e6


def harness_ns():
    """Median time from the end of one call to the start of the next, with a session whose call does nothing."""
    import polars as pl

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = (
            str(Path(__file__).parent),
            os.environ.get("PYTHONPATH"),
        )  # the worker has to find `nothing`
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        np.save(folder / "x.npy", np.zeros((64, 4), np.float32))
        spec = SessionSpec("nothing:nothing", {}, {"x": str(folder / "x.npy")})
        load = LoadSpec(1, min_seconds=1.0, percentile=50.0, cache_probes=0)
        with WorkerProcess(spec, WorkerPool(folder)) as worker:
            blank = Measurement(
                "", Subject("nothing", "none", "fp32", "cpu"), load, Validity.INVALID, ()
            )
            found = measure_load(worker, blank, load, "m0", folder)[0]
        samples = pl.read_parquet(folder / found.samples_file).filter(pl.col("phase") == 1)
        between = (samples["start_ns"].shift(-1) - samples["end_ns"]).drop_nulls()
        inside = samples["end_ns"] - samples["start_ns"]
        return float(np.median(between)), float(np.median(inside))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workspace", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    given = parser.parse_args()
    store = Store(given.workspace)
    artifact = find_artifacts(given.artifact, store)[0]
    path = artifact.entry.path / artifact.entry.info.file
    pairs = [
        (
            bare_ms(path, given.batch, given.seconds),
            tool_ms(artifact, store, given.batch, given.seconds),
        )
        for _ in range(given.rounds)
    ]
    for bare, tool in pairs:
        print(f"bare loop {bare:.4f} ms   optpipe {tool:.4f} ms   ratio {tool / bare:.4f}")
    between, inside = harness_ns()
    document = {
        "ratio": median(tool / bare for bare, tool in pairs),
        "harness_between_calls_ns": between,
        "harness_inside_timing_ns": inside,
    }
    print(json.dumps(document))


main()
