"""Classification of images, texts, or tensors: top-1 accuracy with exact intervals."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.metrics.scores import TOP1
from optpipe.evaluate.result import Accuracy, Agreement, EvaluatedModel
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.task_data import find_label_indices
from optpipe.stats.paired import (
    CONFIDENCE,
    Groups,
    compare_macro_f1,
    figure_from_samples,
    mean_from_samples,
    measure_macro_f1,
)

TOP_K = 5


class Classification(TaskContract):
    """A prediction lists the best classes, best first, at most TOP_K; a truth is a class index."""

    form: ClassVar[str] = "(n, classes)"
    scores: ClassVar[tuple[str, ...]] = (TOP1.name,)
    truth_column: ClassVar[str] = "class"
    prediction_column: ClassVar[str] = "best"
    names_classes: ClassVar[bool] = False

    def require_model(self, card: ModelCard) -> None:
        if sum(size != 1 for size in (card.outputs[0].shape if card.outputs else ())[1:]) > 1:
            super().require_model(card)

    def count_classes(self, card: ModelCard) -> int | None:
        return card.outputs[0].classes if card.outputs else None

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        if classes is None:
            return None
        indices = find_label_indices(samples, card, classes)
        return None if indices is None else indices.tolist()

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        """Equal scores put the lower class first, as argmax does."""
        scores = outputs[card.outputs[0].name]
        return list_best_classes(scores.reshape(len(scores), -1))

    def take_as_truths(self, predictions: Values) -> Values:
        return [prediction[0] for prediction in predictions]

    def add_scores(
        self,
        row: EvaluatedModel,
        truths: Values,
        source: Values,
        build: Values,
        labels: Sequence[str],
        classes: int,
    ) -> EvaluatedModel:
        arrays = (np.array(values) for values in (source, build, truths))
        accuracy = compute_accuracy(*arrays, top5=classes > TOP_K, groups=self.groups)
        return replace(row, accuracy=accuracy)

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        return np.equal([prediction[0] for prediction in predictions], truths).astype(np.float64)[
            :, None
        ]

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        return self.gather(self.take_as_truths(source), build)[:, 0]

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        """False if the source model predicts one class for all samples."""
        return len({prediction[0] for prediction in source}) > 1

    def compute_parity(self, source: Values, build: Values) -> Agreement | None:
        return compute_agreement(np.array(source), np.array(build), self.groups)


def list_best_classes(scores: np.ndarray) -> list[list[int]]:
    best = np.argsort(-np.asarray(scores, np.float32), axis=1, kind="stable")[:, :TOP_K]
    classes: list[list[int]] = best.tolist()
    return classes


def compute_agreement(
    source: NDArray[np.int64], build: NDArray[np.int64], groups: Groups | None = None
) -> Agreement | None:
    """Share of equal best classes, both (samples, k); None if the source model predicts one class for all samples."""
    before, after = source[:, 0], build[:, 0]
    if np.unique(before).size < 2:
        return None
    same = mean_from_samples((before == after).astype(np.float64), groups)
    return Agreement(same.value, same.interval(CONFIDENCE))


def compute_accuracy(
    source: NDArray[np.int64],
    build: NDArray[np.int64],
    labels: NDArray[np.int64],
    *,
    top5: bool,
    groups: Groups | None = None,
) -> Accuracy:
    """Accuracy on `labels` (samples,) and the drop from the source model; both predictions are (samples, k), best first."""
    before, after = source[:, 0], build[:, 0]
    right, was_right = after == labels, before == labels
    lost, won, n = int((was_right & ~right).sum()), int((right & ~was_right).sum()), len(labels)
    drop = figure_from_samples(
        (lost - won) / n, was_right * 1.0 - right, n, (-1.0, 1.0), groups=groups
    )
    own = mean_from_samples(right.astype(np.float64), groups)
    classes = int(max(source.max(), build.max(), labels.max())) + 1
    f1, f1_drop = (
        measure_macro_f1(labels, after, classes, groups),
        compare_macro_f1(labels, before, after, classes, groups),
    )
    among_best = (build == labels[:, None]).any(axis=1).astype(np.float64)
    within = mean_from_samples(among_best, groups) if top5 else None
    return Accuracy(
        top1=float(right.mean()),
        top1_ci=own.interval(CONFIDENCE),
        top5=None if within is None else within.value,
        top5_ci=None if within is None else within.interval(CONFIDENCE),
        macro_f1=f1.value,
        macro_f1_ci=f1.interval(CONFIDENCE),
        macro_f1_drop=f1_drop.value,
        macro_f1_drop_ci=f1_drop.interval(CONFIDENCE),
        drop=drop.value,
        drop_ci=drop.interval(CONFIDENCE),
        lost=lost,
        won=won,
    )
