"""Classification of images, texts or tensors: the best classes of each sample, top-1 accuracy, exact intervals."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.observation import Observation, Tail
from optpipe.evaluate.result import Accuracy, Agreement
from optpipe.evaluate.scores import compute_accuracy, compute_agreement
from optpipe.evaluate.tasks.contract import DropCost, TaskContract, Values, suggest_task
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.task_data import find_label_indices
from optpipe.stats.paired import (
    Interval,
    PairedDifference,
    Share,
    compute_difference_interval,
    compute_share_interval,
)

TOP_K = 5


class Classification(TaskContract):
    """A prediction is the list of the best classes in falling order, at most TOP_K; a truth is the class's index.

    Shares have exact intervals (Clopper-Pearson), drops Tango's for pairs.
    """

    score: ClassVar[str] = "top1"
    truth_column: ClassVar[str] = "class"
    prediction_column: ClassVar[str] = "best"
    names_classes: ClassVar[bool] = False

    def require_model(self, card: ModelCard) -> None:
        """Scores along one axis of the first output."""
        shape = card.outputs[0].shape if card.outputs else ()
        if sum(size != 1 for size in shape[1:]) > 1:
            raise BadInputError(
                f"{card.name}: classification needs a first output of (n, classes), but {card.outputs[0].name} has shape"
                f" {'×'.join(map(str, shape))}{suggest_task(card)}"
            )

    def count_classes(self, card: ModelCard) -> int | None:
        """As the first output says."""
        return card.outputs[0].classes if card.outputs else None

    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:
        """Class indices from the samples' labels."""
        if classes is None:
            return None
        found = find_label_indices(samples, card, classes)
        return None if found is None else found.tolist()

    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:  # noqa: ARG002
        """Of equal scores the lower class comes first, as argmax has it."""
        scores = outputs[card.outputs[0].name]
        return list_best_classes(scores.reshape(len(scores), -1))

    def take_as_truths(self, predictions: Values) -> Values:
        """The best class."""
        return [each[0] for each in predictions]

    def score_predictions(
        self,
        truths: Values,
        source: Values,
        found: Values,
        labels: Sequence[str],  # noqa: ARG002
        classes: int,
    ) -> Accuracy:
        """Top-1, top-5 where more classes are known, and macro F1."""
        mine = np.array(found)
        theirs = mine if found is source else np.array(source)
        return compute_accuracy(theirs, mine, np.array(truths), top5=classes > TOP_K)

    def measure_drop(self, truths: Values, source: Values, found: Values) -> DropCost | None:
        """Of top-1 accuracy; None where the source model predicts one class for all samples."""
        before, after, right = (
            np.array([each[0] for each in source]),
            np.array([each[0] for each in found]),
            np.array(truths),
        )
        if np.unique(before).size < 2:
            return None
        was, now = before == right, after == right
        lost, won, n = int((was & ~now).sum()), int((now & ~was).sum()), len(right)
        return DropCost((lost - won) / n, compute_difference_interval(lost, won, n).bounds)

    def compute_parity(self, source: Values, found: Values) -> Agreement | None:
        """The share of samples with the same best class."""
        return compute_agreement(np.array(source), np.array(found))

    def observe(
        self, truths: Values | None, source: Values, found: Values, confidence: float, about: str
    ) -> dict[str, Observation]:
        """`agreement`, `top1` and `drop`."""
        before, after = np.array([each[0] for each in source]), np.array([each[0] for each in found])
        n, figures = len(before), {}
        if np.unique(before).size > 1:
            same = int((after == before).sum())
            figures["agreement"] = _figure(same / n, compute_share_interval(same, n, confidence), about, Share(same, n))
        if truths is not None:
            right, was = after == np.array(truths), before == np.array(truths)
            lost, won, hits = int((was & ~right).sum()), int((right & ~was).sum()), int(right.sum())
            figures["top1"] = _figure(hits / n, compute_share_interval(hits, n, confidence), about, Share(hits, n))
            interval = compute_difference_interval(lost, won, n, confidence)
            figures["drop"] = _figure((lost - won) / n, interval, about, PairedDifference(lost, won, n))
            figures |= {"score": figures["top1"], f"drop of {self.score}": figures["drop"]}
        return figures


def list_best_classes(scores: "np.ndarray") -> list[list[int]]:
    """From (samples, classes) scores, the best first."""
    best = np.argsort(-np.asarray(scores, np.float32), axis=1, kind="stable")[:, :TOP_K]
    found: list[list[int]] = best.tolist()
    return found


def _figure(value: float, interval: Interval, about: str, tail: Tail) -> Observation:
    return Observation(value, interval.low, interval.high, about=about, tail=tail)
