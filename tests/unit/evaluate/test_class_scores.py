"""Scores by class, top-5, and macro F1 have intervals: joint ones by class, none for a class without truths, and none of width zero."""

import numpy as np
import pytest

from optpipe.evaluate.tasks.classification import compute_accuracy
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.evaluate.tasks.texts import TokenClassification
from optpipe.evaluate.tasks.values import MultiLabel
from optpipe.stats.paired import Groups


def make_masks(classes):
    return [encode_mask(np.full((4, 4), label, np.uint8)) for label in classes]


def make_boxes(classes):
    truths = [[[10.0, 10.0, 20.0, 20.0, float(label), 400.0, 0.0]] for label in classes]
    return truths, [[[10.0, 10.0, 20.0, 20.0, 0.9, float(label)]] for label in classes]


OF_CLASS_1 = [0, 1] * 20
LOST = [0] * 40
WITH_ONE_MORE = [0, 7] * 20


def score(name, found):
    if name == "detection":
        truths, source = make_boxes(OF_CLASS_1)
        return Detection().score_predictions(truths, source, make_boxes(found)[1])
    if name == "segmentation":
        truths = make_masks(OF_CLASS_1)
        return Segmentation().score_predictions(truths, truths, make_masks(found))
    if name == "multi-label":
        truths = [[label] for label in OF_CLASS_1]
        return MultiLabel().score_predictions(truths, truths, [[label] for label in found])
    truths = [[f"B-{label}"] for label in OF_CLASS_1]
    return TokenClassification().score_predictions(truths, truths, [[f"B-{one}"] for one in found])


TASKS = ["detection", "segmentation", "multi-label", "token-classification"]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("found", [OF_CLASS_1, LOST, WITH_ONE_MORE], ids=["same", "lost", "other"])
def test_each_class_that_occurs_has_an_interval_that_holds_its_score(name, found):
    classes = score(name, found).classes
    assert len(classes) == 2
    for one in classes:
        for value, (low, high) in ((one.value, one.ci), (one.drop, one.drop_ci)):
            assert low <= value <= high
            assert low < high


@pytest.mark.parametrize("name", TASKS)
def test_a_class_of_one_sample_decides_nothing(name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.OF_CLASS_1", [0] * 39 + [1])
    rare = score(name, [0] * 39 + [1]).classes[1]
    assert rare.value == pytest.approx(1)
    assert rare.drop_ci == (-1, 1)


def test_a_class_that_only_the_predictions_have_has_no_interval():
    truths = make_masks(LOST)
    stray = make_masks([0] * 39 + [2])
    found = Segmentation().score_predictions(truths, stray, stray).classes
    assert [one.ci is None for one in found] == [False, True]


def test_intervals_by_class_hold_together_and_allow_for_groups():
    labels = [str(at % 10) for at in range(200)]
    truths = [[f"B-{label}"] for label in labels]
    few, many = truths[:40] * 5, truths
    alone = TokenClassification().score_predictions(few, few, few).classes
    grouped = TokenClassification().grouped_by(Groups(np.arange(200) % 40))
    together = grouped.score_predictions(many, many, many).classes
    assert len(alone) == len(together) == 10
    for one, other in zip(alone, together, strict=True):
        assert other.drop_ci[1] > one.drop_ci[1]


@pytest.mark.parametrize("groups", [None, Groups(np.arange(60) // 2), Groups(np.zeros(60, int))])
def test_top5_and_macro_f1_have_intervals(groups):
    labels = np.arange(60) % 7
    best = np.stack([(labels + at) % 7 for at in range(5)], axis=1)
    found = compute_accuracy(best, best, labels, top5=True, groups=groups)
    for value, (low, high) in ((found.top5, found.top5_ci), (found.macro_f1, found.macro_f1_ci)):
        assert low < high
        assert low <= value <= high
    assert compute_accuracy(best, best, labels, top5=False).top5_ci is None
