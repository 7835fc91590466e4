"""The scores of tasks. Their names are units of a policy: `"0.5 AP"` is half a point out of 100."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """One score of a task, computed from the predictions and the truths of a set of samples, and shown as a fraction."""

    name: str
    """As in records, and as the unit of a limit: `mIoU`."""
    title: str
    lower_is_better: bool = False
    """True for an error, whose drop is a rise."""
    effect: float = 1.0
    """The largest change of its sum over samples by one sample, where the task does not tell how truths spread over samples."""
    over_classes: bool = False
    """Whether it is a mean over classes, not a share of all samples together."""

    def find_effect(self, before: float) -> float:
        """The `effect` on a score that is `before` for the source model."""
        return self.effect

    def __str__(self) -> str:
        return self.name


class RootError(Score):
    """A root, on which a sample has the more effect the smaller it is."""

    LEAST = 0.05
    """A source model without an error would have no limit to the effect of one sample."""

    def find_effect(self, before: float) -> float:
        return self.effect / (2 * max(before, self.LEAST))


OF_RANKS = 6 * 15**-0.5
"""Root mean square effect of a pair at a random rank: 6 d² / n² for d ranks, with d / n the difference of two uniform values."""
OF_SQUARES, OF_DISTANCES = 12**0.5, 2**0.5
"""Root mean square effect of a sample whose prediction is drawn from the truths instead: the difference of two normal values
with variance 1 has variance 2, so that its square has the mean square 12, and its absolute value 2."""

TOP1 = Score("top1", "top-1 accuracy")
MIOU = Score("mIoU", "mean intersection over union", over_classes=True)
PIXEL_ACCURACY = Score("pixel-accuracy", "share of right pixels")
AP = Score("AP", "average precision over ten overlaps", over_classes=True)
AP50 = Score("AP50", "average precision at an overlap of 0.5", over_classes=True)
AP75 = Score("AP75", "average precision at an overlap of 0.75", over_classes=True)
SPEARMAN = Score("Spearman", "rank correlation with ratings", effect=OF_RANKS)
F1 = Score("F1", "harmonic mean of precision and recall")
EM = Score("EM", "share of exact answers")
RECALL = Score("recall", "share of what is true that is found")
PRECISION = Score("precision", "share of what is found that is true")
R2 = Score("R2", "share of the variance that is explained", effect=OF_SQUARES)
RMSE = RootError("RMSE", "root mean square error", lower_is_better=True, effect=OF_SQUARES)
MAE = Score("MAE", "mean absolute error", lower_is_better=True, effect=OF_DISTANCES)

SCORES: tuple[Score, ...] = (
    TOP1,
    MIOU,
    PIXEL_ACCURACY,
    AP,
    AP50,
    AP75,
    SPEARMAN,
    F1,
    EM,
    RECALL,
    PRECISION,
    R2,
    RMSE,
    MAE,
)
"""Every score, in the order in which units are listed."""
SCORE_NAMES = tuple(score.name for score in SCORES)
_BY_NAME = {score.name: score for score in SCORES}
ERROR_NAMES = frozenset(score.name for score in SCORES if score.lower_is_better)


def find_score(name: str) -> Score:
    """The score called `name`: `F1@25%` is F1 at a threshold. One that optpipe does not know is a user's, where more is better."""
    return _BY_NAME.get(name.partition("@")[0]) or Score(name, name)
