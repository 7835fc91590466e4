"""Object detection: boxes at the source's geometry, COCO's average precision."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core.card import ModelCard, Task
from optpipe.core.geometry import compute_geometry
from optpipe.evaluate.tasks.average_precision import MatchedClass, compute_average_precision, match_boxes
from optpipe.evaluate.tasks.contract import BootstrapTask, DropCost, Values, require_labels
from optpipe.evaluate.tasks.heads import Found, count_head_classes, decode_outputs, find_head
from optpipe.models.inputs.annotations import read_boxes, read_image_size
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

PARITY_SCORE, PARITY_IOU = 0.25, 0.5
"""Boxes of at least this score are compared; two are the same that overlap this much."""


class Detection(BootstrapTask):
    """A prediction is a list of (left, top, width, height, score, class), a truth of (left, top, width, height, class, area, crowd).

    Boxes are in pixels of the source image, clipped to it.
    """

    score: ClassVar[str] = "AP"
    scores: ClassVar[tuple[str, ...]] = ("AP", "AP50", "AP75")

    def require_model(self, card: ModelCard) -> None:
        """Outputs of a head that is known."""
        head = find_head(card)
        if head.layout in ("yolov5", "yolov8"):
            require_labels(card, count_head_classes(card, head), Task.DETECTION)

    def describe_scoring(self, card: ModelCard) -> str:
        """The head, and where boxes are suppressed."""
        return find_head(card).description

    def count_classes(self, card: ModelCard) -> int | None:
        """As the outputs of the head say."""
        return count_head_classes(card, find_head(card))

    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:
        """The annotated boxes; None without annotations."""
        if not isinstance(samples, ImageSet) or card.transform is None:
            return None
        found = read_boxes(samples, card.transform, card.labels, classes)
        if found is None:
            return None
        return [[[*one.box, float(one.label), one.area, float(one.crowd)] for one in boxes] for boxes in found]

    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:
        """Boxes of the head, taken back to the source."""
        head, transform, image = find_head(card), card.transform, card.inputs[0]
        sides = (transform.size if transform else None) or (int(image.opt[-2]), int(image.opt[-1]))
        found = decode_outputs(outputs, card, head, sides)
        if not isinstance(samples, ImageSet) or transform is None:  # tensors have no other geometry
            return [_list_boxes(each, each.boxes) for each in found]
        rows = []
        for each, file in zip(found, files, strict=True):
            height, width = read_image_size(samples.root / file.path, transform)
            geometry = compute_geometry(transform, height, width)
            boxes = each.boxes.copy()
            for axis, places, side in ((geometry.columns, [0, 2], width), (geometry.rows, [1, 3], height)):
                boxes[:, places] = ((boxes[:, places] - axis.offset) / axis.scale).clip(0, side)
            rows.append(_list_boxes(each, boxes))
        return rows

    def take_as_truths(self, predictions: Values) -> Values:
        """The boxes that a user would be shown."""
        return [
            [[*row[:4], row[5], row[2] * row[3], 0.0] for row in rows if row[4] >= PARITY_SCORE] for rows in predictions
        ]

    def measure_drop(self, truths: Values, source: Values, found: Values) -> DropCost | None:
        """None if no image has an annotated box."""
        return super().measure_drop(truths, source, found) if any(truths) else None

    def gather(self, truths: Values, predictions: Values) -> list[MatchedClass]:
        """The matches of every class."""
        return match_boxes(truths, predictions)

    def compute_scores(self, gathered: Any, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """AP over thresholds of 0.50 to 0.95, AP50 and AP75: means over the classes that occur."""
        each = np.stack([compute_average_precision(one, weights) for one in gathered if one.objects.any()])
        return np.stack(
            [np.nanmean(each, axis=(0, 2)), np.nanmean(each[..., 0], 0), np.nanmean(each[..., 5], 0)], axis=1
        )

    def compute_class_scores(self, gathered: Any) -> "NDArray[np.float64]":
        """AP of every class."""
        return np.array([compute_average_precision(one, np.ones((1, len(one.objects))))[0].mean() for one in gathered])

    def compute_sample_parity(self, source: Values, found: Values) -> "NDArray[np.float64]":
        """Per image the F1 of boxes of one class with an IoU of at least PARITY_IOU; 1 where neither model finds any."""
        return np.array([_compute_overlap(one, other) for one, other in zip(source, found, strict=True)])


def _list_boxes(found: Found, boxes: "NDArray[np.float64]") -> list[list[float]]:
    sizes = boxes[:, 2:] - boxes[:, :2]
    kept = (sizes > 0).all(1)
    rows = np.concatenate([boxes[:, :2], sizes, found.scores[:, None], found.labels[:, None]], axis=1)[kept]
    listed: list[list[float]] = rows.tolist()
    return listed


def _compute_overlap(one: Sequence[Any], other: Sequence[Any]) -> float:
    mine, theirs = ([row for row in rows if row[4] >= PARITY_SCORE] for rows in (one, other))
    if not mine and not theirs:
        return 1.0
    free, same = list(theirs), 0
    for row in mine:
        best = max(free, key=lambda each: _compute_iou(row, each), default=None)
        if best is not None and _compute_iou(row, best) >= PARITY_IOU:
            free.remove(best)
            same += 1
    return 2 * same / (len(mine) + len(theirs))


def _compute_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two boxes of one class; 0 for boxes of different classes."""
    if one[5] != other[5]:
        return 0.0
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    both = max(wide, 0.0) * max(high, 0.0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)
