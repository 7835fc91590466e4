"""Compares two stored artifacts in interleaved fresh processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optpipe.artifacts.lookup import StoredArtifact, checked_batches
from optpipe.bench.session_plan import (
    BenchPlan,
    prepared,
    recoverable,
    subject_of,
    warn_of_threads,
)
from optpipe.core.events import Listener, Step
from optpipe.core.interrupts import taken
from optpipe.core.measurement import COMPARISON_FILE, MEASUREMENTS_FILE, Measurement
from optpipe.core.measurement_json import document_of
from optpipe.errors import ExitStatus
from optpipe.measuring.interleave import Comparison, Metric, interleaved
from optpipe.measuring.measure import Load, cut_off, measure
from optpipe.measuring.process import WorkerProcess
from optpipe.workspace.manifest import command_line
from optpipe.workspace.runs import (
    Run,
    begin_run,
    finish_run,
    write_json,
)
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class PairBench:
    """A finished comparison, or what there is of an interrupted one."""

    run: Run
    measurements: tuple[Measurement, ...]
    comparison: Comparison | None
    labels: tuple[str, str]

    @property
    def status(self) -> ExitStatus:
        """DONE whatever the answer: a comparison has no limit to fail."""
        return ExitStatus.DONE if self.comparison else ExitStatus.INTERRUPTED


def bench_pair(
    baseline: StoredArtifact,
    contender: StoredArtifact,
    plan: BenchPlan,
    rounds: int,
    metric: Metric,
    store: Store,
    listener: Listener,
) -> PairBench:
    """Runs A B B A …, each in a fresh process, and writes the run with its comparison."""
    size = checked_batches(baseline, plan.batches)[0]
    checked_batches(contender, (size,))
    percent = float(metric[1:]) if metric.startswith("p") else 0.0
    load = replace(plan.load, batch_size=size, percentile=max(plan.load.percentile, percent))
    for each in (baseline, contender):
        warn_of_threads(each, each.options_in_force(plan.options), plan.affinity, listener)
    run = begin_run(store.workspace, "bench")
    done: list[Measurement] = []
    comparison = None
    with recoverable(run, listener), store.scratch("bench") as scratch:
        total = 2 * rounds
        with listener.step(f"{baseline.label} against {contender.label}, {total} processes", total=total) as step:
            try:
                sides = [
                    _side(artifact, plan, load, store, scratch / name, run.path, step, done)
                    for name, artifact in (("a", baseline), ("b", contender))
                ]
                comparison = interleaved(sides[0], sides[1], rounds, metric)
            except KeyboardInterrupt as interruption:  # between two processes
                done += cut_off(run.path, done)
                if not done:
                    raise
                taken(interruption)
    write_json(run.path / MEASUREMENTS_FILE, document_of(tuple(done)))
    if comparison is not None:
        write_json(run.path / COMPARISON_FILE, comparison.to_dict())
    finished = finish_run(
        run,
        command=command_line(),
        parents=[baseline.entry.id, contender.entry.id],
        status="complete" if comparison else "interrupted",
    )
    labels = tuple(f"{each.entry.id} {each.label}" for each in (baseline, contender))
    return PairBench(finished, tuple(done), comparison, (labels[0], labels[1]))


def pair_record(result: PairBench, warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `optpipe bench A B --interleave`."""
    return {
        "run_dir": str(result.run.path),
        "run_id": result.run.run_id,
        "baseline": result.labels[0],
        "contender": result.labels[1],
        "comparison": result.comparison.to_dict() if result.comparison else None,
        "measurements": document_of(result.measurements)["measurements"],
        "environment": result.run.manifest["environment"],
        "interrupted": result.comparison is None,
        "warnings": list(warnings),
        "exit_status": int(result.status),
    }


def _side(
    artifact: StoredArtifact,
    plan: BenchPlan,
    load: Load,
    store: Store,
    scratch: Path,
    directory: Path,
    step: Step,
    done: list[Measurement],
) -> Callable[[str], Measurement]:
    session, frame = prepared(artifact, plan, store, scratch, directory)
    options = artifact.options_in_force(plan.options)
    session = replace(session, arguments={**session.arguments, "options": options})

    def measured(name: str) -> Measurement:
        with WorkerProcess(session, scratch) as worker:
            found = measure(worker, subject_of(artifact, options), load, name, frame)[0]
        done.append(found)
        write_json(directory / MEASUREMENTS_FILE, document_of(tuple(done)))  # a crash loses no process that ended
        step.advance()
        return found

    return measured
