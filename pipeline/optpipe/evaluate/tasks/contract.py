"""The interface of a task, and the scores, drops, and intervals that all tasks share."""

import copy
import pickle
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError, escape
from optpipe.core.metrics.scores import Score as ScoreObject
from optpipe.core.metrics.scores import find_score
from optpipe.core.verdict import Observation
from optpipe.evaluate.result import Agreement, ClassScore, EvaluatedModel, Score, TaskScores
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.stats.paired import (
    CONFIDENCE,
    NO_CLASS,
    Groups,
    SampledFigure,
    Share,
    bound_absent_effect,
    figure_from_samples,
    find_absent_classes,
    find_largest_effect,
    groups_from_names,
    mean_from_samples,
)

Values = Sequence[Any]
"""Predictions or truths of one task, one plain value per sample that Parquet can hold."""
MOST_PARTS = 1000
"""With more samples, the jackknife leaves out groups instead of single ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of one model's predictions, and each sample's part in them."""

    gathered: Any
    values: NDArray[np.float64]
    """(scores,)"""
    parts: NDArray[np.float64]
    """(samples or groups of them, scores), as in `stats.paired.figure_from_samples`."""
    samples: int
    are_means: bool
    effects: tuple[float, ...]
    """Of each score the change of its sum over samples by one lost sample; empty without `spread_truths`."""
    occurring: frozenset[int] = frozenset()
    """The classes of the truths, if a score is a mean over classes."""
    class_values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The first score of each class, (classes,); NaN for one that does not occur."""
    class_parts: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """(samples or groups of them, classes)"""
    class_effects: tuple[float | None, ...] = ()
    """Of each class the change by one lost sample; None for a class that no truth has."""


class TaskContract:
    """One task: its predictions, truths, and scores."""

    form: ClassVar[str] = ""
    """The axes of the first output, `(n, classes, height, width)`; empty if `require_model` checks them otherwise."""
    class_axis: ClassVar[int | None] = None
    """The first output's axis of classes."""
    scores: ClassVar[tuple[str, ...]]
    """Drops are of the first score. The names are also units in a policy: `"0.5 mIoU"`."""
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Range of the scores."""
    truth_column: ClassVar[str] = "truth"
    prediction_column: ClassVar[str] = "prediction"
    names_classes: ClassVar[bool] = True
    """True if the task lists scores by class."""
    needs_finite: ClassVar[bool] = False
    """True if predictions are the model's own numbers, which are compared; an infinite one cannot be."""
    unit_kind: ClassVar[str | None] = None
    """Name of the units of `count_units` in the plural, if they are not the set's samples."""

    groups: Groups | None = None
    """The samples that share a source; None if they are taken as independent."""

    def with_groups(self, names: Sequence[str | None]) -> Self:
        """The task for samples whose sources have `names`; itself without names. Raises BadInputError if it cannot use them."""
        groups = groups_from_names(names)
        if groups is None:
            return self
        if self.unit_kind is not None:
            raise BadInputError(
                f"samples have groups, but this task scores {self.unit_kind}\nleave the column `group` out"
            )
        return self.grouped_by(groups)

    def grouped_by(self, groups: Groups | None) -> Self:
        """The task for samples that share sources as `groups` says; itself without them."""
        if groups is None:
            return self
        grouped = copy.copy(self)
        grouped.groups = groups
        return grouped

    @property
    def score(self) -> str:
        """The score of the judged drop."""
        return self.scores[0]

    def require_model(self, card: ModelCard) -> None:
        """Raises BadInputError if the model's outputs do not fit the task."""
        shape = card.outputs[0].shape if card.outputs else ()
        if self.form and len(shape) != 1 + self.form.count(","):
            pool = (
                "pool it over tokens in the model, or "
                if card.task is Task.EMBEDDING and len(shape) == 3
                else ""
            )
            problem = f"{card.name}: {card.task} needs a first output of {self.form}"
            stated = f"{card.outputs[0].name} has shape {'×'.join(map(str, shape))}"
            raise BadInputError(
                f"{problem}, but {stated}\n{pool}set another task in a model card (models/README.md)"
            )
        if self.names_classes:
            require_labels(card, self.count_classes(card), card.task)

    def describe_scoring(self, card: ModelCard) -> str:
        """The choices between outputs and predictions; empty without any."""
        return ""

    def describe_left_out(self, truths: Values) -> str:
        """The samples that the scores leave out; empty without any."""
        return ""

    def describe_absent(self, truths: Values, source: Values, labels: Sequence[str]) -> str:
        """The classes with `labels` that no truth has, if a score is a mean over classes; empty if all occur."""
        if not labels or not any(self.find_score(name).over_classes for name in self.scores):
            return ""
        measured = measure_scores(self, pickle.dumps(truths), pickle.dumps(source))
        return describe_absent_classes(labels, measured.occurring)

    def count_units(self, truths: Values) -> int:
        """Number of independent units; the samples by default."""
        return len(truths)

    def count_classes(self, card: ModelCard) -> int | None:
        """Classes of the model's outputs; None if the task or the shape has none."""
        shape = card.outputs[0].shape if card.outputs and self.class_axis is not None else ()
        size = (
            shape[self.class_axis]
            if self.class_axis is not None and self.class_axis < len(shape)
            else None
        )
        return size if isinstance(size, int) else None

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        """The truth of every sample; None if the set has no truths. Raises BadInputError if they do not fit."""
        raise NotImplementedError

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        """The predictions of some samples from their rows of the outputs, (samples, ...) each."""
        raise NotImplementedError

    def require_rows(self, samples: SampleSet) -> None:
        """Raises BadInputError if a model reads a sample in several rows, and the task does not join them."""
        if len(samples.rows) > len(samples.files):
            problem = (
                f"{samples.name}: long contexts are read in windows, which this task does not join"
            )
            raise BadInputError(f"{problem}\nleave them out, or give the inputs as tensors")

    def require_capacity(self, samples: SampleSet, card: ModelCard, models: int) -> None:
        """Raises BadInputError if a dossier cannot hold the truths, and the predictions of so many models."""

    def join_rows(self, decoded: Values, samples: SampleSet) -> Values:
        """The prediction of each sample from those of its rows, in the order of `samples.rows`."""
        return decoded

    def take_as_truths(self, predictions: Values) -> Values:
        """Makes truths of the source model's predictions for a set without any."""
        return predictions

    def gather(self, truths: Values, predictions: Values) -> Any:
        """The basis of the scores; an array (samples, scores) if a score is a mean over samples."""
        raise NotImplementedError

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Every score for every row of `weights` (rows, samples): (rows, scores), where sample j counts weights[i, j] times."""
        return np.asarray(weights @ gathered / weights.sum(axis=1, keepdims=True))

    def spread_truths(self, gathered: Any) -> Sequence[NDArray[np.float64]]:
        """For each score, the truth that each unit holds of each class that the score averages, (classes, units).

        One class for a score of all classes together; empty if one sample moves a score by `find_effect`.
        """
        return ()

    def compute_class_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The first score of each class, (rows, classes), weighted as `compute_scores`; NaN for a class that does not occur."""
        return np.zeros((len(weights), 0))

    def compute_all_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`compute_scores` and `compute_class_scores`, for a task that gets both by one computation."""
        return self.compute_scores(gathered, weights), self.compute_class_scores(gathered, weights)

    def spread_class_truths(self, gathered: Any) -> NDArray[np.float64]:
        """The truth that each unit holds of each class of `compute_class_scores`, (classes, units)."""
        return np.zeros((0, 0))

    def name_classes(self, truths: Values, labels: Sequence[str]) -> Sequence[str]:
        """Names for `compute_class_scores`; the card's labels by default."""
        return labels

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """Agreement of both predictions for each sample (samples,), from 0 to 1."""
        return np.array(
            [float(before == after) for before, after in zip(source, build, strict=True)]
        )

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        """False if agreement with the source model, or a drop on `truths`, would say nothing."""
        return True

    def find_score(self, name: str) -> ScoreObject:
        """The score called `name`, which is one of `scores`."""
        return find_score(name)

    def show_sample(self, prediction: Any, truth: Any, file: SetFile) -> tuple[Any, Any]:
        """The prediction and the truth of one sample, as a plug-in's score gets them."""
        return prediction, truth

    def find_effect(self, name: str, before: float) -> float:
        """`Score.find_effect` of a score, which is `before` for the source model."""
        return self.find_score(name).find_effect(before)

    def bound_hidden_loss(self, row: EvaluatedModel) -> float:
        """Largest drop hidden by the calibration samples, all of which may have been lost without them."""
        low, high = self.score_range
        return (high - low) * row.calibrated_on / max(row.samples, 1)

    def add_scores(
        self,
        row: EvaluatedModel,
        truths: Values,
        source: Values,
        build: Values,
        labels: Sequence[str],
        classes: int,
    ) -> EvaluatedModel:
        return replace(row, scores=self.score_predictions(truths, source, build, labels))

    def score_predictions(
        self, truths: Values, source: Values, build: Values, labels: Sequence[str] = ()
    ) -> TaskScores:
        """Every score of `build` with its interval, its drop from `source` on the same samples, and the first score per class."""
        mine, theirs, figures = self._compare(truths, source, build, labels)
        scores = []
        for name, (own, drop) in zip(self.scores, figures, strict=True):
            if not np.isfinite(drop.value):
                raise BadInputError(
                    f"{name} is not defined on these samples: nothing in them is judged"
                )
            bounds = (figure.interval(CONFIDENCE) for figure in (own, drop))
            scores.append(Score(name, own.value, next(bounds), drop.value, next(bounds)))
        return TaskScores(tuple(scores), self._list_classes(truths, mine, theirs, labels))

    def _list_classes(
        self, truths: Values, mine: Measured, theirs: Measured, labels: Sequence[str]
    ) -> tuple[ClassScore, ...]:
        """The first score of each class. Its intervals hold for all classes together, since a reader looks at the worst of them."""
        names = self.name_classes(truths, labels)
        # a class that only one of both models predicts is no class of the other
        both = enumerate(zip(mine.class_values, theirs.class_values, strict=False))
        known = [place for place, pair in both if np.isfinite(pair).all()]
        confidence = 1 - (1 - CONFIDENCE) / max(len(known), 1)
        size = 1.0 if self.groups is None else self.groups.size
        class_scores = []
        for place in known:
            value, before = float(mine.class_values[place]), float(theirs.class_values[place])
            name = names[place] if place < len(names) else f"class {place}"
            effect = mine.class_effects[place]
            if effect is None:
                class_scores.append(ClassScore(name, value, before - value))
                continue
            parts, others = mine.class_parts[:, place], theirs.class_parts[:, place]
            own = figure_from_samples(value, parts, mine.samples, (0.0, 1.0), effect * size)
            lost = figure_from_samples(
                before - value, others - parts, mine.samples, (-1.0, 1.0), effect * size
            )
            bounds = own.interval(confidence), lost.interval(confidence)
            class_scores.append(ClassScore(name, value, before - value, *bounds))
        return tuple(class_scores)

    def _compare(
        self, truths: Values, source: Values, build: Values, labels: Sequence[str] = ()
    ) -> tuple[Measured, Measured, list[tuple[Share | SampledFigure, SampledFigure]]]:
        """The scores of `build` and `source`, and the drop of each score; `labels` name the classes that exist."""
        mine, theirs = (
            measure_scores(self, pickle.dumps(truths), pickle.dumps(predictions))
            for predictions in (build, source)
        )
        count, width = mine.samples, self.score_range[1] - self.score_range[0]
        absent = find_absent_classes(labels, mine.occurring)
        unseen = bound_absent_effect(count, len(mine.occurring), len(absent))
        figures = []
        for name, value, before, parts, others, spread in zip(
            self.scores,
            mine.values,
            theirs.values,
            mine.parts.T,
            theirs.parts.T,
            mine.effects or [None] * len(self.scores),
            strict=True,
        ):
            effect, sign = (
                self.find_effect(name, float(before)) if spread is None else spread,
                -1.0 if self.find_score(name).lower_is_better else 1.0,
            )
            effect = max(effect, unseen) if self.find_score(name).over_classes else effect
            effect *= 1.0 if self.groups is None else self.groups.size
            if mine.are_means and self.groups is None:
                own = mean_from_samples(parts)
            else:
                own = figure_from_samples(float(value), parts, count, self.score_range, effect)
            lost = figure_from_samples(
                sign * float(before - value),
                sign * (others - parts),
                count,
                (-width, width),
                effect,
            )
            figures.append((own, lost))
        return mine, theirs, figures

    def measure_drop(self, truths: Values, source: Values, build: Values) -> SampledFigure | None:
        """The drop of the first score; None if it cannot be measured."""
        if not self.shows_something(source, truths):
            return None
        drop = self._compare(truths, source, build)[2][0][1]
        return drop if np.isfinite(drop.value) else None

    def compute_parity(self, source: Values, build: Values) -> Agreement | None:
        """Agreement of `build` with `source`; None if the source predicts the same for all samples."""
        if not self.shows_something(source):
            return None
        same = mean_from_samples(self.compute_sample_parity(source, build), self.groups)
        return Agreement(same.value, same.interval(CONFIDENCE))

    def observe(
        self,
        truths: Values | None,
        source: Values,
        build: Values,
        confidence: float,
        about: str,
        labels: Sequence[str] = (),
    ) -> dict[str, Observation]:
        """Figures for a policy, as fractions: `agreement`, and with truths `score` and `drop`, also by the score's name.

        `labels` name the classes that exist; those that do not occur widen the intervals of means over classes, and are named.
        """

        def make(figure: Share | SampledFigure, said: str) -> Observation:
            low, high = figure.interval(confidence)
            return Observation(figure.value, low, high, about=said, tail=figure)

        figures = {}
        if self.shows_something(source):
            figures["agreement"] = make(
                mean_from_samples(self.compute_sample_parity(source, build), self.groups), about
            )
        if truths is None:
            return figures
        mine, _, compared = self._compare(truths, source, build, labels)
        absent = describe_absent_classes(labels, mine.occurring)
        for name, (own, drop) in zip(self.scores, compared, strict=True):
            said = f"{name}, {about}" if len(self.scores) > 1 else about
            said += f"; {absent}" if absent and self.find_score(name).over_classes else ""
            figures |= {name: make(own, said), f"drop of {name}": make(drop, said)}
        return figures | {"score": figures[self.score], "drop": figures[f"drop of {self.score}"]}


@lru_cache(maxsize=8)
def measure_scores(task: TaskContract, truths: bytes, predictions: bytes) -> Measured:
    """Scores pickled predictions on pickled truths; cached because every comparison uses the source model's again.

    If a score is not a mean, a sample's part is the score's loss without it (the jackknife).
    """
    true, predicted = pickle.loads(truths), pickle.loads(predictions)
    gathered, count = task.gather(true, predicted), task.count_units(true)
    spread = task.spread_truths(gathered)
    effects = tuple(find_largest_effect(amount) for amount in spread)
    over_classes = (
        amount
        for name, amount in zip(task.scores, spread, strict=False)
        if task.find_score(name).over_classes
    )
    totals = next((amount.sum(axis=1) for amount in over_classes), np.zeros(0))
    occurring = frozenset(np.flatnonzero(totals).tolist())
    if type(task).compute_scores is TaskContract.compute_scores:
        parts = gathered if task.groups is None else task.groups.add_up(gathered)
        return Measured(gathered, gathered.mean(axis=0), parts, count, True, effects, occurring)
    units = np.arange(count) if task.groups is None else task.groups.members
    groups = min(int(units.max(initial=-1)) + 1, MOST_PARTS)
    member = units % max(groups, 1)
    whole, by_class = (
        scores[0] for scores in task.compute_all_scores(gathered, np.ones((1, count)))
    )
    amounts = task.spread_class_truths(gathered)
    of_class = tuple(
        find_largest_effect(amounts[place : place + 1]) if amounts[place].any() else None
        for place in range(len(by_class))
    )
    if groups < 2:
        parts, class_parts = np.zeros((groups, len(whole))), np.zeros((groups, len(by_class)))
    else:
        others = (np.arange(groups)[:, None] != member).astype(np.float64)
        without, class_without = task.compute_all_scores(gathered, others)
        left = (count - np.bincount(member))[:, None]
        parts, class_parts = left * (whole - without), left * (by_class - class_without)
    return Measured(
        gathered, whole, parts, count, False, effects, occurring, by_class, class_parts, of_class
    )


MOST_NAMED = 5
"""How many of the classes that do not occur a message names."""


def describe_absent_classes(labels: Sequence[str], occurring: Container[int]) -> str:
    """`2 of 80 classes do not occur (toaster, hair drier): no sample shows what became of them`; empty if all occur."""
    absent = [labels[place] for place in find_absent_classes(labels, occurring)]
    if not absent:
        return ""
    exist = sum(label not in NO_CLASS for label in labels)
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    named = ", ".join(map(escape, absent[:MOST_NAMED])) + more
    what = "1 class does" if len(absent) == 1 else f"{len(absent)} of {exist} classes do"
    return f"{what} not occur ({named}): no sample shows what became of {'it' if len(absent) == 1 else 'them'}"


def require_labels(card: ModelCard, classes: int | None, task: Task) -> None:
    """Raises BadInputError if the card's labels and the outputs differ in number."""
    if card.labels and classes is not None and len(card.labels) != classes:
        problem = f"{card.name}: the model card has {len(card.labels)} labels"
        raise BadInputError(f"{problem}, but its {task} output has {classes} classes")
