"""The fastest build of a model that keeps an accuracy budget: build all candidates, judge them, race them, record why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from secrets import randbits

from optpipe.build.build import BuildPlan, build_model, require_artifacts
from optpipe.build.choose.accuracy import Judge, choose_judge, judge_accuracy
from optpipe.build.choose.candidates import (
    ChoicePlan,
    add_static_batches,
    count_builds,
    plan_candidates,
    rank_by_precision,
)
from optpipe.build.choose.decide import Judged, find_flaw, list_candidates
from optpipe.build.choose.measure import CandidateTimer, estimate_seconds
from optpipe.build.records import BuildResult, BuiltArtifact, ModelBuild, Omission, result_from_build
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.decision import DECISION_FILE, Decision, LeftOut
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.events import Listener
from optpipe.core.records import json_from_record
from optpipe.core.units import format_duration
from optpipe.evaluate.tasks.registry import require_fitting_task
from optpipe.measure.measure import write_measurements
from optpipe.measure.process import WorkerPool
from optpipe.measure.race import RaceResult, count_processes, race_builds
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.export.exported import export_model, prepare_model, read_card
from optpipe.models.export.model import Model
from optpipe.models.inputs.samples import can_verify_on
from optpipe.workspace.file_names import CARD
from optpipe.workspace.runs import OpenRun, finish_run, open_run, write_bytes
from optpipe.workspace.store import Store


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The JSON document of `optpipe build --precision auto`."""

    decision: Decision
    build: BuildResult
    """All that was built, as `optpipe build` tells of it."""
    run_dir: str
    exit_status: ExitStatus
    warnings: tuple[str, ...] = ()


def choose_build(model: Model, plan: ChoicePlan, weights: str, store: Store, listener: Listener) -> ChoiceResult:
    """Builds, judges and races every candidate, and writes the decision's run; all builds stay in the store.

    `weights` is how they were asked for. Raises BadInputError for a budget that cannot be judged or a batch size outside the
    profile, before anything is exported; and what says why nothing could be built.
    """
    store.require_writable()
    model, stored = prepare_model(model, store, listener)
    require_fitting_task(model, stored)
    sizes = _choose_sizes(read_card(model, stored), plan.batch_sizes)
    wanted, omitted = plan_candidates(model, plan.build, stored, store, listener)
    with listener.step("export"):
        exported, _ = export_model(model, store, listener, stored)
    card = card_from_file(exported.file(CARD))
    wanted = add_static_batches(wanted, card, sizes)
    judge = choose_judge(plan.budget, plan.build.images, exported, listener, truncate=plan.build.truncate)
    if judge.data is not None and not can_verify_on(card, judge.data):
        wanted = replace(
            wanted, images=None
        )  # labeled texts, or a set with a manifest: builds have inputs of their own
    _announce(wanted, sizes, plan.final_rounds, listener)
    build = build_model(model, wanted, store, listener)
    require_artifacts(build)
    judged, judged_on = _judge_all(judge, model, build, store, listener)
    with open_run(store.workspace, "choose") as run:
        seed = randbits(32)
        races, failures = _race(
            [each.built for each in judged if each.keeps], sizes, plan.final_rounds, seed, run, store, listener
        )
        decision = Decision(
            model=card.name,
            model_id=exported.id,
            budget=str(judge.budget),
            judged_on=judged_on,
            batch_sizes=sizes,
            winners={size: race.winner for size, race in races.items() if race.winner},
            candidates=list_candidates(judged, races, failures, judge.budget),
            left_out=tuple(_list_left_out(omitted, build)),
            seed=seed,
            score=judge.score,
        )
        write_bytes(run.path / DECISION_FILE, json_from_record(decision))
        finish_run(run, parents=[exported.id, *(each.id for each in judged)], model=card.name)
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
    count = count_builds(plan)
    processes = count_processes(count, final_rounds)
    on_gpu = any(each.choose_device(plan.device) == "cuda" for each in plan.backends)
    seconds = estimate_seconds(processes, len(sizes), "cuda" if on_gpu else "cpu")
    listener.inform(
        f"auto: up to {count} builds, then at most {processes} processes to compare them, about {format_duration(seconds * 1e9)}"
        " or less if some are much slower"
    )


def _judge_all(
    judge: Judge, model: Model, build: ModelBuild, store: Store, listener: Listener
) -> tuple[list[Judged], str]:
    """Every build with its accuracy, the more precise first; and what it was judged on."""
    whole = [each for each in build.artifacts if find_flaw(each) is None]
    accuracy, judged_on = judge_accuracy(judge, model, whole, store, listener) if whole else ({}, "nothing")
    ranked = sorted(build.artifacts, key=rank_by_precision)
    return [Judged(each, accuracy.get(each.entry.id)) for each in ranked], judged_on


def _race(
    built: Sequence[BuiltArtifact],
    sizes: Sequence[int],
    final_rounds: int,
    seed: int,
    run: OpenRun,
    store: Store,
    listener: Listener,
) -> tuple[dict[int, RaceResult], dict[str, str]]:
    """The race at each batch size, and why some have no time; nothing is measured where there is nobody."""
    if not built:
        return {}, {}
    artifacts = {each.entry.id: find_artifacts(each.entry.id, store)[0] for each in built}
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


def _list_left_out(omitted: Iterable[Omission], build: ModelBuild) -> Iterable[LeftOut]:
    for each in (*omitted, *build.skipped):
        yield LeftOut(each.backend, each.precision, each.reason, failed=False)
    for each in build.failed:
        yield LeftOut(each.backend, each.precision, each.reason, failed=True)


def judge_status(decision: Decision, judged: Sequence[Judged]) -> ExitStatus:
    """FAIL where nothing keeps the budget, INCONCLUSIVE where more data may show that something does."""
    if decision.winners:
        return ExitStatus.DONE
    if any(each.keeps for each in judged):
        return ExitStatus.STAGE_FAILED  # none could be measured
    open_ones = any(each.accuracy is not None and each.accuracy.keeps is None for each in judged)
    return ExitStatus.INCONCLUSIVE if open_ones else ExitStatus.FAIL
