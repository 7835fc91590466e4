"""The judgment of the candidates of `build --precision auto`, and the reasons of the choice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.build.build import BuildPlan
from optpipe.build.records import BuiltArtifact
from optpipe.core.card import ModelCard, card_from_file
from optpipe.core.entries import ArtifactInfo, ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.precision import Budget, Precision
from optpipe.core.quantity import format_snr
from optpipe.core.verdict import Verdict
from optpipe.evaluate.evaluate import run_evaluation
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.tasks import TASKS
from optpipe.measure.int8_notes import BUDGET
from optpipe.measure.race import Race
from optpipe.models.artifacts.decisions import Candidate, CandidateAccuracy, CandidateTimes, Standing
from optpipe.models.export.model import Model
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.stats.ratio import Change, Ratio
from optpipe.workspace.entry import Entry
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store


def find_flaw(built: BuiltArtifact) -> str | None:
    """Why a build cannot be a candidate with any budget: it does not run here, or is not what was requested."""
    if built.why_not is not None:
        return built.why_not
    proof, verified = built.entry.info.precision_proof, built.verification
    if not proof.proven:
        return proof.reason
    if verified is not None and verified.info.passed is False:
        boxes = verified.info.box_agreement
        found = f"SNR {format_snr(verified.info.snr_db or 0)}" if boxes is None else f"{boxes:.1%} of the boxes agree"
        return f"outputs differ from the source model's: {found}"
    return None


def list_candidates(
    judged: Sequence[BuiltArtifact], races: Mapping[int, Race], failures: Mapping[str, str], budget: Budget
) -> tuple[Candidate, ...]:
    """Winners first, then by time at the first batch size; then those without a time, in the given order."""
    infos = {each.entry.id: each.entry.info for each in judged}
    found = []
    for each in judged:
        id, info = each.entry.id, each.entry.info
        standing, reason = _explain(each, races, failures, infos, budget)
        times = []
        for size, race in races.items():
            if id in race.times and (own := race.times[id]).race:
                slowdown = None if id == race.winner else race.compute_slowdown(id)
                ratio, dropped = race.ratios.get(id), race.dropped.get(id)
                times.append(CandidateTimes(size, tuple(own.race), tuple(own.final), ratio, slowdown, dropped))
        found.append(
            Candidate(id, info.backend, info.precision, info.device, standing, reason, each.accuracy, tuple(times))
        )

    def rank(each: Candidate) -> tuple[int, float]:
        slowdown = each.times[0].slowdown if each.times else None
        return _ORDER.index(each.standing), 1.0 if slowdown is None else slowdown

    return tuple(sorted(found, key=rank))


_ORDER = (
    Standing.CHOSEN, Standing.NO_DIFFERENCE, Standing.SLOWER, Standing.NOT_SHOWN, Standing.OVER_BUDGET,
    Standing.NOT_PROVEN, Standing.FAILED,
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
    behind = [(size, race) for size, race in races.items() if race.compute_slowdown(id) is not None]
    if not behind:
        return Standing.FAILED, failures.get(id, "no batch size could be measured")
    slower = all(_is_slower(race.ratios.get(id) or race.dropped.get(id)) for _, race in behind)
    reason = "; ".join(_explain_lag(size, race, id) for size, race in behind)
    return (Standing.SLOWER if slower else Standing.NO_DIFFERENCE), reason


def _is_slower(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.change is Change.SLOWER


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
    hidden = f", which the {share:.1%} of samples used for calibration may understate," if share else ""
    return f"drop of {low:+.2f} to {high:+.2f} points{hidden} {exceeds} {budget}"


def _explain_lead(size: int, race: Race, infos: Mapping[str, ArtifactInfo]) -> str:
    """The winner's lead over the best slower build, and over those that the race cannot distinguish from it."""
    if not race.ratios:
        alone = "within the budget" if len(race.times) == 1 else "with a time in every round"
        return f"batch {size}: the only build {alone}"
    equal = {name: ratio for name, ratio in race.ratios.items() if ratio.change is Change.NO_DIFFERENCE}
    slower = {name: ratio for name, ratio in race.ratios.items() if name not in equal}
    nearest = sorted(slower, key=lambda name: slower[name].value)[:1]
    said = [f"{slower[name]} times as fast as {infos[name].label}" for name in nearest]
    said += [f"as fast as {infos[name].label} within the error, {ratio} times" for name, ratio in equal.items()]
    own = infos[race.winner].precision if race.winner else None
    preferred = {
        "more precise" if infos[name].precision != own else "first in --backend auto's order" for name in equal
    }
    tie = f"; preferred as {' and '.join(sorted(preferred, reverse=True))}" if preferred else ""
    return f"batch {size}: " + ", ".join(said) + tie


def _explain_lag(size: int, race: Race, artifact: str) -> str:
    ratio, dropped = race.ratios.get(artifact), race.dropped.get(artifact)
    if ratio is not None:
        return f"batch {size}: {ratio} times the winner's time{_format_doubt(ratio)}"
    rounds = dropped.rounds if dropped else len(race.times[artifact].race)
    known = f"from {rounds} round{'s' if rounds > 1 else ''}"
    if dropped is None or race.scatter is None:
        slowdown = race.compute_slowdown(artifact)
        return f"batch {size}: {slowdown:.2f} times the winner's time, {known}; how much rounds scatter is not known"
    known += f" at {race.scatter.sd:.1%} scatter"
    return f"batch {size}: {dropped} times the winner's time, {known}{_format_doubt(dropped)}"


def _format_doubt(ratio: Ratio) -> str:
    return "" if _is_slower(ratio) else ", within the error"


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
            f"--budget {budget} cannot be judged: {obstacle}; use a floor of the outputs' SNR: --budget 30dB"
        )


def choose_budget(plan: BuildPlan, exported: Entry[ModelInfo], listener: Listener) -> tuple[Budget, Path | None, str]:
    """The given budget, or by default a drop of BUDGET with labels and trained weights, otherwise SNR_FLOOR.

    Also the labeled samples and the score that drops; None and empty if the budget is an SNR.

    Raises BadInputError for a drop in points that cannot be measured.
    """
    budget = plan.budget
    if budget is not None and budget.unit == "dB":
        return budget, None, ""
    card = card_from_file(exported.file(CARD))
    data, obstacle = require_judgeable(budget, plan.images, card, trained=exported.info.weights.trained)
    if data is not None and obstacle is None:
        samples, _ = load_sample_set(exported, card, data, None, 0, listener, truncate=plan.truncate)
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
            model, data, None, 0, budget.limit / 100, store, listener, only=entries, truncate=truncate
        )
        accuracy = {row.artifact: _judge_drop(row) for row in found.results if row.artifact}
        judged_on = f"{found.dataset.describe()} of {found.dataset.name}"
    elif whole:
        for each in whole:
            known = each.verification.info if each.verification else None
            snr = known.snr_db if known else -inf
            keeps = None if known and known.box_agreement is not None else snr is None or snr >= budget.limit
            accuracy[each.entry.id] = CandidateAccuracy(keeps=keeps, snr_db=-inf if keeps is None else snr)
        judged_on = f"{next((each.verification.info.samples for each in whole if each.verification), 0)} samples"

    def rank(each: BuiltArtifact) -> tuple[int, int]:  # between equally fast builds the first wins
        return list(Precision).index(each.entry.info.precision), list(BACKENDS).index(each.entry.info.backend)

    return [replace(each, accuracy=accuracy.get(each.entry.id)) for each in sorted(built, key=rank)], judged_on


def _judge_drop(row: EvaluatedModel) -> CandidateAccuracy:
    keeps = {Verdict.PASS: True, Verdict.FAIL: False}.get(row.verdict) if row.verdict else None
    judged = row.scores.scores[0] if row.scores else row.accuracy
    drop, interval = (judged.drop, judged.drop_ci) if judged else (None, None)
    return CandidateAccuracy(keeps, drop, interval, row.snr_db, row.calibrated_on / max(row.samples, 1))
