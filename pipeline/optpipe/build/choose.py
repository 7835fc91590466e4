"""`build --precision auto`: the fastest build within an accuracy budget, of every backend and precision available here."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from secrets import randbits
from statistics import median
from time import perf_counter

from optpipe.backends.base import Backend, Binding
from optpipe.backends.inductor import STATIC_BATCHES
from optpipe.backends.registry import BACKENDS, list_precisions
from optpipe.build.build import (
    BuildPlan,
    add_calibration,
    build_model,
    require_artifacts,
    require_sound_plan,
)
from optpipe.build.records import BuildResult, BuiltArtifact, result_from_build
from optpipe.core import np, torch
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError, ExitStatus, MissingError
from optpipe.core.events import Listener
from optpipe.core.measurement import LoadSpec, Measurement
from optpipe.core.precision import CALIBRATED, Budget, Precision
from optpipe.core.quantity import format_snr
from optpipe.core.records import json_from_record
from optpipe.core.wording import Argument
from optpipe.evaluate.evaluate import run_evaluation
from optpipe.evaluate.recompute import recompute_accuracy
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.tasks import TASKS, require_fitting_task
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.measure.int8_notes import BUDGET
from optpipe.measure.measure import BenchPlan, prepare_subject, write_measurements
from optpipe.measure.process import WorkerPool
from optpipe.measure.race import FINAL_ROUNDS, Race, count_processes, race_builds
from optpipe.measure.validity import WRONG_OUTPUTS
from optpipe.models.artifacts.decisions import (
    DECISION_FILE,
    Candidate,
    CandidateAccuracy,
    CandidateTimes,
    Decision,
    Omission,
    Standing,
)
from optpipe.models.artifacts.lookup import find_artifacts
from optpipe.models.export.exported import Model, export_model, prepare_model, read_card
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.models.stored_card import read_stored_card
from optpipe.stats.paired import CONFIDENCE
from optpipe.stats.ratio import Change
from optpipe.workspace.entry import Entry, Run, load_run
from optpipe.workspace.files import write_bytes
from optpipe.workspace.runs import OpenRun, finish_run, open_run
from optpipe.workspace.store import Store


def find_flaw(built: BuiltArtifact) -> str | None:
    """Why a build cannot be a candidate with any budget: it does not run here, or is not what was requested."""
    if built.why_not is not None:
        return built.why_not
    verified = built.verification
    if built.shortfall is not None:
        return built.shortfall
    if verified is not None and verified.info.passed is False:
        boxes = verified.info.box_agreement
        found = (
            f"SNR {format_snr(verified.info.snr_db or 0)}"
            if boxes is None
            else f"{boxes:.1%} of the boxes agree"
        )
        return f"outputs differ from the source model's: {found}"
    return None


HOPELESS = 1.25
"""A build that takes this many times as long as the fastest, each for a moment in this process, is not raced."""


def measure_slowdowns(
    built: Sequence[BuiltArtifact],
    sizes: Sequence[int],
    card: ModelCard,
    times: dict[str, list[float]],
) -> dict[str, float]:
    """The time of each build on a GPU over that of the fastest, in this process, at the batch size at which it does best.

    Builds in `times` are not timed again; the others are added to it.
    """
    for each in built:
        info = each.entry.info
        if each.entry.id in times:
            continue
        with (
            suppress(Exception),
            BACKENDS[info.backend].load(each.entry.path, info, {}) as session,
        ):  # a race tells why
            found = []
            for size in sizes:
                inputs = (
                    card.with_profile((size, size, size), {}).inputs
                    if card.batched
                    else card.inputs
                )
                binding = session.bind({one.name: np.ones(one.opt, one.dtype) for one in inputs})
                found.append(_time_launches(binding))
            times[each.entry.id] = found
    own = {each.entry.id: times[each.entry.id] for each in built if each.entry.id in times}
    least = [min(found) for found in zip(*own.values(), strict=True)]
    return {
        id: min(mine / best for mine, best in zip(found, least, strict=True))
        for id, found in own.items()
    }


def explain_hopeless(slowdowns: Mapping[str, float]) -> dict[str, str]:
    """Builds that cannot win, and why; in a race each would start several processes of many seconds."""
    hopeless = {id: each for id, each in slowdowns.items() if each > HOPELESS}
    return {
        id: f"{each:.1f} times the time of the fastest in one process"
        for id, each in hopeless.items()
    }


def rule_out_backend(
    backend: Backend, built: Sequence[BuiltArtifact], slowdowns: Mapping[str, float]
) -> str | None:
    """Why none of a backend's other builds can win, by its TF32 build in `built`; None if one may, or nothing was measured."""
    own = [
        slowdowns.get(each.entry.id, 0.0)
        for each in built
        if each.entry.info.backend == backend.name
    ]
    gain = backend.speed_bounds("cuda").gain_over_tf32
    if max(own, default=0.0) <= gain * HOPELESS:
        return None
    return (
        f"its tf32 build takes {max(own):.1f} times the time of the fastest build in one process, "
        f"and its others are at most {gain} times as fast as that one"
    )


def _time_launches(binding: Binding) -> float:
    """The median time of ten launches over 0.3 s."""
    found, ends = list[float](), perf_counter() + 0.3
    while perf_counter() < ends:
        begun = perf_counter()
        for _ in range(10):
            binding.launch()
        torch.cuda.synchronize()
        found.append(perf_counter() - begun)
    return median(found)


def list_candidates(
    judged: Sequence[BuiltArtifact],
    races: Mapping[int, Race],
    failures: Mapping[str, str],
    budget: Budget,
    hopeless: Collection[str] = (),
) -> tuple[Candidate, ...]:
    """Winners first, then by time at the first batch size; then those without a time, in the given order."""
    infos = {each.entry.id: each.entry.info for each in judged}
    found = []
    for each in judged:
        id, info = each.entry.id, each.entry.info
        standing, reason = _explain(each, races, failures, infos, budget)
        standing = Standing.DROPPED if id in hopeless else standing
        times = []
        for size, race in races.items():
            if id in race.times and ((own := race.times[id]).race or own.final):
                slowdown = None if id == race.winner else race.compute_slowdown(id)
                times.append(
                    CandidateTimes(
                        size, tuple(own.race), tuple(own.final), race.ratios.get(id), slowdown
                    )
                )
        found.append(
            Candidate(
                id,
                info.backend,
                info.precision,
                info.device,
                standing,
                reason,
                each.accuracy,
                tuple(times),
            )
        )

    def rank(each: Candidate) -> tuple[int, float]:
        slowdown = each.times[0].slowdown if each.times else None
        return _ORDER.index(each.standing), 1.0 if slowdown is None else slowdown

    return tuple(sorted(found, key=rank))


_ORDER = (
    Standing.CHOSEN, Standing.NO_DIFFERENCE, Standing.SLOWER, Standing.DROPPED, Standing.NOT_SHOWN,
    Standing.OVER_BUDGET, Standing.NOT_PROVEN, Standing.FAILED,
)  # fmt: skip


def _explain(
    judged: BuiltArtifact,
    races: Mapping[int, Race],
    failures: Mapping[str, str],
    infos: Mapping[str, ArtifactInfo],
    budget: Budget,
) -> tuple[Standing, str]:
    accuracy, id = judged.accuracy, judged.entry.id
    if accuracy is None:
        return Standing.NOT_PROVEN, find_flaw(judged) or ""
    if not accuracy.keeps:
        standing = Standing.NOT_SHOWN if accuracy.keeps is None else Standing.OVER_BUDGET
        return standing, _explain_accuracy(accuracy, budget)
    won = [size for size, race in races.items() if race.winner == id]
    if won:
        return Standing.CHOSEN, "; ".join(_explain_lead(size, races[size], infos) for size in won)
    behind = [
        (size, race)
        for size, race in races.items()
        if id in race.times and race.compute_slowdown(id) is not None
    ]
    if not behind:
        return Standing.FAILED, failures.get(id, "no batch size could be measured")
    changes = {race.ratios[id].change if id in race.ratios else None for _, race in behind}
    reason = "; ".join(_explain_lag(size, race, id) for size, race in behind)
    if changes == {Change.SLOWER}:
        return Standing.SLOWER, reason
    return (Standing.NO_DIFFERENCE if Change.NO_DIFFERENCE in changes else Standing.DROPPED), reason


def _explain_accuracy(accuracy: CandidateAccuracy, budget: Budget) -> str:
    if budget.unit == "dB" and accuracy.keeps is None:
        return "its outputs are compared as boxes, which have no SNR: judge it on annotated images (--data)"
    if budget.unit == "dB":
        return f"SNR {accuracy.snr_db or 0:.1f} dB is below {budget}"
    if accuracy.drop_ci is None:
        return "its accuracy could not be measured"
    low, high = (100 * each for each in accuracy.drop_ci)
    exceeds = "exceeds" if accuracy.keeps is False else "may exceed"
    share = accuracy.calibrated_share
    hidden = (
        f", which the {share:.1%} of samples used for calibration may understate," if share else ""
    )
    return f"drop of {low:+.2f} to {high:+.2f} points{hidden} {exceeds} {budget}"


def _explain_lead(size: int, race: Race, infos: Mapping[str, ArtifactInfo]) -> str:
    """The winner's lead over the best slower build, and over those that the race cannot distinguish from it."""
    if not race.ratios:
        alone = "in the race" if len(race.times) == 1 else "with a time in every round"
        return f"batch {size}: the only build {alone}"
    equal = {
        name: ratio for name, ratio in race.ratios.items() if ratio.change is Change.NO_DIFFERENCE
    }
    slower = {name: ratio for name, ratio in race.ratios.items() if name not in equal}
    nearest = sorted(slower, key=lambda name: slower[name].value)[:1]
    said = [f"{slower[name]} times as fast as {infos[name].label}" for name in nearest]
    said += [
        f"as fast as {infos[name].label} within the error, {ratio} times"
        for name, ratio in equal.items()
    ]
    own = infos[race.winner].precision if race.winner else None
    preferred = {
        "more precise" if infos[name].precision != own else "first in --backend auto's order"
        for name in equal
    }
    tie = f"; preferred as {' and '.join(sorted(preferred, reverse=True))}" if preferred else ""
    return f"batch {size}: " + ", ".join(said) + tie


def _explain_lag(size: int, race: Race, artifact: str) -> str:
    ratio, rounds = race.ratios.get(artifact), len(race.times[artifact].race)
    if ratio is not None:
        doubt = "" if ratio.change is Change.SLOWER else ", within the error"
        return f"batch {size}: {ratio} times the winner's time{doubt}"
    known = f"{race.compute_slowdown(artifact):.2f} times the winner's time"
    rounded = f"{rounds} round{'s' if rounds > 1 else ''}"
    return f"batch {size}: dropped after {rounded} at {known}, too few for an interval"


WIDE = (Precision.FP32, Precision.TF32, Precision.BF16)
"""On Tensor Cores none computes faster than FP16. On one H100 ResNet-50 in FP32 and TF32 took 170 s of `auto` at batch 64."""
SNR_FLOOR = Budget(30.0, "dB")
"""Used if accuracy cannot be judged: the outputs' error is about 3% of them."""


def require_judgeable(
    budget: Budget | None, images: Path | None, card: ModelCard, *, trained: bool
) -> tuple[Path | None, str | None]:
    """The labeled data for a drop of accuracy, or why there are none, before they are read.

    Raises BadInputError for a budget in points if no drop can be measured.
    """
    given = images or (Path(card.data["validation"]) if "validation" in card.data else None)
    obstacle = None
    if card.task not in TASKS:
        obstacle = f"{card.name} has no task that can be evaluated (task: {card.task})"
    elif not trained:
        obstacle = "the weights are random"
    elif given is None:
        obstacle = "no labeled data was given (--data PATH)"
    if obstacle is not None:
        _require_snr(budget, obstacle)
    return given, obstacle


def _require_snr(budget: Budget | None, obstacle: str) -> None:
    if budget is not None and budget.unit != "dB":
        raise BadInputError(
            Argument("budget", budget)
            + f" cannot be judged: {obstacle}; give a minimum SNR of the outputs: "
            + Argument("budget", "30dB")
        )


def choose_budget(
    plan: BuildPlan, exported: Entry[ModelInfo], listener: Listener
) -> tuple[Budget, Path | None, str]:
    """The given budget, or by default a drop of BUDGET with labels and trained weights, otherwise SNR_FLOOR.

    Also the labeled samples and the score that drops; None and empty if the budget is an SNR.

    Raises BadInputError for a drop in points that cannot be measured.
    """
    budget = plan.budget
    if budget is not None and budget.unit == "dB":
        return budget, None, ""
    card = read_stored_card(exported)
    data, obstacle = require_judgeable(
        budget, plan.images, card, trained=exported.info.weights.trained
    )
    if data is not None and obstacle is None:
        samples, _ = load_sample_set(
            exported, card, data, None, 0, listener, truncate=plan.truncate
        )
        task = TASKS[card.task]
        truths = task.read_truths(samples, card, task.count_classes(card))
        if truths is not None or any(each.label is not None for each in samples.files):
            return budget or Budget(100 * BUDGET, "points"), data, task.score
        obstacle = f"{data} has no labels"
        _require_snr(budget, obstacle)
    listener.inform(f"budget: SNR of {SNR_FLOOR} or more, because {obstacle}")
    return SNR_FLOOR, None, ""


def judge_builds(
    budget: Budget,
    data: Path | None,
    model: Model,
    built: Sequence[BuiltArtifact],
    store: Store,
    listener: Listener,
    *,
    truncate: bool,
) -> tuple[list[BuiltArtifact], str]:
    """Every build with its accuracy, the more precise first; and a description of the data."""
    accuracy, judged_on = dict[str, CandidateAccuracy](), "nothing"
    whole = [each for each in built if find_flaw(each) is None]
    if whole and data is not None:
        entries = [each.entry for each in whole]
        found = run_evaluation(
            model,
            data,
            None,
            0,
            budget.limit / 100,
            store,
            listener,
            only=entries,
            truncate=truncate,
        )
        run, task = load_run(Path(found.run_dir)), TASKS[Task(found.task)]
        accuracy = {
            row.artifact: _judge_drop(row, budget, run, task, len(entries))
            for row in found.results
            if row.artifact
        }
        judged_on = f"{found.dataset.describe()} of {found.dataset.name}"
    elif whole:
        for each in whole:
            known = each.verification.info if each.verification else None
            snr = known.snr_db if known else -inf
            keeps = (
                None
                if known and known.box_agreement is not None
                else snr is None or snr >= budget.limit
            )
            accuracy[each.entry.id] = CandidateAccuracy(
                keeps=keeps, snr_db=-inf if keeps is None else snr
            )
        judged_on = f"{next((each.verification.info.samples for each in whole if each.verification), 0)} samples"

    def rank(each: BuiltArtifact) -> tuple[int, int]:  # between equally fast builds the first wins
        return list(Precision).index(each.entry.info.precision), list(BACKENDS).index(
            each.entry.info.backend
        )

    return [
        replace(each, accuracy=accuracy.get(each.entry.id)) for each in sorted(built, key=rank)
    ], judged_on


def _judge_drop(
    row: EvaluatedModel, budget: Budget, run: Run, task: TaskContract, builds: int
) -> CandidateAccuracy:
    """By the interval of the drop that holds for all `builds` together, since one of them is chosen by it (Bonferroni)."""
    share = row.calibrated_on / max(row.samples, 1)
    confidence = 1 - (1 - CONFIDENCE) / builds
    figures = recompute_accuracy(run, row.artifact, confidence) if row.drop_ci else {}
    seen = figures.get("drop")
    if seen is None or seen.low is None or seen.high is None:
        return CandidateAccuracy(None, snr_db=row.snr_db, calibrated_share=share)
    limit, keeps = budget.limit / 100, None
    if seen.high + task.bound_hidden_loss(row) <= limit:
        keeps = True
    elif seen.low > limit:
        keeps = False
    interval = seen.low, seen.high
    return CandidateAccuracy(keeps, float(seen.value), interval, row.snr_db, share)


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
            raise MissingError(
                f"backend {backend.name} cannot be a candidate on this machine: {reason}"
            )
        omitted.append(Omission(backend.name, "", reason, ExitStatus.MISSING))
    if not backends:
        reasons = "; ".join(f"{each.backend}: {each.reason}" for each in omitted)
        raise MissingError(
            Argument("precision", "auto")
            + f" has no backend that builds and runs on this machine: {reasons}"
        )
    known = {kind for each in backends for kind in list_precisions(each, plan.device)}
    if Precision.FP8 in known and all(
        each.choose_device(plan.device) == "cpu" for each in backends
    ):
        known.discard(Precision.FP8)
        omitted.append(
            Omission(
                "", Precision.FP8, "made for GPUs; on a CPU it is never faster", ExitStatus.MISSING
            )
        )
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
    omitted += [
        Omission("", kind, reason, ExitStatus.BAD_INPUT)
        for kind in CALIBRATED
        if kind in wanted.precisions
    ]
    without = tuple(kind for kind in wanted.precisions if kind not in CALIBRATED)
    return replace(wanted, precisions=without), tuple(omitted)


def split_plan(
    plan: BuildPlan, *, named: bool, has_module: bool
) -> tuple[BuildPlan, dict[str, tuple[BuildPlan, tuple[Omission, ...]]], list[BuildPlan]]:
    """The builds that `auto` makes first on a GPU; by backend those that it omits if an FP16 build of it is within the budget; and those
    that it omits if the backend's TF32 is too slow for them to win, one plan per backend.

    The empty name stands for any backend. If the user named the backends, all are built first.
    """
    wide = tuple(
        each for each in plan.precisions if each in WIDE and Precision.FP16 in plan.precisions
    )
    names = {each.name for each in plan.backends}
    bounds = {each.name: each.speed_bounds("cuda") for each in plan.backends}
    eager = (
        [] if named else [each for each in plan.backends if bounds[each.name].compiled_by in names]
    )
    able = [
        each
        for each in plan.backends
        if each not in eager and (has_module or not each.needs_module)
    ]
    bounded = [
        each
        for each in able
        if bounds[each.name].gain_over_tf32 < inf and Precision.TF32 in wide and not named
    ]
    bounded = [] if len(bounded) == len(able) else bounded
    kinds = tuple(each for each in plan.precisions if each not in wide)
    reason = "not faster than fp16 on Tensor Cores, and fp16 is within the budget"
    later = (
        {"": (replace(plan, precisions=wide), tuple(Omission("", kind, reason) for kind in wide))}
        if wide
        else {}
    )
    for each in eager:
        compiler = bounds[each.name].compiled_by
        reason = f"not faster than its code compiled by {compiler}, whose fp16 is within the budget"
        later[compiler] = (
            replace(plan, precisions=kinds, backends=(each,)),
            (Omission(each.name, "", reason),),
        )
    first = tuple(each for each in plan.backends if each not in (*eager, *bounded))
    after = [replace(plan, precisions=kinds, backends=(each,)) for each in bounded]
    return replace(plan, precisions=kinds, backends=first), later, after


def add_static_batches(plan: BuildPlan, card: ModelCard, sizes: Sequence[int]) -> BuildPlan:
    """`plan` with code for each of `sizes` alone, on a GPU, if a backend can compile it; given options take precedence."""
    options = dict(plan.options)
    for backend in plan.backends if card.batched else ():
        device = backend.choose_device(plan.device)
        if device == "cuda" and any(
            each.name == STATIC_BATCHES for each in backend.describe_options(device)
        ):
            options[backend.name] = {
                STATIC_BATCHES: ",".join(map(str, sizes)),
                **options.get(backend.name, {}),
            }
    return replace(plan, options=options)


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
    card, trained = (
        read_card(model, stored),
        (stored.info.weights if stored else model.load().weights).trained,
    )
    require_judgeable(plan.budget, plan.images, card, trained=trained)
    sizes = _choose_sizes(card, batch_sizes)
    wanted, omitted = plan_candidates(model, plan, stored, store, listener)
    require_sound_plan(wanted, listener)
    on_gpu = all(each.choose_device(plan.device) == "cuda" for each in wanted.backends)
    with store.scratch("choose") as scratch, WorkerPool(scratch) as pool:
        if on_gpu:
            pool.prepare(ON_GPU)
        with listener.step("export"):
            exported, _ = export_model(model, store, listener, stored)
        card = read_stored_card(exported)
        wanted = add_static_batches(wanted, card, sizes)
        if on_gpu:
            wanted = replace(wanted, gpu_lock=scratch / "gpu.lock")
        budget, data, score = choose_budget(plan, exported, listener)
        known = {"named": plan.named, "has_module": model.source.has_module}
        first, later, bounded = split_plan(wanted, **known) if on_gpu else (wanted, {}, [])
        build = build_model(model, first, store, listener)
        judge = partial(
            judge_builds,
            budget,
            data,
            model,
            store=store,
            listener=listener,
            truncate=plan.truncate,
        )
        judged, judged_on = judge(build.artifacts)

        def build_more(plan: BuildPlan) -> None:
            nonlocal judged, judged_on
            more = build_model(model, plan, store, listener)
            build.artifacts += more.artifacts
            build.skipped += more.skipped
            build.failed += more.failed
            judged, judged_on = judge(build.artifacts)

        times: dict[str, list[float]] = {}
        for other in bounded:
            build_more(replace(other, precisions=(Precision.TF32,)))
            (backend,) = other.backends
            able = [
                each
                for each in judged
                if each.keeps_budget or each.entry.info.backend == backend.name
            ]
            reason = rule_out_backend(backend, able, measure_slowdowns(able, sizes, card, times))
            if reason is None:
                build_more(other)
            else:
                omitted += (Omission(backend.name, "", reason),)
        kept = [each.entry.info for each in judged if each.keeps_budget]
        half = {
            name for each in kept if each.precision is Precision.FP16 for name in ("", each.backend)
        }
        for name, (other, spared) in later.items():
            if name in half:
                omitted += spared
                continue
            build_more(other)
        require_artifacts(build)
        with open_run(store.workspace, "choose") as run:
            seed = randbits(32)
            able = [each for each in judged if each.keeps_budget]
            timed = on_gpu and len(able) > 1
            hopeless = (
                explain_hopeless(measure_slowdowns(able, sizes, card, times)) if timed else {}
            )
            raced = [each.entry.id for each in able if each.entry.id not in hopeless]
            races, failures = _race(raced, sizes, final_rounds, seed, run, pool, store, listener)
            failures |= hopeless
            decision = Decision(
                model=card.name,
                model_id=exported.id,
                budget=str(budget),
                judged_on=judged_on,
                batch_sizes=sizes,
                winners={size: race.winner for size, race in races.items() if race.winner},
                candidates=list_candidates(judged, races, failures, budget, hopeless),
                left_out=(*omitted, *build.skipped),
                failed=tuple(build.failed),
                seed=seed,
                score=score,
            )
            write_bytes(run.path / DECISION_FILE, json_from_record(decision))
            finish_run(
                run, parents=[exported.id, *(each.entry.id for each in judged)], model=card.name
            )
    status = judge_status(decision, judged)
    return ChoiceResult(decision, result_from_build(build, weights, ()), str(run.path), status)


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
    measurements: list[Measurement] = []
    failures: dict[str, str] = {}
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
        processes = count()

        def measure(id: str, wanted: Sequence[int]) -> dict[int, float]:
            """The p50 latency in ns of one new process by batch size, without sizes at which it fails or is wrong."""
            subject, found, process = subjects[id], dict[int, float](), next(processes)
            with subject.open() as worker:
                for size in wanted:
                    load = replace(SHORT_LOAD, batch_size=size)
                    one = subject.measure(worker, load, f"m{len(measurements):03}")
                    if one.interrupted:
                        raise KeyboardInterrupt
                    measurements.append(replace(one, process=process))
                    median = (
                        one.latency_ns.median if one.latency_ns else None
                    )  # the interval is over processes
                    wrong = [each.message for each in one.reasons if each.code in WRONG_OUTPUTS]
                    if (
                        median is not None and not wrong
                    ):  # noise counts: the order of processes is drawn
                        found[size] = median
                    else:
                        reasons = wrong or [each.message for each in one.invalid_reasons]
                        failures[id] = f"batch {size}: {reasons[0]}"
                    if not worker.alive:
                        break
            step.advance()
            return found

        races = race_builds(
            built, sizes, measure, seed, final_rounds, lambda id, more: subjects[id].expect(more)
        )
        write_measurements(run.path, measurements)
    return races, failures


def judge_status(decision: Decision, judged: Sequence[BuiltArtifact]) -> ExitStatus:
    """FAIL if nothing is within the budget, INCONCLUSIVE if more data may show that something is."""
    if decision.winners:
        return ExitStatus.DONE
    if any(each.keeps_budget for each in judged):
        return ExitStatus.STAGE_FAILED  # none could be measured
    open_ones = any(each.accuracy is not None and each.accuracy.keeps is None for each in judged)
    return ExitStatus.INCONCLUSIVE if open_ones else ExitStatus.FAIL
