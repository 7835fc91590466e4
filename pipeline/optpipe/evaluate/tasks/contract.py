"""What every task provides."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.verdict import Observation
from optpipe.evaluate.result import Accuracy, Agreement, ClassScore, EvaluatedModel, Score, TaskScores
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.stats.paired import CONFIDENCE, FEWEST_SAMPLES, Interval, compute_bootstrap_interval, draw_sample_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

Values = Sequence[Any]
"""Predictions or truths of one task, one per sample, each a plain value that Parquet holds."""


@dataclass(frozen=True, slots=True)
class DropCost:
    """The drop of a task's first score, as a fraction, with its 95 % interval."""

    drop: float
    ci: tuple[float, float]


class TaskContract(ABC):
    """One task."""

    score: ClassVar[str]
    """The name of the score that a drop is of; the unit in a policy: `"0.5 mIoU"`."""
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """The least and the most that its scores can be."""
    truth_column: ClassVar[str] = "truth"
    prediction_column: ClassVar[str] = "prediction"
    names_classes: ClassVar[bool] = True
    """Whether scores are given by class."""
    sample_kind: ClassVar[str | None] = None
    """What is counted, in the plural, where it is not the set's samples."""

    @abstractmethod
    def require_model(self, card: ModelCard) -> None:
        """Raises BadInputError where the model's outputs do not fit the task."""

    def describe_scoring(self, card: ModelCard) -> str:  # noqa: ARG002
        """How outputs become predictions, where there is a choice."""
        return ""

    def describe_left_out(self, truths: Values) -> str:  # noqa: ARG002
        """Which samples the scores leave out, where there are such."""
        return ""

    def count_samples(self, predictions: Values) -> int:
        """How many samples the predictions are of."""
        return len(predictions)

    def count_classes(self, card: ModelCard) -> int | None:  # noqa: ARG002
        """How many classes the model's outputs have; None where they have none, or do not say."""
        return None

    @abstractmethod
    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:
        """What is true of every sample; None where the set does not say. Raises BadInputError for truths that do not fit."""

    @abstractmethod
    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:
        """The predictions of some samples from their rows of the outputs, (samples, ...) each."""

    def bound_hidden_loss(self, row: EvaluatedModel) -> float:
        """What the drop may be larger by: on samples that the ranges were computed from accuracy flatters, and all may have been lost."""
        low, high = self.score_range
        return (high - low) * row.calibrated_on / max(row.samples, 1)

    @abstractmethod
    def take_as_truths(self, predictions: Values) -> Values:
        """The source model's predictions as truths, where a set has none."""

    @abstractmethod
    def score_predictions(
        self, truths: Values, source: Values, found: Values, labels: Sequence[str], classes: int
    ) -> Accuracy | TaskScores:
        """Scores of `found`, and their drops from `source` on the same samples."""

    @abstractmethod
    def measure_drop(self, truths: Values, source: Values, found: Values) -> DropCost | None:
        """The drop of the first score; None where none can be measured."""

    @abstractmethod
    def compute_parity(self, source: Values, found: Values) -> Agreement | None:
        """How far `found` predicts as `source` does; None where the source predicts the same for all samples."""

    @abstractmethod
    def observe(
        self, truths: Values | None, source: Values, found: Values, confidence: float, about: str
    ) -> dict[str, Observation]:
        """Figures for a policy, as fractions: `agreement`, and with truths `score` and `drop`, also by the score's name.

        `about` says what was observed: `250 images`.
        """


@dataclass(frozen=True, slots=True)
class Replicated:
    """A score on all samples, and on every replicate of the bootstrap."""

    value: float
    replicates: "NDArray[np.float64]"
    samples: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one model's predictions give: what scores are computed from, and every score."""

    gathered: Any
    scores: tuple[Replicated, ...]


@lru_cache(maxsize=8)
def measure_scores(task: "BootstrapTask", truths: bytes, predictions: bytes) -> Measured:
    """Scores of pickled predictions on pickled truths. The last few are kept: every comparison has the source model's again."""
    true, predicted = pickle.loads(truths), pickle.loads(predictions)
    gathered, count = task.gather(true, predicted), task.count_units(true)
    whole = task.compute_scores(gathered, np.ones((1, count)))[0]
    drawn = task.compute_scores(gathered, draw_sample_weights(count))
    scores = (Replicated(float(whole[place]), drawn[:, place], count) for place in range(len(task.scores)))
    return Measured(gathered, tuple(scores))


class BootstrapTask(TaskContract):
    """A task whose scores are computed from sums over samples, or from anything else that can be weighted by sample.

    Intervals come from the paired bootstrap over samples; of too few samples they span all that a score can be. Two models with
    the same predictions have a drop of exactly 0.
    """

    scores: ClassVar[tuple[str, ...]]
    """The first is the one that a drop is of."""
    unit_kind: ClassVar[str | None] = None
    """What `count_units` counts, in the plural, where it is not what `count_samples` does."""

    def count_units(self, truths: Values) -> int:
        """What the bootstrap draws from: samples, where a task does not say otherwise."""
        return len(truths)

    @abstractmethod
    def gather(self, truths: Values, predictions: Values) -> Any:
        """Whatever the scores are computed from."""

    @abstractmethod
    def compute_scores(self, gathered: Any, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Every score for every replicate (replicates, scores), where sample j counts weights[i, j] times in replicate i."""

    @abstractmethod
    def compute_class_scores(self, gathered: Any) -> "NDArray[np.float64]":
        """The first score of each class (classes,); NaN for a class that does not occur."""

    def name_classes(self, truths: Values, labels: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        """What `compute_class_scores` gives scores of: the card's labels, where a task does not say otherwise."""
        return labels

    @abstractmethod
    def compute_sample_parity(self, source: Values, found: Values) -> "NDArray[np.float64]":
        """How far the two predict the same for each sample (samples,), from 0 to 1."""

    def score_predictions(
        self,
        truths: Values,
        source: Values,
        found: Values,
        labels: Sequence[str],
        classes: int,  # noqa: ARG002
    ) -> TaskScores:
        """Every score with its interval, the drop with that of the paired replicates, and the first score per class."""
        mine, theirs = (measure_scores(self, pickle.dumps(truths), pickle.dumps(each)) for each in (found, source))
        pairs = list(zip(self.scores, mine.scores, theirs.scores, strict=True))
        if undefined := next(
            (name for name, *each in pairs if not np.isfinite([one.value for one in each]).all()), None
        ):
            raise BadInputError(f"{undefined} is not defined on these samples: nothing in them is judged")
        now, was = (self.compute_class_scores(each.gathered) for each in (mine, theirs))
        names = self.name_classes(truths, labels)
        return TaskScores(
            tuple(_make_score(name, one, other, CONFIDENCE, self.score_range) for name, one, other in pairs),
            tuple(
                ClassScore(
                    names[place] if place < len(names) else f"class {place}", float(value), float(before - value)
                )
                for place, (value, before) in enumerate(zip(now, was, strict=True))
                if np.isfinite(value) and np.isfinite(before)
            ),
        )

    def measure_drop(self, truths: Values, source: Values, found: Values) -> DropCost | None:
        """By the paired bootstrap."""
        first = self.score_predictions(truths, source, found, (), 0).scores[0]
        return DropCost(first.drop, first.drop_ci) if np.isfinite(first.drop) else None

    def compute_parity(self, source: Values, found: Values) -> Agreement | None:
        """The mean over samples of the task's parity."""
        each = self.compute_sample_parity(source, found)
        return Agreement(float(each.mean()), _interval_of_mean(each, CONFIDENCE).bounds, ())

    def observe(
        self, truths: Values | None, source: Values, found: Values, confidence: float, about: str
    ) -> dict[str, Observation]:
        """`score` and `drop` are the first score's; `mIoU` and `drop of mIoU` are by name."""
        figures = {}
        each = self.compute_sample_parity(source, found)
        interval = _interval_of_mean(each, confidence)
        figures["agreement"] = Observation(float(each.mean()), interval.low, interval.high, about=about)
        if truths is None:
            return figures
        mine, theirs = (measure_scores(self, pickle.dumps(truths), pickle.dumps(each)) for each in (found, source))
        for name, one, other in zip(self.scores, mine.scores, theirs.scores, strict=True):
            score = _make_score(name, one, other, confidence, self.score_range)
            said = f"{name}, {about}"
            figures[name] = Observation(score.value, *score.ci, about=said)
            figures[f"drop of {name}"] = Observation(score.drop, *score.drop_ci, about=said)
        figures |= {"score": figures[self.score], "drop": figures[f"drop of {self.score}"]}
        return figures


def _make_score(
    name: str, mine: Replicated, theirs: Replicated, confidence: float, score_range: tuple[float, float]
) -> Score:
    lost = theirs.value - mine.value
    if mine.samples < FEWEST_SAMPLES:
        low, high = score_range
        return Score(name, mine.value, score_range, lost, (low - high, high - low))
    own = compute_bootstrap_interval(mine.replicates, mine.value, confidence)
    drop = compute_bootstrap_interval(theirs.replicates - mine.replicates, lost, confidence)
    return Score(name, mine.value, own.bounds, lost, drop.bounds)


def _interval_of_mean(values: "NDArray[np.float64]", confidence: float) -> Interval:
    if len(values) < FEWEST_SAMPLES:
        return Interval(0.0, 1.0)
    drawn = draw_sample_weights(len(values)) @ values / len(values)
    return compute_bootstrap_interval(drawn, float(values.mean()), confidence)


def suggest_task(card: ModelCard) -> str:
    """What a refusal ends with where the ranks of the outputs are those of a task: `; task = "segmentation" would fit`."""
    ranks = tuple(sorted(len(each.shape) for each in card.outputs))
    if card.tokenization is not None:
        fits = {(2,): Task.TEXT_CLASSIFICATION, (3,): Task.TOKEN_CLASSIFICATION, (2, 2): Task.QUESTION_ANSWERING}
    else:
        fits = {(2,): Task.CLASSIFICATION}
    if card.takes_images:
        fits |= {(4,): Task.SEGMENTATION} | dict.fromkeys([(3,), (3, 3), (1, 1, 2)], Task.DETECTION)
    return f'; task = "{fits[ranks]}" would fit' if ranks in fits and fits[ranks] is not card.task else ""


def require_labels(card: ModelCard, classes: int | None, task: Task) -> None:
    """Raises BadInputError where the card names another number of classes than the outputs have."""
    if card.labels and classes is not None and len(card.labels) != classes:
        raise BadInputError(
            f"{card.name}: the model card has {len(card.labels)} labels, but its {task} output has {classes} classes"
        )
