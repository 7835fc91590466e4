"""Scores that count what is right, found, and true: F1, precision, and recall as micro-averages."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.metrics.scores import F1, PRECISION, RECALL
from optpipe.evaluate.tasks.contract import TaskContract


class CountedScores(TaskContract):
    """`gather` gives the counts of what is right, predicted, and true, (samples, kinds, 3), as floats."""

    scores: ClassVar[tuple[str, ...]] = (F1.name, PRECISION.name, RECALL.name)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """F1, precision, and recall over all kinds together, (rows, 3); NaN where there is nothing to count."""
        right, predicted, true = (weights @ gathered.sum(axis=1)).T
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack(
                [2 * right / (predicted + true), right / predicted, right / true], axis=1
            )

    def spread_truths(self, gathered: Any) -> list[NDArray[np.float64]]:
        return [gathered[:, :, 2].sum(axis=1)[None]] * len(self.scores)

    def compute_class_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """F1 of each kind that has a name, (rows, kinds)."""
        counts = np.moveaxis(self.select_named(gathered), 2, 0)
        right, predicted, true = (weights @ counted for counted in counts)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(2 * right / (predicted + true))

    def spread_class_truths(self, gathered: Any) -> NDArray[np.float64]:
        return np.asarray(self.select_named(gathered)[:, :, 2].T)

    def select_named(self, gathered: Any) -> NDArray[np.float64]:
        """The counts of the kinds that scores are listed by."""
        return np.asarray(gathered)
