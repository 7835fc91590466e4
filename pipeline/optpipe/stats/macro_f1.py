"""Macro F1, and the interval of what one classifier has more of it than another on the same samples."""

from typing import TYPE_CHECKING

from optpipe.stats.paired import CONFIDENCE, Interval, compute_normal_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PSEUDO_PAIRS = 2
"""Added to the pairs that differ, one for each classifier (Bonett & Price, Statistics in Medicine 31, 2012): two that never
differ on these samples are not proven equal."""


def compute_macro_f1(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> float:
    """The mean over classes, of those that occur, of the harmonic mean of precision and recall.

    `labels` and `predicted` have the shape (samples,).
    """
    import numpy as np

    hits = np.bincount(labels[labels == predicted], minlength=classes)
    sizes = _sizes(labels, predicted, classes)
    there = sizes > 0
    return float(np.mean(2 * hits[there] / sizes[there])) if there.any() else 0.0


def compute_macro_f1_difference(
    labels: "NDArray[np.int64]",
    first: "NDArray[np.int64]",
    second: "NDArray[np.int64]",
    classes: int,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The interval of the first's macro F1 less the second's, by the delta method (Takahashi et al., Applied Intelligence 52,
    2022) with PSEUDO_PAIRS; all arrays have the shape (samples,). It is never empty.
    """
    import numpy as np

    n = len(labels)
    apart = _influence(labels, first, classes) - _influence(labels, second, classes)
    typical = _weight_of_a_pair(labels, first, second, classes)
    value = compute_macro_f1(labels, first, classes) - compute_macro_f1(labels, second, classes)
    variance = (float(np.sum(apart**2)) + PSEUDO_PAIRS * typical**2) / (n + PSEUDO_PAIRS) ** 2
    half = compute_normal_quantile(confidence) * variance**0.5
    return Interval(max(-1.0, value - half), min(1.0, value + half))


def _sizes(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> "NDArray[np.int64]":
    """Per class, as often as it is the label plus as often as it is predicted."""
    import numpy as np

    return np.asarray(np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes))


def _influence(labels: "NDArray[np.int64]", predicted: "NDArray[np.int64]", classes: int) -> "NDArray[np.float64]":
    """What each sample adds to n times the macro F1 (samples,): its derivative by the sample's weight."""
    import numpy as np

    hit, n = labels == predicted, len(labels)
    sizes = _sizes(labels, predicted, classes)
    there = np.maximum(sizes, 1)
    scores = 2 * np.bincount(labels[hit], minlength=classes) / there
    weight = n / there / max(int(np.count_nonzero(sizes)), 1)
    return np.asarray(
        2 * hit * weight[labels] - scores[labels] * weight[labels] - scores[predicted] * weight[predicted]
    )


def _weight_of_a_pair(
    labels: "NDArray[np.int64]", first: "NDArray[np.int64]", second: "NDArray[np.int64]", classes: int
) -> float:
    """By how much n times the macro F1 changes, root mean square over samples, where one classifier is right and one wrong."""
    import numpy as np

    sizes = np.maximum((_sizes(labels, first, classes) + _sizes(labels, second, classes)) / 2, 1)
    present = max(int(np.count_nonzero(np.bincount(labels, minlength=classes))), 1)
    return float(np.sqrt(np.mean((2 * len(labels) / sizes[labels] / present) ** 2)))
