"""A score that a plug-in or a Python program brought, from the stored parts of the samples: section 8.1.1 of the dossier format."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.metrics.sampled import Rule
from optpipe.core.metrics.scores import Score
from optpipe.evaluate.result import ScoreRule
from optpipe.evaluate.tasks.contract import TaskContract, Values


class SampledScore(TaskContract):
    """One score by its rule; a prediction is the sample's `(value, weight, group)`, and a truth is not needed."""

    names_classes: ClassVar[bool] = False

    def __init__(self, name: str, stated: ScoreRule) -> None:
        self.scores = (name,)  # type: ignore[misc]  # of this one score, not of a class of tasks
        self._stated = stated

    def find_score(self, name: str) -> Score:
        stated = self._stated
        return Score(
            name,
            stated.title,
            stated.lower_is_better,
            over_classes=stated.rule is Rule.CLASS_MEAN,
        )

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        return np.array(predictions, np.float64).reshape(len(predictions), 3)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        value, weight, group = gathered.T
        with np.errstate(invalid="ignore", divide="ignore"):
            if self._stated.rule is Rule.RATIO:
                return as_column(weights @ value / (weights @ weight))
            shares, occurring = np.zeros(len(weights)), np.zeros(len(weights))
            for number in np.unique(group):
                mine = group == number
                sums, counted = weights[:, mine] @ value[mine], weights[:, mine] @ weight[mine]
                shares += np.divide(sums, counted, out=np.zeros_like(sums), where=counted > 0)
                occurring += counted > 0
            return as_column(shares / occurring)

    def spread_truths(self, gathered: Any) -> Sequence[NDArray[np.float64]]:
        _, weight, group = gathered.T
        if self._stated.rule is Rule.RATIO:
            return [weight[None]]
        return [np.stack([weight * (group == number) for number in np.unique(group)])]


def as_column(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores (rows,) as (rows, 1), none of them above 1."""
    column: NDArray[np.float64] = np.minimum(scores, 1.0)[:, None]
    return column


class MeanScore(SampledScore):
    """A ratio whose weights are all 1 and values at most 1: a mean over samples, with the exact interval of a share where it is one."""

    compute_scores = TaskContract.compute_scores

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        values: NDArray[np.float64] = super().gather(truths, predictions)[:, :1]
        return values

    def spread_truths(self, gathered: Any) -> Sequence[NDArray[np.float64]]:
        return ()


def make_sampled_score(name: str, stated: ScoreRule, source: Values, build: Values) -> SampledScore:
    """The score of the parts of two models."""
    every = [part for parts in (source, build) for part in parts]
    plain = all(weight == 1 and value <= 1 for value, weight, _ in every)
    make = MeanScore if plain and stated.rule is Rule.RATIO else SampledScore
    return make(name, stated)


def find_mismatch(stated: ScoreRule, source: Values, build: Values) -> str | None:
    """Why the parts of two models cannot be compared; None if they can."""
    if stated.rule is Rule.CLASS_MEAN and any(
        before[2] != after[2] for before, after in zip(source, build, strict=True)
    ):
        return "a sample's group differs between the models: with this rule it may depend on the truth alone"
    return None
