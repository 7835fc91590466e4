"""Whether each candidate keeps the accuracy budget: a drop on labeled data, or the SNR of the outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from optpipe.build.records import BuiltArtifact
from optpipe.core.card import card_from_file
from optpipe.core.decision import CandidateAccuracy
from optpipe.core.entries import ModelInfo
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener
from optpipe.core.mixed_precision import Budget
from optpipe.core.verdict import Verdict
from optpipe.evaluate.evaluation_run import run_evaluation
from optpipe.evaluate.result import EvaluatedModel
from optpipe.evaluate.tasks.registry import TASKS
from optpipe.measure.int8_notes import BUDGET
from optpipe.models.export.model import Model
from optpipe.models.inputs.task_data import load_sample_set
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Entry, Store

SNR_FLOOR = Budget(30.0, "dB")
"""Where accuracy cannot be judged: the outputs' error is about 3 % of them."""


@dataclass(frozen=True, slots=True)
class Judge:
    """What candidates are judged by."""

    budget: Budget
    data: Path | None
    """Labeled samples; None where the budget is an SNR."""
    truncate: bool = False
    """Whether texts that are longer than the model's input are cut."""
    score: str = ""
    """What a drop is of; empty where the budget is an SNR."""


def choose_judge(
    budget: Budget | None,
    images: Path | None,
    exported: Entry[ModelInfo],
    listener: Listener,
    *,
    truncate: bool = False,
) -> Judge:
    """The budget asked for, or the default: a drop of BUDGET where there are labels and trained weights, else SNR_FLOOR.

    Raises BadInputError for a drop in points where it cannot be measured.
    """
    if budget is not None and budget.unit == "dB":
        return Judge(budget, None)
    data, obstacle = _find_labeled_data(images, exported, listener, truncate=truncate)
    if obstacle is None:
        score = TASKS[card_from_file(exported.file(CARD)).task].score
        return Judge(budget or Budget(100 * BUDGET, "points"), data, truncate, score)
    if budget is not None:
        raise BadInputError(
            f"--budget {budget} cannot be judged: {obstacle}; use a floor of the outputs' SNR: --budget 30dB"
        )
    listener.inform(f"budget: SNR of {SNR_FLOOR} or more, because {obstacle}")
    return Judge(SNR_FLOOR, None)


def _find_labeled_data(
    images: Path | None, exported: Entry[ModelInfo], listener: Listener, *, truncate: bool
) -> tuple[Path | None, str | None]:
    card = card_from_file(exported.file(CARD))
    if card.task not in TASKS:
        return None, f"{card.name} has no task that can be evaluated (task: {card.task})"
    if not exported.info.weights.trained:
        return None, "the weights are random"
    given = images or (Path(card.data["validation"]) if "validation" in card.data else None)
    if given is None:
        return None, "no labeled data was given (--data PATH)"
    samples, _ = load_sample_set(exported, card, given, None, 0, listener, truncate=truncate)
    task = TASKS[card.task]
    truths = task.read_truths(samples, card, task.count_classes(card))
    if truths is None and not any(each.label is not None for each in samples.files):
        return None, f"{given} has no labels"
    return given, None


def judge_accuracy(
    judge: Judge, model: Model, built: Sequence[BuiltArtifact], store: Store, listener: Listener
) -> tuple[Mapping[str, CandidateAccuracy], str]:
    """The accuracy of each artifact by id, and what it was judged on."""
    if judge.data is None:
        samples = next((each.verification.info.samples for each in built if each.verification), 0)
        return {each.entry.id: _judge_snr(each, judge.budget.limit) for each in built}, f"{samples} samples"
    entries = [each.entry for each in built]
    found = run_evaluation(
        model, judge.data, None, 0, judge.budget.limit / 100, store, listener, only=entries, truncate=judge.truncate
    )
    rows = {row.artifact: _judge_drop(row) for row in found.results if row.artifact}
    return rows, f"{found.dataset.describe()} of {found.dataset.name}"


def _judge_snr(built: BuiltArtifact, floor: float) -> CandidateAccuracy:
    snr = built.verification.info.snr_db if built.verification else -inf
    return CandidateAccuracy(keeps=snr is None or snr >= floor, snr_db=snr)


def _judge_drop(row: EvaluatedModel) -> CandidateAccuracy:
    keeps = {Verdict.PASS: True, Verdict.FAIL: False}.get(row.verdict) if row.verdict else None
    judged = row.scores.scores[0] if row.scores else row.accuracy
    drop, interval = (judged.drop, judged.drop_ci) if judged else (None, None)
    return CandidateAccuracy(keeps, drop, interval, row.snr_db, row.calibrated_on / max(row.samples, 1))
