"""`build --precision auto`: the fastest build within an accuracy budget, of every backend and precision available here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from secrets import randbits
from typing import TYPE_CHECKING

from optpipe.backends.base import Device
from optpipe.build.budget import choose_budget, judge_builds, require_judgeable
from optpipe.build.build import require_artifacts
from optpipe.build.candidates import (
    add_static_batches,
    order_cpu_builds,
    order_gpu_builds,
    plan_candidates,
)
from optpipe.build.combinations import require_sound_plan
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuildResult, BuiltArtifact, result_from_build
from optpipe.build.search import CandidateSearch
from optpipe.build.slowdowns import explain_hopeless
from optpipe.build.standings import list_candidates
from optpipe.core.card import ModelCard
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.load import LoadSpec
from optpipe.core.precision import Budget
from optpipe.core.records import json_from_record
from optpipe.core.wording import Argument
from optpipe.evaluate.tasks import require_fitting_task
from optpipe.measure.measure import (
    BenchPlan,
    TrialSubject,
    prepare_subject,
    write_measurements,
)
from optpipe.measure.process import WorkerPool
from optpipe.measure.race import FINAL_ROUNDS, Race, count_processes, race_builds
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.models.artifacts.decisions import DECISION_FILE, Decision
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.export.exported import Model, export_model, prepare_model, read_card
from optpipe.models.stored_card import read_stored_card
from optpipe.workspace.entry import Entry
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store

if TYPE_CHECKING:
    from optpipe.core.measurement import Measurement

SHORT_LOAD = LoadSpec(
    1, min_seconds=0.5, max_seconds=5.0, percentile=50.0, warm_up_seconds=0.3, max_warm_up_seconds=3.0,
    output_checks=4, cache_probes=2,
)  # fmt: skip


ON_GPU = (
    "torch", "torch.utils.flop_counter", "onnxruntime", "optpipe.backends.registry", "optpipe.kernels.operators",
    "optpipe.kernels.triton.gluon",
)  # fmt: skip
"""The processes of a race import these modules during the builds."""


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
    card = read_card(model, stored)
    weights_record = stored.info.weights if stored else model.load().weights
    require_judgeable(plan.budget, plan.images, card, trained=weights_record.trained)
    sizes = _choose_sizes(card, batch_sizes)
    wanted, omitted = plan_candidates(model, plan, stored, store, listener)
    require_sound_plan(wanted, listener)
    on_gpu = all(backend.choose_device(plan.device) == "cuda" for backend in wanted.backends)
    with store.scratch("choose") as scratch, WorkerPool(scratch) as pool:
        if on_gpu:
            pool.prepare(ON_GPU)
            wanted = replace(wanted, gpu_lock=scratch / "gpu.lock")
        with listener.step("export"):
            exported, _ = export_model(model, store, listener, stored)
        card = read_stored_card(exported)
        wanted = add_static_batches(wanted, card, sizes)

        budget, data, score = choose_budget(plan, exported, listener)
        judge = partial(
            judge_builds,
            budget,
            data,
            model,
            store=store,
            listener=listener,
            truncate=plan.truncate,
        )
        order_builds = order_gpu_builds if on_gpu else order_cpu_builds
        order = order_builds(wanted, named=plan.named, has_module=model.source.has_module)
        search = CandidateSearch(model, card, sizes, judge, store, listener, omitted)
        search.run(order)
        require_artifacts(search.build)

        decision, folder = _race_candidates(
            search, exported, budget, score, final_rounds, pool, device="cuda" if on_gpu else "cpu"
        )
    status = judge_status(decision, search.judged)
    return ChoiceResult(decision, result_from_build(search.build, weights, ()), folder, status)


def _race_candidates(
    search: CandidateSearch,
    exported: Entry[ModelInfo],
    budget: Budget,
    score: str,
    final_rounds: int,
    pool: WorkerPool,
    device: Device,
) -> tuple[Decision, str]:
    """Races the builds that stay within the accuracy budget and writes the run. Returns the decision and the folder of the run."""
    store = search.store
    with open_run(store.workspace, "choose") as run:
        seed = randbits(32)
        able = search.list_able()
        slowdowns = search.measure_slowdowns(able) if len(able) > 1 else {}
        hopeless = explain_hopeless(slowdowns, device)
        raced = [build.entry.id for build in able if build.entry.id not in hopeless]
        races, failures = _race(
            raced, search.sizes, final_rounds, seed, run, pool, store, search.listener
        )
        failures |= hopeless
        decision = Decision(
            model=search.card.name,
            model_id=exported.id,
            budget=str(budget),
            judged_on=search.judged_on,
            batch_sizes=search.sizes,
            winners={size: race.winner for size, race in races.items() if race.winner},
            candidates=list_candidates(search.judged, races, failures, budget, hopeless),
            left_out=(*search.omitted, *search.build.skipped),
            failed=tuple(search.build.failed),
            seed=seed,
            score=score,
        )
        write_bytes(run.path / DECISION_FILE, json_from_record(decision))
        parents = [exported.id, *(build.entry.id for build in search.judged)]
        finish_run(run, parents=parents, model=search.card.name)
    return decision, str(run.path)


def _choose_sizes(card: ModelCard, wanted: Sequence[int] | None) -> tuple[int, ...]:
    low, usual, high = card.batch_range
    if outside := [size for size in wanted or () if not low <= size <= high]:
        wider = (min(low, *outside), usual, max(high, *outside))
        raise BadInputError(
            f"outside the profile {low}:{usual}:{high}; widen it with " + Argument("batch", wider),
            argument=Argument("compare_at", outside[0]),
        )
    return tuple(wanted or (usual,))


def _race(
    built: Sequence[str],
    sizes: Sequence[int],
    final_rounds: int,
    seed: int,
    run: OpenRun,
    pool: WorkerPool,
    store: Store,
    listener: Listener,
) -> tuple[dict[int, Race], dict[str, str]]:
    """The races of the artifacts `built` by batch size, and why some have no time; `run` gets every measurement."""
    if not built:
        return {}, {}
    total = count_processes(len(built), final_rounds)
    where = ", ".join(map(str, sizes))
    title = (
        f"compare {len(built)} builds" if len(built) > 1 else "measure the only build in the race"
    )
    with listener.step(f"{title} at batch {where}", total=total) as step:
        subjects = {
            id: prepare_subject(
                find_artifacts(id, store)[0],
                BenchPlan(SHORT_LOAD),
                store,
                pool,
                pool.directory / id,
                run.path,
            )
            for id in built
        }
        track = _RaceTrack(subjects, step)
        races = race_builds(
            built,
            sizes,
            track.measure,
            seed,
            final_rounds,
            lambda id, more: subjects[id].expect(more),
        )
        write_measurements(run.path, track.measurements)
    return races, track.failures


@dataclass
class _RaceTrack:
    """Measures each build in new processes, and keeps what was measured."""

    subjects: Mapping[str, TrialSubject]
    """By artifact."""
    step: ProgressStep
    measurements: list["Measurement"] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a build has no time at a batch size, by artifact."""
    _processes: Iterator[int] = field(default_factory=count)

    def measure(self, id: str, wanted: Sequence[int]) -> dict[int, float]:
        """The p50 latency in ns of one new process by batch size, without sizes at which it fails or is wrong."""
        subject, process = self.subjects[id], next(self._processes)
        medians_ns: dict[int, float] = {}
        with subject.open() as worker:
            for size in wanted:
                load = replace(SHORT_LOAD, batch_size=size)
                measured = subject.measure(worker, load, f"m{len(self.measurements):03}")
                if measured.interrupted:
                    raise KeyboardInterrupt
                self.measurements.append(replace(measured, process=process))
                # the interval is over processes
                median = measured.latency_ns.median if measured.latency_ns else None
                wrong = [
                    reason.message for reason in measured.reasons if reason.code in WRONG_OUTPUTS
                ]
                # noise counts: the order of processes is drawn
                if median is not None and not wrong:
                    medians_ns[size] = median
                else:
                    reasons = wrong or [reason.message for reason in measured.invalid_reasons]
                    self.failures[id] = f"batch {size}: {reasons[0]}"
                if not worker.alive:
                    break
        self.step.advance()
        return medians_ns


def judge_status(decision: Decision, judged: Sequence[BuiltArtifact]) -> ExitStatus:
    """FAIL if nothing is within the budget, INCONCLUSIVE if more data may show that something is."""
    if decision.winners:
        return ExitStatus.DONE
    if any(candidate.keeps_budget for candidate in judged):
        return ExitStatus.STAGE_FAILED  # none could be measured
    open_ones = any(
        candidate.accuracy is not None and candidate.accuracy.keeps is None for candidate in judged
    )
    return ExitStatus.INCONCLUSIVE if open_ones else ExitStatus.FAIL
