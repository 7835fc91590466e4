"""Measures stored artifacts: batch sizes, scenarios, options, limits; writes one run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optpipe.artifacts.lookup import StoredArtifact, checked_batches
from optpipe.bench.int8_notes import with_int8_notes
from optpipe.bench.session_plan import (
    BenchPlan,
    prepared,
    recoverable,
    subject_of,
    warn_of_threads,
)
from optpipe.core.events import Listener
from optpipe.core.interrupts import taken
from optpipe.core.measurement import MEASUREMENTS_FILE, Measurement, Scenario
from optpipe.core.measurement_json import document_of
from optpipe.errors import ExitStatus, OptpipeError
from optpipe.measuring.measure import Load, cut_off, measure
from optpipe.measuring.process import Answer, WorkerProcess
from optpipe.measuring.rate import highest_rate
from optpipe.measuring.slo import (
    Slo,
    ran,
    shows_beyond,
    valid,
)
from optpipe.measuring.sweep import largest_inside, nearest, sweep
from optpipe.measuring.tune import (
    Trial,
    chosen,
    nearest_options,
    tune,
    tuning_record,
    tuning_sizes,
)
from optpipe.measuring.validity import WRONG_ANSWERS
from optpipe.workspace.environment import cores
from optpipe.workspace.manifest import command_line
from optpipe.workspace.runs import (
    OpenRun,
    Run,
    begin_run,
    finish_run,
    write_json,
)
from optpipe.workspace.store import Store

TUNING_FILE = "tuning.json"


@dataclass
class Bench:
    """A finished bench run."""

    run: Run
    measurements: tuple[Measurement, ...]
    limit: dict[str, Any] | None = None
    """Whether and by what the latency limit was met, per artifact; `met` is None where no valid measurement says."""
    tuning: tuple[dict[str, Any], ...] = ()
    interrupted: bool = False

    @property
    def status(self) -> ExitStatus:
        """INTERRUPTED; STAGE_FAILED where an artifact was refused or died, or nothing has a figure; FAIL for a wrong output
        or a limit that nothing meets, INCONCLUSIVE where that could not be judged."""
        codes = {reason.code for each in self.measurements for reason in each.reasons}
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        if codes & {"refused", "died"} or not any(ran(each) for each in self.measurements):
            return ExitStatus.STAGE_FAILED
        if codes & WRONG_ANSWERS:
            return ExitStatus.FAIL
        if self.limit is None or self.limit["met"]:
            return ExitStatus.DONE
        return ExitStatus.INCONCLUSIVE if self.limit["met"] is None else ExitStatus.FAIL


def bench(artifacts: Sequence[StoredArtifact], plan: BenchPlan, store: Store, listener: Listener) -> Bench:
    """Measures every artifact in turn and writes the run; one that fails is a row and does not stop the others.

    Raises BadInputError for a batch outside a profile or an option that an artifact's backend does not have, before anything
    is measured, and what the only artifact failed with.
    """
    sizes = {each.entry.id: checked_batches(each, plan.batches) for each in artifacts}
    for each in artifacts:
        each.options_in_force(plan.options)
    run = begin_run(store.workspace, "bench")
    with recoverable(run, listener):
        return _finished(artifacts, sizes, _Running(run, plan, store, listener))


def _finished(artifacts: Sequence[StoredArtifact], sizes: Mapping[str, Sequence[int]], bench_run: "_Running") -> Bench:
    """Measures, and writes what the run is finished by."""
    run, plan, store = bench_run.run, bench_run.plan, bench_run.store
    limits: list[dict[str, Any]] = []
    tunings: list[dict[str, Any]] = []
    with store.scratch("bench") as scratch:
        try:
            for artifact in artifacts:
                one = _Subject(artifact, bench_run, scratch / artifact.entry.id)
                one.measure_all(sizes[artifact.entry.id], limits, tunings)
                if bench_run.interrupted:
                    break
        except KeyboardInterrupt as interruption:  # between two measurements, or once more inside one
            bench_run.measurements += cut_off(run.path, bench_run.measurements)
            if not bench_run.measurements:
                raise
            taken(interruption)
            bench_run.interrupted = True
    found = with_int8_notes(bench_run.measurements, [each.entry for each in artifacts], store)
    if bench_run.refusals and not any(ran(each) for each in found):
        raise bench_run.refusals[0]
    write_json(run.path / MEASUREMENTS_FILE, document_of(found))
    if tunings:
        write_json(run.path / TUNING_FILE, {"schema": "optpipe.tuning", "schema_version": 1, "tuning": tunings})
    limit = None if plan.slo is None else limit_record(plan.slo, limits)
    finished = finish_run(
        run,
        command=command_line(),
        parents=[each.entry.id for each in artifacts],
        details={"limit": limit} if limit else {},
        status="interrupted" if bench_run.interrupted else "complete",
    )
    return Bench(finished, found, limit, tuple(tunings), bench_run.interrupted)


@dataclass
class _Running:
    """The run being written."""

    run: OpenRun
    plan: BenchPlan
    store: Store
    listener: Listener
    measurements: list[Measurement] = field(default_factory=list)
    refusals: list[OptpipeError] = field(default_factory=list)
    interrupted: bool = False
    trials: int = 0


class _Subject:
    """One artifact, its inputs on disk, and the worker that holds it loaded for as long as options stay the same."""

    def __init__(self, artifact: StoredArtifact, running: _Running, scratch: Path) -> None:
        self.artifact, self.running, self.scratch = artifact, running, scratch
        self.given = artifact.given(running.plan.options)
        self.defaults = artifact.options_in_force(running.plan.options)
        if not running.plan.tune:  # which tries numbers of threads
            warn_of_threads(artifact, self.defaults, running.plan.affinity, running.listener)
        self.plan_base, self.frame = prepared(artifact, running.plan, running.store, scratch, running.run.path)

    def measure_all(self, sizes: Sequence[int], limits: list[dict[str, Any]], tunings: list[dict[str, Any]]) -> None:
        """Tunes if asked, then sweeps or searches."""
        running, plan = self.running, self.running.plan
        options = dict.fromkeys(sizes, self.defaults)
        if plan.tune:
            trials = self._tuned(tuning_sizes(sizes))
            if running.interrupted:  # what was not tried cannot lose
                tunings.append(tuning_record(self.artifact.entry.id, self.artifact.label, trials, {}))
                return
            options = {size: dict(chosen(trials, size)) for size in tuning_sizes(sizes)}
            tunings.append(tuning_record(self.artifact.entry.id, self.artifact.label, trials, options))
        with _Workers(self) as workers:
            if plan.load.scenario is Scenario.SERVER and plan.slo is not None:
                self._search_rate(workers, sizes[0], options[sizes[0]], plan.slo, limits)
                return
            found = sweep(
                lambda size: self._one(workers, replace(plan.load, batch_size=size), nearest_options(options, size)),
                sizes,
                plan.slo,
                to_the_end=plan.to_the_end,
            )
        if plan.slo is not None:
            limits.append(limit_of(self.artifact, plan.slo, found, largest_inside(found, plan.slo)))

    def _search_rate(
        self, workers: "_Workers", size: int, options: Mapping[str, Any], slo: Slo, limits: list[dict[str, Any]]
    ) -> None:
        plan = self.running.plan
        quick = replace(plan.load, batch_size=size, scenario=Scenario.SINGLE_STREAM, percentile=50.0, min_seconds=1.0)
        first = self._one(workers, quick, options)
        if first.latency is None or first.interrupted:
            return
        found, best = highest_rate(
            lambda rate: self._one(workers, replace(plan.load, batch_size=size, rate_per_s=rate), options),
            first.latency.mean / 1e3,
            slo,
        )
        limits.append(limit_of(self.artifact, slo, found, best))

    def _tuned(self, sizes: Sequence[int]) -> tuple[Trial, ...]:
        quick = replace(
            self.running.plan.load,
            scenario=Scenario.SINGLE_STREAM, percentile=50.0, min_seconds=0.5, max_seconds=5.0,
            warm_up_seconds=0.3, max_warm_up_seconds=3.0, cache_probes=2, output_checks=4,
        )  # fmt: skip

        def measured(options: Mapping[str, Any]) -> tuple[Measurement, ...]:
            with _Workers(self) as workers:
                return tuple(
                    self._one(workers, replace(quick, batch_size=size), options, trial=True)
                    for size in sizes
                    if not self.running.interrupted
                )

        cpus = len(self.running.plan.affinity or ()) or cores()
        return tune(measured, self.defaults, cpus, fixed=self.given)

    def _one(self, workers: "_Workers", load: Load, options: Mapping[str, Any], *, trial: bool = False) -> Measurement:
        running = self.running
        if trial:
            running.trials += 1
            name = f"t{running.trials:03}"
        else:
            name = f"m{len(running.measurements):03}"
        subject = subject_of(self.artifact, options)
        worker = workers.with_options(options)
        kind = "tune " if trial else ""
        text = f"{kind}{self.artifact.label} batch {load.batch_size}" + (
            f" at {load.rate_per_s:.4g}/s" if load.rate_per_s else ""
        )
        with running.listener.step(text, total=load.wanted_samples) as step:
            shown = 0

            def progress(_point: object, count: int) -> None:
                nonlocal shown
                step.advance(max(0, min(count, load.wanted_samples) - shown))
                shown = max(shown, min(count, load.wanted_samples))

            worker.on_progress = progress
            found, answer = measure(worker, subject, load, name, self.frame)
        if not trial:
            running.measurements.append(found)
            write_json(running.run.path / MEASUREMENTS_FILE, document_of(tuple(running.measurements)))
        running.interrupted = running.interrupted or answer.interrupted
        _keep_refusal(running, answer)
        return found


class _Workers:
    """At most one worker at a time; another set of options, or a dead one, means a fresh process."""

    def __init__(self, subject: _Subject) -> None:
        self._subject = subject
        self._worker: WorkerProcess | None = None
        self._options: Mapping[str, Any] | None = None

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def with_options(self, options: Mapping[str, Any]) -> WorkerProcess:
        """A worker that holds the artifact with these options."""
        if self._worker is None or not self._worker.alive or dict(options) != self._options:
            self._close()
            base = self._subject.plan_base
            plan = replace(base, arguments={**base.arguments, "options": dict(options)})
            self._worker = WorkerProcess(plan, self._subject.scratch)
            self._worker.__enter__()
            self._options = dict(options)
        return self._worker

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.__exit__(None, None, None)
            self._worker = None


def limit_of(
    artifact: StoredArtifact, slo: Slo, found: Sequence[Measurement], best: Measurement | None
) -> dict[str, Any]:
    """What the measurements of one artifact say of the limit; `met` is None where no valid one decides it."""
    shown = best or nearest(found, slo)
    value = None if shown is None else slo.value(shown)
    not_judged = [
        {"batch_size": each.batch_size, "rate_per_s": each.offered_rate_per_s, "why": why}
        for each in found
        if (why := slo.why_not_judged(each)) is not None
    ]
    met: bool | None = None
    if best is not None and valid(best):
        met = True
    elif best is None and shown is not None and shows_beyond(shown) and not not_judged:
        met = False
    return {
        "artifact": artifact.entry.id,
        "label": artifact.label,
        "slo": str(slo),
        "met": met,
        "inside": best is not None,
        "measurement": None if shown is None else shown.id,
        "batch_size": None if shown is None else shown.batch_size,
        "rate_per_s": None if shown is None else shown.offered_rate_per_s,
        "value_ms": None if value is None else value[0],
        "upper_bound_ms": None if value is None else value[1],
        "verdict": None if shown is None else str(shown.verdict),
        "not_judged": not_judged,
    }


def limit_record(slo: Slo, limits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answers of all artifacts: met where one meets it, and not met only where none may."""
    answers = [each["met"] for each in limits]
    met = True if True in answers else None if None in answers or not answers else False
    return {"slo": str(slo), "met": met, "artifacts": list(limits)}


def _keep_refusal(running: _Running, answer: Answer) -> None:
    if answer.failure == "refused":
        error = OptpipeError(answer.message)
        error.exit_status = answer.status
        running.refusals.append(error)


def bench_record(result: Bench, warnings: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `optpipe bench`."""
    return {
        "run_dir": str(result.run.path),
        "run_id": result.run.run_id,
        "measurements": document_of(result.measurements)["measurements"],
        "environment": result.run.manifest["environment"],
        "limit": result.limit,
        "tuning": list(result.tuning),
        "interrupted": result.interrupted,
        "warnings": list(warnings),
        "exit_status": int(result.status),
    }
