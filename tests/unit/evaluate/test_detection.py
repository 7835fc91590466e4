"""Average precision against two libraries, and every detection head of one and the same scene."""

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

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.detection import Detection
from optpipe.evaluate.tasks.detection_heads import Head, decode_outputs, find_head

TASK = Detection()


def draw(seed: int, images: int = 12, classes: int = 3, noise: float = 4.0):
    """Truths with some crowds, and predictions: displaced truths, doubles and false boxes."""
    rng = np.random.default_rng(seed)
    truths, predictions = [], []
    for _ in range(images):
        rows, found = [], []
        for _ in range(rng.integers(0, 6)):
            box = [*rng.uniform(0, 60, 2), *rng.uniform(5, 40, 2)]
            rows.append(
                [*box, float(rng.integers(classes)), box[2] * box[3], float(rng.random() < 0.1)]
            )
            for _ in range(rng.integers(0, 3)):
                moved = np.array(box) + rng.normal(0, noise, 4)
                moved[2:] = np.maximum(moved[2:], 1)
                found.append([*moved, round(float(rng.random()), 2), float(rng.integers(classes))])
            if rng.random() < 0.7:
                found.append([*box, float(rng.random()), rows[-1][4]])
        truths.append(rows)
        predictions.append(found)
    return truths, predictions


def evaluate(reference_type, evaluator_type, truths, predictions, classes: int = 3):
    rows = [(image, row) for image, each in enumerate(truths) for row in each]
    document = {
        "images": [{"id": image} for image in range(len(truths))],
        "categories": [{"id": label, "name": str(label)} for label in range(classes)],
        "annotations": [
            {
                "id": number,
                "image_id": image,
                "category_id": int(row[4]),
                "bbox": row[:4],
                "area": row[5],
                "iscrowd": int(row[6]),
            }
            for number, (image, row) in enumerate(rows, 1)
        ],
        "info": {},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        reference = reference_type()
        reference.dataset = document
        reference.createIndex()
        listed = [
            {
                "image_id": image,
                "category_id": int(row[5]),
                "bbox": list(map(float, row[:4])),
                "score": row[4],
            }
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
    mine = TASK.compute_scores(TASK.gather(truths, predictions), np.ones((1, len(truths))))[0, :3]
    assert mine == pytest.approx(evaluate(COCO, COCOeval, truths, predictions), abs=1e-6)
    assert mine == pytest.approx(
        evaluate(FasterCOCO, COCOeval_faster, truths, predictions), abs=1e-6
    )


def test_a_weight_is_an_image_that_often() -> None:
    truths, predictions = draw(7)
    weights = np.random.default_rng(0).integers(0, 3, len(truths))
    repeated = [place for place, weight in enumerate(weights) for _ in range(weight)]
    weighted = TASK.compute_scores(TASK.gather(truths, predictions), weights[None].astype(float))[0]
    expected = TASK.gather(
        [truths[place] for place in repeated], [predictions[place] for place in repeated]
    )
    assert weighted == pytest.approx(
        TASK.compute_scores(expected, np.ones((1, len(repeated))))[0], abs=0.01
    )


def test_the_shown_boxes_have_f1_recall_and_score_shifts() -> None:
    truths, _ = draw(3, images=40)
    plain = [[row for row in rows if not row[6]] for rows in truths]
    source = [[[*row[:4], 0.5, row[4]] for row in rows] for rows in plain]
    lower = [
        [[*row[:5][:4], 0.3 - 0.08 * (place % 2), row[4]] for place, row in enumerate(rows)]
        for rows in plain
    ]
    kept = sum(len(rows[::2]) for rows in plain)
    total = sum(map(len, plain))
    scored = {each.name: each for each in TASK.score_predictions(plain, source, lower).scores}
    assert scored["recall"].value == pytest.approx(kept / total)
    assert scored["F1"].value == pytest.approx(2 * kept / (kept + total))
    assert scored["F1"].drop_ci[0] > 0, "AP does not see that boxes fall below the threshold"
    shift = TASK.compute_parity(source, lower).score_shift
    assert shift["boxes"] == total
    assert shift["mean"] == pytest.approx((-0.2 * kept - 0.28 * (total - kept)) / total)
    assert shift["low"] < shift["mean"] < shift["high"]
    figures = TASK.observe(plain, source, lower, 0.95, "")
    assert figures["drop of F1@20%"].value == pytest.approx(0)
    assert figures["drop of F1@25%"].value == pytest.approx(scored["F1"].drop)
    assert figures["F1@40%"].value == 0


@pytest.mark.slow
def test_planted_faults_cost_points_with_intervals_that_say_so() -> None:
    truths, _ = draw(11, images=60)
    rng = np.random.default_rng(0)
    source = [
        [
            [*(np.array(row[:4]) + rng.normal(0, 0.8, 4)).clip(0.5), 0.5 + rng.random() / 2, row[4]]
            for row in rows
        ]
        for rows in truths
    ]
    shifted = [
        [[row[0] + 1.28, row[1] + 1.28, *row[2:]] for row in rows] for rows in source
    ]  # 2 % of 64 pixels
    swapped = [[[*row[:5], {0: 1, 1: 0, 2: 2}[int(row[5])]] for row in rows] for rows in source]
    doubled = [
        [each for row in rows for each in (row, [row[0] + 0.3, *row[1:4], row[4] * 0.99, row[5]])]
        for rows in source
    ]
    for fault in (shifted, swapped, doubled):
        scored = TASK.score_predictions(truths, source, fault, ("a", "b", "c"))
        assert scored.scores[0].drop_ci[0] > 0
    scored = TASK.score_predictions(truths, source, swapped, ("a", "b", "c"))
    by_class = {each.label: each.drop for each in scored.classes}
    assert by_class["c"] == pytest.approx(0)
    assert min(by_class["a"], by_class["b"]) > 0.3
    same = TASK.score_predictions(truths, source, source).scores[0]
    assert same.drop == 0
    assert same.drop_ci[0] < 0 < same.drop_ci[1]


LABELS = ("cat", "dog", "bird")
CORNERS = np.array([[4.0, 6.0, 20.0, 30.0], [40.0, 8.0, 60.0, 24.0], [10.0, 40.0, 26.0, 62.0]])
CLASSES = np.array([0, 2, 1])
SCORES = np.array([0.9, 0.8, 0.7])
CENTERS = np.concatenate(
    [(CORNERS[:, :2] + CORNERS[:, 2:]) / 2, CORNERS[:, 2:] - CORNERS[:, :2]], 1
)


def make_card(*outputs: tuple[str, tuple, str], head=None, labels=LABELS) -> ModelCard:
    image = InputSpec("image", "float32", *((1, 3, 64, 64),) * 3)
    specs = tuple(TensorSpec(name, kind, shape) for name, shape, kind in outputs)
    return ModelCard("m", "s", Task.DETECTION, (image,), specs, labels=labels, head=head or {})


def make_one_hot() -> np.ndarray:
    table = np.full((3, 3), 1e-4)
    table[np.arange(3), CLASSES] = SCORES
    return table


def logit(share: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(share / (1 - share)))


def make_scene(layout: str):
    """Outputs and the card's outputs; YOLO's have each box twice, as their cells do."""
    twice = np.concatenate([CENTERS, CENTERS + np.array([0.4, 0, 0, 0])])
    scores = np.concatenate([make_one_hot(), make_one_hot() * 0.95])
    match layout:
        case "yolov8":
            rows = np.concatenate([twice, scores], 1).T[None]
            return {"o": rows}, make_card(("o", (1, 7, 6), "float32"))
        case "yolov5":
            rows = np.concatenate([twice, np.full((6, 1), 0.5), np.minimum(scores * 2, 2)], 1)[None]
            return {"o": rows}, make_card(("o", (1, 6, 8), "float32"))
        case "boxes6":
            rows = np.concatenate([CORNERS, SCORES[:, None], CLASSES[:, None]], 1)[None]
            return {"o": rows}, make_card(("o", (1, 3, 6), "float32"))
        case "rt-detr":
            outputs = {"logits": logit(make_one_hot())[None], "pred_boxes": CENTERS[None] / 64}
            return outputs, make_card(
                ("logits", (1, 3, 3), "float32"), ("pred_boxes", (1, 3, 4), "float32")
            )
        case "detr":
            none = (1 - make_one_hot().sum(1))[:, None]
            outputs = {
                "logits": np.log(np.concatenate([make_one_hot(), none], 1))[None],
                "boxes": CENTERS[None] / 64,
            }
            return outputs, make_card(
                ("logits", (1, 3, 4), "float32"), ("boxes", (1, 3, 4), "float32")
            )
    outputs = {"b": CORNERS, "l": CLASSES, "s": SCORES}
    return outputs, make_card(
        ("b", ("k", 4), "float32"), ("l", ("k",), "int64"), ("s", ("k",), "float32")
    )


@pytest.mark.parametrize("layout", ["yolov8", "yolov5", "boxes6", "rt-detr", "detr", "torchvision"])
def test_every_layout_is_recognized_and_decoded(layout: str) -> None:
    outputs, card = make_scene(layout)
    head = find_head(card)
    assert head.layout == layout
    (found,) = decode_outputs(outputs, card, head, (64, 64))
    best = found.scores > 0.5
    assert found.labels[best].tolist() == CLASSES.tolist()
    assert found.scores[best] == pytest.approx(SCORES, abs=1e-6)
    assert found.boxes[best] == pytest.approx(CORNERS, abs=1e-6)


def test_boxes_of_one_image_or_of_several_with_rows_of_zeros() -> None:
    outputs, card = make_scene("torchvision")
    several = {name: np.stack([value, np.zeros_like(value)]) for name, value in outputs.items()}
    full, none = decode_outputs(several, card, find_head(card), (64, 64))
    assert len(full.scores) == 3
    assert len(none.scores) == 0


def test_without_suppression_there_are_doubles() -> None:
    outputs, card = make_scene("yolov8")
    (found,) = decode_outputs(outputs, card, Head("yolov8", nms_iou=1.0), (64, 64))
    assert (found.scores > 0.5).sum() == 6


@pytest.mark.parametrize(("outputs", "head", "message"), [
    ([("o", (1, 10), "float32")], None, "no detection head fits its outputs .o 1×10."),
    ([("o", (1, 4, 8, 8), "float32")], None, "no detection head fits"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov9000"}, "no detection head fits"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "iou": 0.5}, "has layout, minimum_score, nms_iou and max_boxes"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "max_boxes": 2.7}, "2.7 is not a whole number"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "nms_iou": True}, "True is not a number"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "nms_iou": "0.5"}, "'0.5' is not a number"),
    ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "nms_iou": 7}, "out of range"),
])  # fmt: skip
def test_outputs_that_fit_no_head_are_refused(outputs, head, message) -> None:
    with pytest.raises(BadInputError, match=message):
        find_head(make_card(*outputs, head=head))
