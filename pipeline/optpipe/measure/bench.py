"""Measures stored artifacts: batch sizes, scenarios, options, limits; writes one run folder."""

from collections.abc import Mapping, Sequence

from optpipe.core.bench_record import ArtifactLimit, BenchRecord, LimitRecord, TuningFile, TuningRecord
from optpipe.core.defaults import MAX_PROCESS_FACTOR
from optpipe.core.errors import ExitStatus
from optpipe.core.events import Listener
from optpipe.core.interrupts import acknowledge_interrupt
from optpipe.core.measurement import Measurement
from optpipe.core.records import json_from_record
from optpipe.measure.groups import count_more_processes, group_processes, summarize_group
from optpipe.measure.int8_notes import add_int8_notes
from optpipe.measure.limit import combine_limits
from optpipe.measure.measure import recover_unfinished, write_measurements
from optpipe.measure.measured import RecordedMeasurement
from optpipe.measure.pool import WorkerPool
from optpipe.measure.session_plan import BenchPlan, offer_recovery
from optpipe.measure.slo import has_figures
from optpipe.measure.subject import BenchState, BenchSubject
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.models.artifacts.lookup import StoredArtifact, choose_batch_sizes, require_lengths
from optpipe.workspace.runs import Run, begin_run, finish_run, write_bytes
from optpipe.workspace.store import Store

TUNING_FILE = "tuning.json"


def choose_exit_status(
    measurements: Sequence[Measurement], limit: LimitRecord | None = None, *, interrupted: bool = False
) -> ExitStatus:
    """INTERRUPTED; STAGE_FAILED where an artifact was refused or died, or nothing has a figure; FAIL for a wrong output
    or a limit that nothing meets, INCONCLUSIVE where that could not be judged."""
    codes = {reason.code for each in measurements for reason in each.reasons}
    if interrupted:
        return ExitStatus.INTERRUPTED
    if codes & {"refused", "died"} or not any(has_figures(each) for each in measurements):
        return ExitStatus.STAGE_FAILED
    if codes & WRONG_OUTPUTS:
        return ExitStatus.FAIL
    if limit is None or limit.met:
        return ExitStatus.DONE
    return ExitStatus.INCONCLUSIVE if limit.met is None else ExitStatus.FAIL


def bench_artifacts(
    artifacts: Sequence[StoredArtifact], plan: BenchPlan, store: Store, listener: Listener
) -> BenchRecord:
    """Measures every artifact in turn and writes the run; one that fails is a row and does not stop the others.

    Raises BadInputError for a batch or length outside a profile or an option that an artifact's backend does not have, before anything
    is measured, and what the only artifact failed with.
    """
    sizes = {each.entry.id: choose_batch_sizes(each, plan.batches) for each in artifacts}
    for each in artifacts:
        require_lengths(each, plan.lengths)
        each.resolve_effective_options(plan.options)
    run = begin_run(store.workspace, "bench")
    with offer_recovery(run, listener), store.scratch("bench") as scratch, WorkerPool(scratch, plan.affinity) as pool:
        return _measure_and_finish(artifacts, sizes, BenchState(run, plan, store, listener, scratch, pool))


def _measure_and_finish(
    artifacts: Sequence[StoredArtifact], sizes: Mapping[str, Sequence[int]], bench_run: BenchState
) -> BenchRecord:
    """Measures, and writes what the run is finished by."""
    run, plan, store = bench_run.run, bench_run.plan, bench_run.store
    limits: list[ArtifactLimit] = []
    tunings: list[TuningRecord] = []
    try:
        subjects: list[BenchSubject] = []
        for artifact in artifacts:
            one = BenchSubject(artifact, bench_run)
            one.measure_all(sizes[artifact.entry.id], tunings)
            subjects.append(one)
            if bench_run.interrupted:
                break
        _repeat(subjects, bench_run)
        limits = [] if plan.slo is None else [each.judge_limit(plan.slo) for each in subjects if each.searched]
    except KeyboardInterrupt as interruption:  # between two measurements, or once more inside one
        bench_run.measurements += recover_unfinished(run.path, bench_run.measurements)
        if not bench_run.measurements:
            raise
        acknowledge_interrupt(interruption)
        bench_run.interrupted = True
    found = add_int8_notes(bench_run.measurements, [each.entry for each in artifacts], store)
    if bench_run.refusals and not any(has_figures(each) for each in found):
        raise bench_run.refusals[0]
    write_measurements(run.path, found)
    if tunings:
        write_bytes(run.path / TUNING_FILE, json_from_record(TuningFile(tuple(tunings))))
    limit = None if plan.slo is None else combine_limits(plan.slo, limits)
    finished = finish_run(
        run,
        parents=[each.entry.id for each in artifacts],
        status="interrupted" if bench_run.interrupted else "complete",
    )
    return record_from_run(finished, found, limit, tuple(tunings), interrupted=bench_run.interrupted)


def _repeat(subjects: Sequence[BenchSubject], running: BenchState) -> None:
    """The processes after the first, subjects in turn; more of them where an interval is to be reached, decided once."""
    plan = running.plan
    for subject in subjects:
        subject.expect(plan.processes - 1)
    for _ in range(1, plan.processes):
        for subject in subjects:
            subject.repeat()
    if plan.interval is None or running.interrupted:
        return
    groups = [group for subject in subjects for group in subject.list_groups()]
    more = max((count_more_processes(group, plan.interval) for group in groups), default=0)
    most = (MAX_PROCESS_FACTOR - 1) * plan.processes
    if more > most:
        running.listener.warn(f"--interval {plan.interval:.2%} needs {more} more processes; {most} are measured")
    for subject in subjects:
        subject.expect(min(more, most))
    for _ in range(min(more, most)):
        for subject in subjects:
            subject.repeat(second_stage=True)


def record_from_run(
    run: Run,
    measurements: tuple[Measurement, ...],
    limit: LimitRecord | None = None,
    tuning: tuple[TuningRecord, ...] = (),
    *,
    interrupted: bool = False,
) -> BenchRecord:
    """What a finished bench run says."""
    environment = run.manifest.environment
    groups = group_processes(RecordedMeasurement(each, run.run_id, environment) for each in measurements)
    return BenchRecord(
        run_dir=str(run.path),
        run_id=run.run_id,
        measurements=measurements,
        groups=tuple(summarize_group(group) for group in groups),
        environment=environment,
        exit_status=int(choose_exit_status(measurements, limit, interrupted=interrupted)),
        limit=limit,
        tuning=tuning,
        interrupted=interrupted,
    )
