"""How often does `bench --against` claim a difference between an artifact and itself, and how often does it find 5 %?

usage: ab_error_rates.py WORKSPACE ARTIFACT COMPARISONS [--slower 1.05] [--rounds 6] [--output FILE]
Appends one JSON line per comparison to FILE, so that several short calls add up; prints the rates over all its lines.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from secrets import randbits

from optpipe.backends.registry import resolve_effective_options
from optpipe.core.load import LoadSpec
from optpipe.core.metrics.measured import PairMetric
from optpipe.core.records import line_from_record
from optpipe.measure.measure import BenchPlan, prepare_subject
from optpipe.measure.pair import run_interleaved
from optpipe.measure.process import WorkerPool
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.stats.paired import compute_share_interval
from optpipe.workspace.store import Store


def comparison(artifact, store, rounds, slower, seconds):
    """One comparison of the artifact with itself; the contender's calls are held back to `slower` times their length."""
    load = LoadSpec(
        1,
        min_seconds=seconds,
        max_seconds=10,
        percentile=50.0,
        warm_up_seconds=0.1,
        max_warm_up_seconds=1.0,
    )
    load = replace(load, cache_probes=0)
    plan = BenchPlan(load)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject = prepare_subject(
            artifact, plan, store, WorkerPool(folder), folder / "inputs", folder
        )
        # one thread, so that a second core is left to the rest of the machine
        subject = subject.with_options(
            resolve_effective_options(artifact.entry.info, {"threads": 1})
        )
        session = subject.session
        held_back = replace(
            session,
            loader="slowed:slowed",
            arguments={"factor": slower, "of": session.loader, "arguments": session.arguments},
        )

        def side(subject):
            def measured(name):
                with subject.open() as worker:
                    return subject.measure(worker, load, name)

            return measured

        return run_interleaved(
            side(subject),
            side(replace(subject, session=held_back) if slower != 1 else subject),
            rounds,
            PairMetric.P50,
            randbits(32),
        ).ratio


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workspace", type=Path)
    parser.add_argument("artifact")
    parser.add_argument("comparisons", type=int)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    inherited = os.environ.get("PYTHONPATH")  # workers import slowed.py from here
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent.resolve()), *([inherited] if inherited else [])]
    )
    store = Store(given.workspace)
    artifact = find_artifacts(given.artifact, store)[0]
    with given.output.open("a") as file:
        for _ in range(given.comparisons):
            ratio = comparison(artifact, store, given.rounds, given.slower, given.seconds)
            file.write(line_from_record(ratio).decode())
            file.flush()
            print(
                f"{ratio.value:.4f} [{ratio.ci[0]:.4f}, {ratio.ci[1]:.4f}] {ratio.change}",
                flush=True,
            )
    found = [json.loads(line) for line in given.output.read_text().splitlines()]
    for change in ("faster", "slower", "no difference shown"):
        count = sum(each["change"] == change for each in found)
        low, high = compute_share_interval(count, len(found))
        print(f"{change}: {count} of {len(found)} ({low:.1%} to {high:.1%})")


main()
