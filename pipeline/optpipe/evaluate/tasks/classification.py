"""Classification of images, texts or tensors: the best classes of each sample, top-1 accuracy, exact intervals."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.verdict import Observation, Tail
from optpipe.evaluate.result import Accuracy, Agreement, MovedPredictions
from optpipe.evaluate.tasks.contract import DropCost, TaskContract, Values, suggest_task
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.task_data import find_label_indices
from optpipe.stats.paired import (
    Interval,
    PairedDifference,
    Share,
    compute_difference_interval,
    compute_macro_f1,
    compute_macro_f1_difference,
    compute_mcnemar_p_value,
    compute_share_interval,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP_K = 5
MAX_MOVED_PAIRS = 10
"""How many pairs of classes between which predictions moved are listed."""


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


def compute_agreement(source: "NDArray[np.int64]", found: "NDArray[np.int64]") -> Agreement | None:
    """How often the best class is the source model's; both are (samples, k), the best first.

    None where the source model predicts one class for all samples.
    """
    before, after = source[:, 0], found[:, 0]
    if np.unique(before).size < 2:
        return None
    same = before == after
    pairs, counts = np.unique(np.stack([before, after], 1)[~same], axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_MOVED_PAIRS]
    return Agreement(
        share=float(same.mean()),
        ci=compute_share_interval(int(same.sum()), len(same)).bounds,
        moved=tuple(MovedPredictions(int(pairs[i, 0]), int(pairs[i, 1]), int(counts[i])) for i in order),
    )


def compute_accuracy(
    source: "NDArray[np.int64]", found: "NDArray[np.int64]", labels: "NDArray[np.int64]", *, top5: bool
) -> Accuracy:
    """Accuracy on `labels` (samples,) and the drop from the source model; both predictions are (samples, k), the best first."""
    before, after = source[:, 0], found[:, 0]
    right, was_right = after == labels, before == labels
    lost, won, n = int((was_right & ~right).sum()), int((right & ~was_right).sum()), len(labels)
    classes = int(max(source.max(), found.max(), labels.max())) + 1
    f1, was_f1 = (compute_macro_f1(labels, each, classes) for each in (after, before))
    own = found is source
    return Accuracy(
        top1=float(right.mean()),
        top1_ci=compute_share_interval(int(right.sum()), n).bounds,
        top5=float((found == labels[:, None]).any(axis=1).mean()) if top5 else None,
        macro_f1=f1,
        macro_f1_drop=was_f1 - f1,
        macro_f1_drop_ci=(0.0, 0.0) if own else compute_macro_f1_difference(labels, before, after, classes).bounds,
        drop=(lost - won) / n,
        drop_ci=(0.0, 0.0) if own else compute_difference_interval(lost, won, n).bounds,
        lost=lost,
        won=won,
        mcnemar_p=compute_mcnemar_p_value(lost, won),
    )
