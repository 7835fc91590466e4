"""Measures stored artifacts into one run folder, or finishes a run that was cut off."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import monotonic

from optpipe.backends.registry import warn_of_unused_options
from optpipe.core.errors import BadInputError, ExitStatus, OptpipeError, error_from_status
from optpipe.core.events import Listener
from optpipe.core.files import Files
from optpipe.core.load import LoadSpec, Scenario
from optpipe.core.measurement import MEASUREMENTS_FILE, Measurement, Reason, read_measurements
from optpipe.core.process import acknowledge_interrupt
from optpipe.core.quantity import format_duration
from optpipe.core.wording import Argument, Call
from optpipe.measure.figures import recorded_from_files
from optpipe.measure.groups import group_processes, merge_group, summarize_group
from optpipe.measure.measure import (
    BenchPlan,
    TrialSubject,
    describe_validity,
    measure_load,
    offer_recovery,
    prepare_subject,
    recover_unfinished,
    require_one_clock,
    warn_about_threads,
    write_measurements,
)
from optpipe.measure.pair import BenchRecord
from optpipe.measure.process import WorkerPool, WorkerProcess
from optpipe.measure.search import (
    ArtifactLimit,
    Slo,
    find_highest_rate,
    find_largest_inside,
    judge_limit,
    sweep_batch_sizes,
)
from optpipe.measure.validity import WRONG_OUTPUTS, explain_stop, find_repeated_cause
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.artifacts.profile_sizes import choose_batch_sizes, require_lengths
from optpipe.stats.percentiles import count_samples_needed
from optpipe.stats.ratio import Order
from optpipe.workspace.entry import MANIFEST, Run
from optpipe.workspace.runs import OpenRun, begin_run, finish_run
from optpipe.workspace.store import Store

MANY_LOADS = 20
"""So many take minutes."""
QUICK_PERCENTILE = 90
"""Needs a tenth of the samples of p99."""


@dataclass
class BenchState:
    run: OpenRun
    plan: BenchPlan
    store: Store
    listener: Listener
    scratch: Path
    """Folder for inputs on disk."""
    pool: WorkerPool
    measurements: list[Measurement] = field(default_factory=list)
    refusals: list[OptpipeError] = field(default_factory=list)
    interrupted: bool = False
    stopped: Reason | None = None
    """The cause on the machine that ended the run early."""
    processes: int = 0
    place: str = ""
    """Progress of the run: `process 2 of 5, about 40 s left: `."""


class BenchSubject:
    """One artifact, with its inputs on disk."""

    def __init__(self, artifact: StoredArtifact, running: BenchState) -> None:
        self.artifact, self.running = artifact, running
        self.searched: list[Measurement] = []
        self.best_rate: Measurement | None = None
        self.points: list[LoadSpec] = []
        """Loads of every process."""
        plan = running.plan
        self.defaults = artifact.resolve_effective_options(plan.options)
        warn_about_threads(artifact, self.defaults, plan.affinity, running.listener)
        self.trials: dict[int | None, TrialSubject] = {}
        for length in plan.lengths or (None,):
            scratch = running.scratch / artifact.entry.id / str(length)
            trial = prepare_subject(
                artifact, plan, running.store, running.pool, scratch, running.run.path, length
            )
            self.trials[trial.blank.load.length] = trial

    def measure_all(self, sizes: Sequence[int]) -> None:
        """Sweeps or searches in a first process, which determines the points of the others."""
        plan = self.running.plan
        with _Workers(self.running) as workers:
            if plan.load.scenario is Scenario.SERVER and plan.slo is not None:
                first = next(iter(self.trials))
                self._search_rate(
                    workers, replace(plan.load, batch_size=sizes[0], length=first), plan.slo
                )
                return
            for length in self.trials:
                self.searched += self._sweep(workers, sizes, length)
        self.points = [measurement.load for measurement in self.searched if measurement.latency_ns]

    def _sweep(
        self, workers: "_Workers", sizes: Sequence[int], length: int | None
    ) -> list[Measurement]:
        if self.running.interrupted:
            return []
        load, slo = replace(self.running.plan.load, length=length), self.running.plan.slo
        return sweep_batch_sizes(
            lambda size: self._measure_load(workers, replace(load, batch_size=size)), sizes, slo
        )

    def expect(self, times: int) -> None:
        """Prepares standby workers for `times` repetitions: one per length."""
        changes = sum(before.length != after.length for before, after in pairwise(self.points))
        self.running.pool.expect(self.artifact.label, times * (changes + 1) if self.points else 0)

    def repeat(self) -> None:
        """Measures every point in a fresh process."""
        with _Workers(self.running) as workers:
            for load in self.points:
                if not self.running.interrupted:
                    self._measure_load(workers, load)

    def judge_limit(self, slo: Slo) -> ArtifactLimit:
        """Judges the limit over all processes; a rate by the measurements at the rate that was found."""
        run = self.running.run
        own = [
            measurement
            for measurement in self.running.measurements
            if measurement.subject.artifact == self.artifact.entry.id
        ]
        groups = group_processes(
            recorded_from_files(measurement, run.name, Files(run.path)) for measurement in own
        )
        merged = {group.load.key: merge_group(group) for group in groups}
        judged = [merged.get(measurement.load.key, measurement) for measurement in self.searched]
        best = find_largest_inside(judged, slo)
        if self.best_rate is not None:
            best = merged[self.best_rate.load.key]
            best = best if slo.is_met_by(best) else None
        elif self.running.plan.load.scenario is Scenario.SERVER:
            best = None
        return judge_limit(self.artifact.entry.id, self.artifact.label, slo, judged, best)

    def _search_rate(self, workers: "_Workers", load: LoadSpec, slo: Slo) -> None:
        first = self._measure_load(
            workers,
            replace(load, scenario=Scenario.SINGLE_STREAM, percentile=50.0, min_seconds=1.0),
        )
        if first.latency_ns is None or first.interrupted:
            return
        service_s = first.latency_ns.mean / 1e9
        self.searched, self.best_rate = find_highest_rate(
            lambda rate: self._measure_load(workers, replace(load, rate_per_s=rate)), service_s, slo
        )
        self.points = [self.best_rate.load] if self.best_rate else []

    def _measure_load(self, workers: "_Workers", load: LoadSpec) -> Measurement:
        running = self.running
        subject = self.trials[load.length]
        worker = workers.take(subject)
        rate = f" at {load.rate_per_s:.4g}/s" if load.rate_per_s else ""
        text = f"{running.place}{self.artifact.label} {load.size}{rate}"
        name = f"m{len(running.measurements):03}"
        # time, not the number of samples, ends most loads: their share would promise an end that does not come
        with running.listener.step(text):
            measurement, answer = measure_load(worker, subject.blank, load, name, subject.directory)
        measurement = replace(measurement, process=running.processes)
        running.listener.inform(f"{text}: {describe_validity(measurement)}")
        running.measurements.append(measurement)
        write_measurements(running.run.path, running.measurements)
        running.interrupted = running.interrupted or answer.interrupted
        if answer.failure == "refused":
            running.refusals.append(error_from_status(answer.message, answer.status))
        return measurement


class _Workers(ExitStack):
    """At most one worker at a time; another length or a dead worker starts a fresh process."""

    def __init__(self, running: BenchState) -> None:
        super().__init__()
        self._running = running
        self._worker: WorkerProcess | None = None
        self._loaded: TrialSubject | None = None

    def take(self, subject: TrialSubject) -> WorkerProcess:
        if self._worker is None or not self._worker.alive or subject != self._loaded:
            self.close()
            self._worker, self._loaded = self.enter_context(subject.open()), subject
            self._running.processes += 1
        return self._worker


def choose_exit_status(
    measurements: Sequence[Measurement],
    limits: Sequence[ArtifactLimit] = (),
    *,
    interrupted: bool = False,
) -> ExitStatus:
    """STAGE_FAILED if an artifact was refused or died, or nothing has a figure; FAIL for a wrong output or an unmet limit.

    A limit is met if one artifact meets it, and not met only if none may.
    """
    codes = {reason.code for measurement in measurements for reason in measurement.reasons}
    if interrupted:
        return ExitStatus.INTERRUPTED
    if codes & {"refused", "died"} or not any(
        measurement.latency_ns for measurement in measurements
    ):
        return ExitStatus.STAGE_FAILED
    if codes & WRONG_OUTPUTS:
        return ExitStatus.FAIL
    answers = [limit.met for limit in limits]
    if not answers or True in answers:
        return ExitStatus.DONE
    return ExitStatus.INCONCLUSIVE if None in answers else ExitStatus.FAIL


def _tell_loads(points: int, plan: BenchPlan, listener: Listener) -> None:
    """Says what a sweep of the whole profile takes, which a short minimum time alone does not make short."""
    count = points * len(plan.lengths or (None,)) * plan.processes
    if count < MANY_LOADS:
        return
    percent = plan.load.percentile
    needed = count_samples_needed(percent)
    shorter = Argument("max_time", 1) + " ends each after a second"
    if percent > QUICK_PERCENTILE:
        quick = count_samples_needed(QUICK_PERCENTILE)
        shorter = Argument("percentile", QUICK_PERCENTILE) + f" waits for {quick} samples instead"
    listener.inform(
        f"{count} loads (every batch size of the profile, {plan.processes} processes), each until p{percent:g} has its "
        f"{needed:,} samples, at most {plan.load.max_seconds:g} s; "
        + Argument("batch", 1)
        + " measures one size, and "
        + shorter
    )


def bench_artifacts(
    artifacts: Sequence[StoredArtifact], plan: BenchPlan, store: Store, listener: Listener
) -> BenchRecord:
    """Measures every artifact in turn and writes the run; a failing artifact is a row and does not stop the others.

    Raises BadInputError for a batch or length outside a profile, or an unknown backend option, before anything is
    measured; otherwise the failure of the only artifact.
    """
    sizes = {
        artifact.entry.id: choose_batch_sizes(artifact, plan.batches) for artifact in artifacts
    }
    measured = {artifact.entry.info.backend for artifact in artifacts}
    warn_of_unused_options(plan.options, measured, "measured", listener)
    for artifact in artifacts:
        require_lengths(artifact, plan.lengths)
        artifact.resolve_effective_options(plan.options)
    if plan.batches is None and plan.slo is None:
        _tell_loads(sum(map(len, sizes.values())), plan, listener)
    run = begin_run(store.workspace, "bench")
    with (
        offer_recovery(run, listener),
        store.scratch("bench") as scratch,
        WorkerPool(scratch, plan.affinity) as pool,
    ):
        bench_run = BenchState(run, plan, store, listener, scratch, pool)
        limits: list[ArtifactLimit] = []
        try:
            limits = _measure_artifacts(artifacts, sizes, bench_run)
        except KeyboardInterrupt as interruption:  # between two measurements, or again within one
            bench_run.measurements += recover_unfinished(run.path, bench_run.measurements)
            if not bench_run.measurements:
                raise
            acknowledge_interrupt(interruption)
            bench_run.interrupted = True
        return _finish_bench(bench_run, artifacts, limits)


def _measure_artifacts(
    artifacts: Sequence[StoredArtifact], sizes: Mapping[str, Sequence[int]], running: BenchState
) -> list[ArtifactLimit]:
    """Measures every artifact in all processes. Returns how they meet the plan's limit, if it has one."""
    plan = running.plan
    subjects: list[BenchSubject] = []
    running.place = f"process 1 of {plan.processes}: " if plan.processes > 1 else ""
    for artifact in artifacts:
        subject = BenchSubject(artifact, running)
        subject.measure_all(sizes[artifact.entry.id])
        subjects.append(subject)
        if running.interrupted:
            break
    _repeat(subjects, running)
    if plan.slo is None:
        return []
    return [subject.judge_limit(plan.slo) for subject in subjects if subject.searched]


def _finish_bench(
    running: BenchState, artifacts: Sequence[StoredArtifact], limits: Sequence[ArtifactLimit]
) -> BenchRecord:
    """Writes the run. Raises the first refusal if nothing was measured."""
    measurements = tuple(running.measurements)
    if running.refusals and not any(measurement.latency_ns for measurement in measurements):
        raise running.refusals[0]
    write_measurements(running.run.path, measurements)
    require_one_clock(running.run.path, measurements)
    finished = finish_run(
        running.run,
        parents=[artifact.entry.id for artifact in artifacts],
        status="interrupted" if running.interrupted else "complete",
    )
    record = record_from_run(finished, measurements, tuple(limits), interrupted=running.interrupted)
    return replace(record, stopped=running.stopped)


def _repeat(subjects: Sequence[BenchSubject], running: BenchState) -> None:
    """Runs the other processes in rounds over all subjects."""
    plan, order = running.plan, Order(running.plan.seed)
    running.place = f"process 2 of {plan.processes}: "
    for subject in subjects:
        subject.expect(plan.processes - 1)
    for done in range(1, plan.processes):
        cause, left = find_repeated_cause(running.measurements), plan.processes - done
        if cause is not None and left > 1 and not plan.keep_going and not running.interrupted:
            running.stopped = cause
            running.listener.warn(
                explain_stop(
                    f"process {done} of {plan.processes}"
                    + (" of each build" if len(subjects) > 1 else ""),
                    cause,
                    turns=Call("bench", "A", against="B", turns=True),
                    anyway=Call(
                        "bench", "MODEL", keep_going=Argument("keep_going", True, setting=True)
                    ),
                )
            )
            return
        begun = monotonic()
        for subject in order.draw(subjects):
            subject.repeat()
        remaining = format_duration((left - 1) * (monotonic() - begun) * 1e9)
        running.place = f"process {done + 2} of {plan.processes}, about {remaining} left: "


def record_from_run(
    run: Run,
    measured: tuple[Measurement, ...],
    limits: tuple[ArtifactLimit, ...] = (),
    *,
    interrupted: bool = False,
) -> BenchRecord:
    environment = run.manifest.environment
    groups = group_processes(
        recorded_from_files(measurement, run.name, run.files, environment)
        for measurement in measured
    )
    return BenchRecord(
        run_dir=str(run.path),
        run_id=run.name,
        measurements=measured,
        groups=tuple(map(summarize_group, groups)),
        environment=environment,
        exit_status=int(choose_exit_status(measured, limits, interrupted=interrupted)),
        limits=limits,
        interrupted=interrupted,
    )


def recover_run(directory: Path) -> BenchRecord:
    """Finishes the cut-off run in `directory`, marked as interrupted, and summarizes its measurements.

    Raises BadInputError for anything but the folder of a bench run that was cut off.
    """
    if (directory / MANIFEST).exists() or not (directory / "samples").is_dir():
        what = (
            "is already finished"
            if (directory / MANIFEST).exists()
            else "is not an interrupted bench run"
        )
        raise BadInputError(f"{directory} {what}; specify a run folder without {MANIFEST}")
    done = (
        list(read_measurements(Files(directory)))
        if (directory / MEASUREMENTS_FILE).exists()
        else []
    )
    done += recover_unfinished(directory, done)
    if not done:
        raise BadInputError(f"{directory} was interrupted before anything was measured; delete it")
    write_measurements(directory, done)
    require_one_clock(directory, done)
    parents = list(dict.fromkeys(measurement.subject.artifact for measurement in done))
    run = finish_run(
        OpenRun(directory, "bench", done[0].started_utc), parents=parents, status="interrupted"
    )
    return record_from_run(run, tuple(done), interrupted=True)
