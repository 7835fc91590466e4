"""Agreement and accuracy of predictions: computed once when an artifact is evaluated, and again from the stored predictions."""

from typing import TYPE_CHECKING

import numpy as np

from optpipe.evaluate.result import Accuracy, Agreement, MovedPredictions
from optpipe.stats.paired import (
    compute_difference_interval,
    compute_macro_f1,
    compute_macro_f1_difference,
    compute_mcnemar_p_value,
    compute_share_interval,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_MOVED_PAIRS = 10
"""How many pairs of classes between which predictions moved are listed."""


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
