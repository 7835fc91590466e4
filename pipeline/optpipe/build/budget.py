"""The accuracy budget of `auto`, and which builds keep it."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from optpipe.backends.registry import BACKENDS
from optpipe.build.plan import BuildPlan
from optpipe.build.records import BuiltArtifact
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.precision import Budget, Precision
from optpipe.core.quantity import format_snr
from optpipe.core.wording import Argument
from optpipe.evaluate.evaluate import EvaluationRequest, run_evaluation
from optpipe.evaluate.recompute import recompute_accuracy
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.contract import TaskContract
from optpipe.measure.int8_notes import BUDGET
from optpipe.models.artifacts.decisions import (
    CandidateAccuracy,
)
from optpipe.models.export.exported import Model
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.models.stored_card import read_stored_card
from optpipe.stats.paired import CONFIDENCE
from optpipe.workspace.entry import Entry, Run, load_run
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
        agreement = (
            f"SNR {format_snr(verified.info.snr_db or 0)}"
            if boxes is None
            else f"{boxes:.1%} of the boxes agree"
        )
        return f"outputs differ from the source model's: {agreement}"
    return None


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
        obstacle = "no labeled data was given (" + Argument("data", "PATH") + ")"
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
        if truths is not None or any(file.label is not None for file in samples.files):
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
    whole = [build for build in built if find_flaw(build) is None]
    if whole and data is not None:
        entries = [build.entry for build in whole]
        evaluation = run_evaluation(
            model,
            EvaluationRequest(data, budget=budget.limit / 100, only=entries, truncate=truncate),
            store,
            listener,
        )
        run, task = load_run(Path(evaluation.run_dir)), TASKS[Task(evaluation.task)]
        accuracy = {
            row.artifact: _judge_drop(row, budget, run, task, len(entries))
            for row in evaluation.results
            if row.artifact
        }
        judged_on = f"{evaluation.dataset.describe()} of {evaluation.dataset.name}"
    elif whole:
        for build in whole:
            known = build.verification.info if build.verification else None
            snr = known.snr_db if known else -inf
            keeps = (
                None
                if known and known.box_agreement is not None
                else snr is None or snr >= budget.limit
            )
            accuracy[build.entry.id] = CandidateAccuracy(
                keeps=keeps, snr_db=-inf if keeps is None else snr
            )
        judged_on = f"{next((build.verification.info.samples for build in whole if build.verification), 0)} samples"

    def rank(build: BuiltArtifact) -> tuple[int, int]:  # between equally fast builds the first wins
        return list(Precision).index(build.entry.info.precision), list(BACKENDS).index(
            build.entry.info.backend
        )

    return [
        replace(build, accuracy=accuracy.get(build.entry.id)) for build in sorted(built, key=rank)
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
