"""Every head of one and the same scene gives the same boxes."""

import numpy as np
import pytest

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.heads import Head, decode_outputs, find_head

LABELS = ("cat", "dog", "bird")
CORNERS = np.array([[4.0, 6.0, 20.0, 30.0], [40.0, 8.0, 60.0, 24.0], [10.0, 40.0, 26.0, 62.0]])
CLASSES = np.array([0, 2, 1])
SCORES = np.array([0.9, 0.8, 0.7])
CENTERS = np.concatenate([(CORNERS[:, :2] + CORNERS[:, 2:]) / 2, CORNERS[:, 2:] - CORNERS[:, :2]], 1)


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
            return outputs, make_card(("logits", (1, 3, 3), "float32"), ("pred_boxes", (1, 3, 4), "float32"))
        case "detr":
            none = (1 - make_one_hot().sum(1))[:, None]
            outputs = {"logits": np.log(np.concatenate([make_one_hot(), none], 1))[None], "boxes": CENTERS[None] / 64}
            return outputs, make_card(("logits", (1, 3, 4), "float32"), ("boxes", (1, 3, 4), "float32"))
    outputs = {"b": CORNERS, "l": CLASSES, "s": SCORES}
    return outputs, make_card(("b", ("k", 4), "float32"), ("l", ("k",), "int64"), ("s", ("k",), "float32"))


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


@pytest.mark.parametrize(
    ("outputs", "head", "message"),
    [
        (
            [("o", (1, 10), "float32")],
            None,
            'no detection head fits its outputs .o 1×10.; task = "classification" would',
        ),
        ([("o", (1, 4, 8, 8), "float32")], None, 'task = "segmentation" would'),
        ([("o", (1, 7, 6), "float32")], {"layout": "yolov9000"}, "no detection head fits"),
        (
            [("o", (1, 7, 6), "float32")],
            {"layout": "yolov8", "iou": 0.5},
            "has layout, minimum_score, nms_iou and max_boxes",
        ),
        ([("o", (1, 7, 6), "float32")], {"layout": "yolov8", "nms_iou": 7}, "out of range"),
    ],
)
def test_outputs_that_fit_no_head_are_refused(outputs, head, message) -> None:
    with pytest.raises(BadInputError, match=message):
        find_head(make_card(*outputs, head=head))
