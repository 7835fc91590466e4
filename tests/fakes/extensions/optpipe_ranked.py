"""Scores for optpipe's classifiers: top-3 accuracy, balanced accuracy, and the Brier score."""

import numpy as np

from optpipe.core.metrics.sampled import EvaluatedSample, Part, Rule, SampleScore

CLASSIFIERS = ("classification", "text-classification")


class Top3(SampleScore):
    name = "top3"
    title = "top-3 accuracy"
    tasks = CLASSIFIERS

    def measure(self, sample: EvaluatedSample) -> float:
        return float(sample.truth in sample.prediction[:3])


class Balanced(SampleScore):
    name = "balanced"
    title = "balanced accuracy"
    rule = Rule.CLASS_MEAN
    tasks = CLASSIFIERS

    def measure(self, sample: EvaluatedSample) -> Part:
        return Part(float(sample.prediction[0] == sample.truth), group=sample.truth)


class Brier(SampleScore):
    name = "brier"
    title = "Brier score, halved"
    lower_is_better = True
    tasks = CLASSIFIERS

    def measure(self, sample: EvaluatedSample) -> float:
        (logits,) = sample.outputs.values()
        odds = np.exp(np.asarray(logits, np.float64).ravel() - np.max(logits))
        apart = odds / odds.sum()
        apart[sample.truth] -= 1
        return float(apart @ apart / 2)
