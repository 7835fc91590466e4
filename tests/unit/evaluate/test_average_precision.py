import contextlib
import io

import numpy as np
import pytest
from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from optpipe.evaluate.tasks.detection import Detection

TASK = Detection()


def draw(seed: int, images: int = 12, classes: int = 3, noise: float = 4.0):
    """Truths with some crowds, and predictions: displaced truths, doubles and false boxes."""
    rng = np.random.default_rng(seed)
    truths, predictions = [], []
    for _ in range(images):
        rows, found = [], []
        for _ in range(rng.integers(0, 6)):
            box = [*rng.uniform(0, 60, 2), *rng.uniform(5, 40, 2)]
            rows.append([*box, float(rng.integers(classes)), box[2] * box[3], float(rng.random() < 0.1)])
            for _ in range(rng.integers(0, 3)):
                moved = np.array(box) + rng.normal(0, noise, 4)
                found.append(
                    [*moved[:2], *np.maximum(moved[2:], 1), round(float(rng.random()), 2), float(rng.integers(classes))]
                )
            if rng.random() < 0.7:
                found.append([*box, float(rng.random()), rows[-1][4]])
        truths.append(rows)
        predictions.append(found)
    return truths, predictions


def evaluate(reference_type, evaluator_type, truths, predictions, classes: int = 3):
    """AP, AP50 and AP75 by a library."""
    rows = [(image, row) for image, each in enumerate(truths) for row in each]
    document = {
        "images": [{"id": image} for image in range(len(truths))],
        "categories": [{"id": label, "name": str(label)} for label in range(classes)],
        "annotations": [
            {"id": number, "image_id": image, "category_id": int(row[4]), "bbox": row[:4], "area": row[5], "iscrowd": int(row[6])}
            for number, (image, row) in enumerate(rows, 1)
        ],
        "info": {},
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        reference = reference_type()
        reference.dataset = document
        reference.createIndex()
        listed = [
            {"image_id": image, "category_id": int(row[5]), "bbox": list(map(float, row[:4])), "score": row[4]}
            for image, each in enumerate(predictions)
            for row in each
        ]
        evaluated = evaluator_type(reference, reference.loadRes(listed), "bbox")
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
    return evaluated.stats[:3]


@given(seed=st.integers(0, 10_000))
def test_the_figures_are_those_of_two_libraries(seed: int) -> None:
    truths, predictions = draw(seed)
    if not any(row[6] == 0 for rows in truths for row in rows) or not any(predictions):
        return
    mine = TASK.compute_scores(TASK.gather(truths, predictions), np.ones((1, len(truths))))[0]
    assert mine == pytest.approx(evaluate(COCO, COCOeval, truths, predictions), abs=1e-6)
    assert mine == pytest.approx(evaluate(FasterCOCO, COCOeval_faster, truths, predictions), abs=1e-6)


def test_a_weight_is_an_image_that_often() -> None:
    truths, predictions = draw(7)
    weights = np.random.default_rng(0).integers(0, 3, len(truths))
    repeated = [place for place, weight in enumerate(weights) for _ in range(weight)]
    weighted = TASK.compute_scores(TASK.gather(truths, predictions), weights[None].astype(float))[0]
    expected = TASK.gather([truths[place] for place in repeated], [predictions[place] for place in repeated])
    assert weighted == pytest.approx(TASK.compute_scores(expected, np.ones((1, len(repeated))))[0], abs=0.01)


@pytest.mark.slow
def test_planted_faults_cost_points_with_intervals_that_say_so() -> None:
    truths, _ = draw(11, images=60)
    rng = np.random.default_rng(0)
    source = [
        [[*(np.array(row[:4]) + rng.normal(0, 0.8, 4)).clip(0.5), 0.5 + rng.random() / 2, row[4]] for row in rows]
        for rows in truths
    ]
    shifted = [[[row[0] + 1.28, row[1] + 1.28, *row[2:]] for row in rows] for rows in source]  # 2 % of 64 pixels
    swapped = [[[*row[:5], {0: 1, 1: 0, 2: 2}[int(row[5])]] for row in rows] for rows in source]
    doubled = [
        [each for row in rows for each in (row, [row[0] + 0.3, *row[1:4], row[4] * 0.99, row[5]])] for rows in source
    ]
    for fault in (shifted, swapped, doubled):
        scored = TASK.score_predictions(truths, source, fault, ("a", "b", "c"))
        assert scored.scores[0].drop_ci[0] > 0
    by_class = {
        each.label: each.drop for each in TASK.score_predictions(truths, source, swapped, ("a", "b", "c")).classes
    }
    assert by_class["c"] == pytest.approx(0)
    assert min(by_class["a"], by_class["b"]) > 0.3
    same = TASK.score_predictions(truths, source, source).scores[0]
    assert same.drop == 0
    assert same.drop_ci[0] < 0 < same.drop_ci[1]


@pytest.mark.slow
def test_the_interval_of_the_drop_covers_the_truth() -> None:
    """Two detectors that differ in how far boxes are displaced; the truth is that of a large set."""

    def detect(seed: int, images: int):
        rng = np.random.default_rng(seed)
        truths, found = [], ([], [])
        for _ in range(images):
            boxes = [[*rng.uniform(0, 60, 2), *rng.uniform(10, 40, 2)] for _ in range(rng.integers(1, 5))]
            rows = [[*box, float(rng.integers(2)), 100.0, 0.0] for box in boxes]
            truths.append(rows)
            for place, noise in enumerate((1.0, 1.6)):
                kept = [row for row in rows if rng.random() < 0.85]
                found[place].append(
                    [[*(np.array(row[:4]) + rng.normal(0, noise, 4)).clip(0.5), rng.random(), row[4]] for row in kept]
                )
        return truths, *found

    truths, before, after = detect(10_000, 1500)
    ones = np.ones((1, 1500))
    whole = [TASK.compute_scores(TASK.gather(truths, each), ones)[0, 0] for each in (before, after)]
    hits, runs = 0, 60
    for seed in range(runs):
        truths, before, after = detect(seed, 60)
        low, high = TASK.score_predictions(truths, before, after).scores[0].drop_ci
        hits += low <= whole[0] - whole[1] <= high
    assert 0.87 <= hits / runs <= 1
