"""`build --precision auto`: the fastest build within an accuracy budget, of every backend and precision available here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbits

from optpipe.backends.inductor import STATIC_BATCHES
from optpipe.build.build import BuildPlan, add_calibration, build_model, require_artifacts
from optpipe.build.decide import choose_budget, judge_builds, list_candidates, require_judgeable
from optpipe.build.records import BuildResult, BuiltArtifact, Omission, result_from_build
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus, MissingError
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.measurement import LoadSpec, Measurement
from optpipe.core.precision import CALIBRATED, Precision
from optpipe.core.quantity import format_duration
from optpipe.core.records import json_from_record
from optpipe.evaluate.tasks import require_fitting_task
from optpipe.measure.measure import BenchPlan, prepare_subject, write_measurements
from optpipe.measure.process import WorkerPool
from optpipe.measure.race import FINAL_ROUNDS, Race, count_processes, race_builds
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.models.artifacts.decisions import DECISION_FILE, Decision, LeftOut
from optpipe.models.artifacts.lookup import StoredArtifact, find_artifacts
from optpipe.models.export.exported import export_model, prepare_model, read_card
from optpipe.models.export.model import Model
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store


def plan_candidates(
    model: Model, plan: BuildPlan, stored: Entry[ModelInfo] | None, store: Store, listener: Listener
) -> tuple[BuildPlan, tuple[Omission, ...]]:
    """The plan with every backend and precision that can run here, and the omissions.

    Raises MissingError if a named backend cannot run here, or none can.
    """
    backends, omitted = [], []
    for backend in plan.backends:
        device = plan.device or backend.choose_device(None)
        if (reason := backend.find_obstacle(device, runs=True)) is None:
            backends.append(backend)
            continue
        if plan.named:
            raise MissingError(f"backend {backend.name} cannot be a candidate on this machine: {reason}")
        omitted.append(Omission(backend.name, "", reason, ExitStatus.MISSING))
    if not backends:
        reasons = "; ".join(f"{each.backend}: {each.reason}" for each in omitted)
        raise MissingError(f"--precision auto has no backend that builds and runs on this machine: {reasons}")
    known = {kind for each in backends for kind in each.precisions(each.choose_device(plan.device))}
    if Precision.FP8 in known and all(each.choose_device(plan.device) == "cpu" for each in backends):
        known.discard(Precision.FP8)
        omitted.append(Omission("", Precision.FP8, "made for GPUs; on a CPU it is never faster", ExitStatus.MISSING))
    wanted = replace(
        plan,
        backends=tuple(backends),
        precisions=tuple(kind for kind in plan.precisions or Precision if kind in known),
        named=False,
        automatic=False,
        budget=None,
    )
    try:
        return add_calibration(model, wanted, stored, store, listener), tuple(omitted)
    except BadInputError:
        if plan.calibration is not None:
            raise
    reason = "needs calibration data: --calibration PATH"
    omitted += [Omission("", kind, reason, ExitStatus.BAD_INPUT) for kind in CALIBRATED if kind in wanted.precisions]
    without = tuple(kind for kind in wanted.precisions if kind not in CALIBRATED)
    return replace(wanted, precisions=without), tuple(omitted)


def add_static_batches(plan: BuildPlan, card: ModelCard, sizes: Sequence[int]) -> BuildPlan:
    """`plan` with code for each of `sizes` alone, on a GPU, if a backend can compile it; given options take precedence."""
    options = dict(plan.options)
    for backend in plan.backends if card.batched else ():
        device = backend.choose_device(plan.device)
        if device == "cuda" and any(each.name == STATIC_BATCHES for each in backend.describe_options(device)):
            options[backend.name] = {STATIC_BATCHES: ",".join(map(str, sizes)), **options.get(backend.name, {})}
    return replace(plan, options=options)


SHORT_LOAD = LoadSpec(
    1, min_seconds=0.5, max_seconds=5.0, percentile=50.0, warm_up_seconds=0.3, max_warm_up_seconds=3.0,
    output_checks=4, cache_probes=2,
)  # fmt: skip
START_S = {"cpu": 4.0, "cuda": 10.0}
"""Estimated seconds until a process measures: imports, loading, on a GPU the capture of a CUDA graph."""
LOAD_S = 1.5
"""Estimated seconds of one short load."""


class CandidateTimer:
    """Starts a process for an artifact and gives its p50 latency in ns by batch size; keeps every measurement."""

    def __init__(
        self,
        artifacts: Mapping[str, StoredArtifact],
        run: OpenRun,
        store: Store,
        pool: WorkerPool,
        scratch: Path,
        step: ProgressStep,
    ) -> None:
        self._step, plan = step, BenchPlan(SHORT_LOAD)
        self._subjects = {
            name: prepare_subject(each, plan, store, pool, scratch / name, run.path) for name, each in artifacts.items()
        }
        self.measurements: list[Measurement] = []
        self.failures: dict[str, str] = {}
        self._processes = 0

    def expect(self, name: str, processes: int) -> None:
        self._subjects[name].expect(processes)

    def measure(self, name: str, sizes: Sequence[int]) -> dict[int, float]:
        """Measures in one new process. Sizes at which it fails, or gives wrong outputs, are missing."""
        subject, found = self._subjects[name], {}
        with subject.open() as worker:
            for size in sizes:
                load = replace(SHORT_LOAD, batch_size=size)
                one = subject.measure(worker, load, f"m{len(self.measurements):03}")
                if one.interrupted:
                    raise KeyboardInterrupt
                self.measurements.append(replace(one, process=self._processes))
                median = one.latency_ns.median if one.latency_ns else None  # the interval is over processes
                wrong = [each.message for each in one.reasons if each.code in WRONG_OUTPUTS]
                if median is not None and not wrong:  # noise counts: the order of processes is drawn
                    found[size] = median
                else:
                    reasons = wrong or [each.message for each in one.reasons if each.invalidates]
                    self.failures[name] = f"batch {size}: {reasons[0]}"
                if not worker.alive:
                    break
        self._processes += 1
        self._step.advance()
        return found


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    decision: Decision
    build: BuildResult
    run_dir: str
    exit_status: ExitStatus
    warnings: tuple[str, ...] = ()


def choose_build(
    model: Model,
    plan: BuildPlan,
    weights: str,
    store: Store,
    listener: Listener,
    batch_sizes: Sequence[int] | None = None,
    final_rounds: int = FINAL_ROUNDS,
) -> ChoiceResult:
    """Builds, judges and races every candidate, and writes the decision's run; all builds stay in the store.

    Without precisions in `plan` all are tried; its budget is by default a drop of accuracy if there are labels, otherwise an SNR.
    Compares at `batch_sizes` (default: the profile's `opt`); `final_rounds` counts the processes of the fastest few after the race.

    `weights` is the text of the option. Raises BadInputError before the export for a budget that cannot be judged or a batch size
    outside the profile; and the reasons if nothing could be built.
    """
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    require_fitting_task(model, stored)
    card, trained = read_card(model, stored), (stored.info.weights if stored else model.load().weights).trained
    require_judgeable(plan.budget, plan.images, card, trained=trained)
    sizes = _choose_sizes(card, batch_sizes)
    wanted, omitted = plan_candidates(model, plan, stored, store, listener)
    with listener.step("export"):
        exported, _ = export_model(model, store, listener, stored)
    card = card_from_file(exported.file(CARD))
    wanted = add_static_batches(wanted, card, sizes)
    budget, data, score = choose_budget(plan, exported, listener)
    _announce(wanted, sizes, final_rounds, listener)
    build = build_model(model, wanted, store, listener)
    require_artifacts(build)
    judged, judged_on = judge_builds(budget, data, model, build.artifacts, store, listener, truncate=plan.truncate)
    with open_run(store.workspace, "choose") as run:
        seed = randbits(32)
        races, failures = _race(
            [each.entry.id for each in judged if each.keeps_budget], sizes, final_rounds, seed, run, store, listener
        )
        decision = Decision(
            model=card.name,
            model_id=exported.id,
            budget=str(budget),
            judged_on=judged_on,
            batch_sizes=sizes,
            winners={size: race.winner for size, race in races.items() if race.winner},
            candidates=list_candidates(judged, races, failures, budget),
            left_out=tuple(
                LeftOut(each.backend, each.precision, each.reason, failed=failed)
                for failed, group in ((False, (*omitted, *build.skipped)), (True, build.failed))
                for each in group
            ),
            seed=seed,
            score=score,
        )
        write_bytes(run.path / DECISION_FILE, json_from_record(decision))
        finish_run(run, parents=[exported.id, *(each.entry.id for each in judged)], model=card.name)
    status = judge_status(decision, judged)
    return ChoiceResult(decision, result_from_build(build, weights, ()), str(run.path), status)


def _choose_sizes(card: ModelCard, wanted: Sequence[int] | None) -> tuple[int, ...]:
    low, usual, high = card.batch_range
    if outside := [size for size in wanted or () if not low <= size <= high]:
        wider = f"{min(low, *outside)}:{usual}:{max(high, *outside)}"
        raise BadInputError(
            f"--compare-at {outside[0]}: outside the profile {low}:{usual}:{high}; widen it with --batch {wider}"
        )
    return tuple(wanted or (usual,))


def _announce(plan: BuildPlan, sizes: Sequence[int], final_rounds: int, listener: Listener) -> None:
    known = [(each.choose_device(plan.device), each) for each in plan.backends]
    count = sum(kind in each.precisions(device) for device, each in known for kind in plan.precisions)
    processes = count_processes(count, final_rounds)
    start_s = max(START_S[device] for device, _ in known)
    seconds = processes * (start_s + len(sizes) * LOAD_S)
    listener.inform(
        f"auto: up to {count} builds, then at most {processes} processes to compare them, about {format_duration(seconds * 1e9)}"
        " or less if some are much slower"
    )


def _race(
    built: Sequence[str],
    sizes: Sequence[int],
    final_rounds: int,
    seed: int,
    run: OpenRun,
    store: Store,
    listener: Listener,
) -> tuple[dict[int, Race], dict[str, str]]:
    if not built:
        return {}, {}
    artifacts = {id: find_artifacts(id, store)[0] for id in built}
    total = count_processes(len(built), final_rounds)
    where = ", ".join(map(str, sizes))
    title = f"compare {len(built)} builds" if len(built) > 1 else "measure the only build within the budget"
    with (
        store.scratch("choose") as scratch,
        WorkerPool(scratch) as pool,
        listener.step(f"{title} at batch {where}", total=total) as step,
    ):
        timer = CandidateTimer(artifacts, run, store, pool, scratch, step)
        races = race_builds(list(artifacts), sizes, timer.measure, seed, final_rounds, timer.expect)
        write_measurements(run.path, timer.measurements)
    return races, timer.failures


def judge_status(decision: Decision, judged: Sequence[BuiltArtifact]) -> ExitStatus:
    """FAIL if nothing is within the budget, INCONCLUSIVE if more data may show that something is."""
    if decision.winners:
        return ExitStatus.DONE
    if any(each.keeps_budget for each in judged):
        return ExitStatus.STAGE_FAILED  # none could be measured
    open_ones = any(each.accuracy is not None and each.accuracy.keeps is None for each in judged)
    return ExitStatus.INCONCLUSIVE if open_ones else ExitStatus.FAIL
