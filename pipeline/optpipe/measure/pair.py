"""Compares two stored artifacts in interleaved fresh processes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from secrets import randbits

from optpipe.core.bench_record import BenchPairRecord, PairMetric
from optpipe.core.errors import ExitStatus
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.interrupts import acknowledge_interrupt
from optpipe.core.measurement import COMPARISON_FILE, LoadSpec, Measurement
from optpipe.core.records import json_from_record
from optpipe.measure.interleave import MAX_ROUND_FACTOR, PAIR_LIMITS, run_interleaved
from optpipe.measure.measure import measure_load, recover_unfinished, write_measurements
from optpipe.measure.pool import WorkerPool
from optpipe.measure.process import WorkerProcess
from optpipe.measure.session_plan import (
    BenchPlan,
    offer_recovery,
    prepare_session,
    subject_from_artifact,
    warn_about_threads,
)
from optpipe.models.artifacts.lookup import StoredArtifact, choose_batch_sizes, require_lengths
from optpipe.workspace.runs import begin_run, finish_run, write_bytes
from optpipe.workspace.store import Store


def bench_pair(
    baseline: StoredArtifact,
    contender: StoredArtifact,
    plan: BenchPlan,
    rounds: int,
    metric: PairMetric,
    store: Store,
    listener: Listener,
) -> BenchPairRecord:
    """Measures the two in turn, each time in a fresh process, and writes the run with its comparison."""
    size = choose_batch_sizes(baseline, plan.batches)[0]
    choose_batch_sizes(contender, (size,))
    for each in (baseline, contender):
        require_lengths(each, plan.lengths)
    percent = float(metric[1:]) if metric.startswith("p") else 0.0
    load = replace(plan.load, batch_size=size, percentile=max(plan.load.percentile, percent))
    plan = replace(plan, limits={**plan.limits, **PAIR_LIMITS})
    for each in (baseline, contender):
        warn_about_threads(each, each.resolve_effective_options(plan.options), plan.affinity, listener)
    run = begin_run(store.workspace, "bench")
    done: list[Measurement] = []
    comparison = None
    with offer_recovery(run, listener), store.scratch("bench") as scratch, WorkerPool(scratch, plan.affinity) as pool:
        total = 2 * rounds
        with listener.step(f"{baseline.label} vs. {contender.label}, {total} processes", total=total) as step:
            try:
                sides = [
                    _prepare_side(artifact, plan, load, store, pool, scratch / name, run.path, step, done)
                    for name, artifact in (("a", baseline), ("b", contender))
                ]
                for each in (baseline, contender):
                    pool.expect(each.label, rounds * MAX_ROUND_FACTOR)
                comparison = run_interleaved(sides[0], sides[1], rounds, metric, randbits(32))
            except KeyboardInterrupt as interruption:  # between two processes
                done += recover_unfinished(run.path, done)
                if not done:
                    raise
                acknowledge_interrupt(interruption)
    write_measurements(run.path, done)
    if comparison is not None:
        write_bytes(run.path / COMPARISON_FILE, json_from_record(comparison))
    finished = finish_run(
        run, parents=[baseline.entry.id, contender.entry.id], status="complete" if comparison else "interrupted"
    )
    labels = [f"{each.entry.id} {each.label}" for each in (baseline, contender)]
    return BenchPairRecord(
        run_dir=str(finished.path),
        run_id=finished.run_id,
        baseline=labels[0],
        contender=labels[1],
        comparison=comparison,
        measurements=tuple(done),
        environment=finished.manifest.environment,
        exit_status=int(ExitStatus.DONE if comparison else ExitStatus.INTERRUPTED),
        interrupted=comparison is None,
    )


def _prepare_side(
    artifact: StoredArtifact,
    plan: BenchPlan,
    load: LoadSpec,
    store: Store,
    pool: WorkerPool,
    scratch: Path,
    directory: Path,
    step: ProgressStep,
    done: list[Measurement],
) -> Callable[[str], Measurement]:
    session, frame = prepare_session(
        artifact, plan, store, scratch, directory, plan.lengths[0] if plan.lengths else None
    )
    options = artifact.resolve_effective_options(plan.options)
    session = replace(session, arguments={**session.arguments, "options": options})

    def measured(name: str) -> Measurement:
        with WorkerProcess(session, pool, artifact.label) as worker:
            found = measure_load(worker, subject_from_artifact(artifact, options), load, name, frame)[0]
        found = replace(found, process=len(done))
        done.append(found)
        write_measurements(directory, done)  # a crash loses no process that ended
        step.advance()
        return found

    return measured
