"""What a fresh worker process costs, each started alone and with others standing by: seconds to import, to load, to a first figure.

usage: python benchmarks/process_starts.py WORKSPACE ARTIFACT [--processes 5] [--batch 1]
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from optpipe.core.load import LoadSpec
from optpipe.measure.measure import BenchPlan, prepare_subject
from optpipe.measure.process import WorkerPool
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.workspace.store import Store


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workspace", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
    store = Store(given.workspace)
    artifact = find_artifacts(given.artifact, store)[0]
    load = LoadSpec(
        given.batch,
        min_seconds=0.2,
        max_seconds=1.0,
        percentile=50.0,
        warm_up_seconds=0.1,
        cache_probes=0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject = prepare_subject(
            artifact, BenchPlan(load), store, WorkerPool(folder), folder / "inputs", folder
        )

        def measure(pool, name):
            begun = perf_counter()
            with replace(subject, pool=pool).open() as worker:
                started = perf_counter()
                found = subject.measure(worker, load, name)
            if found.latency_ns is None:
                raise SystemExit(f"no figure: {found.reasons}")
            return started - begun, perf_counter() - begun

        for title, expected in (("each alone", 0), ("standing by", given.processes)):
            with WorkerPool(folder) as pool:
                measure(pool, "first")  # warms the file cache, and tells the pool what is imported
                pool.expect(artifact.label, expected)
                begun = perf_counter()
                taken = [measure(pool, f"m{turn}") for turn in range(given.processes)]
                total = perf_counter() - begun
            waits = ", ".join(f"{wait:.1f}/{every:.1f}" for wait, every in taken)
            print(
                f"{artifact.label}, {title}: {total:.1f} s for {given.processes} processes (wait/all of each: {waits})"
            )


main()
