"""Object detection: boxes at the source's geometry, COCO's average precision with weights on images.

pycocotools matches boxes once, and each weighting of images sums again. With all weights 1 the figures are those of
pycocotools and faster-coco-eval.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.transform import compute_geometry
from optpipe.evaluate.tasks.contract import TaskContract, Values, require_labels
from optpipe.evaluate.tasks.heads import Found, count_head_classes, decode_outputs, find_head
from optpipe.models.inputs.annotations import read_boxes, read_image_size
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.rows import Arrays, rows_from_outputs, split_batches
from optpipe.models.inputs.sample_set import SampleSet, SetFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
CELLS = 1 << 24
"""Weights of detections in memory at once."""
MAX_BOXES = 100
"""Judged boxes of an image and class, best first, as in COCO."""
PARITY_SCORE, PARITY_IOU = 0.25, 0.5
"""Compares boxes with at least this score; boxes that overlap this much are the same."""


@dataclass(frozen=True, eq=False)
class MatchedClass:
    """Detections of one class over all images, best first, and the number of objects in each image."""

    image: "NDArray[np.int64]"
    """Image of each detection, (detections,)."""
    right: "NDArray[np.bool_]"
    """(thresholds, detections): matched to an object that counts."""
    wrong: "NDArray[np.bool_]"
    """(thresholds, detections): not matched; a match with a crowd is neither right nor wrong."""
    objects: "NDArray[np.float64]"
    """(images,), without crowds."""


def match_boxes(truths: Sequence[Any], predictions: Sequence[Any]) -> list[MatchedClass]:
    """COCO's matching at IoU 0.50 to 0.95, per class.

    Truths of an image are rows (left, top, width, height, class, area, crowd), predictions (left, top, width, height, score,
    class).
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    classes = 1 + max((int(row[4]) for rows in truths for row in rows), default=-1)
    reference = COCO()
    annotations = [(image, row) for image, rows in enumerate(truths) for row in rows]
    reference.dataset = {
        "images": [{"id": image} for image in range(len(truths))],
        "categories": [{"id": label} for label in range(classes)],
        "annotations": [
            {"id": number, "image_id": image, "category_id": int(row[4]), "bbox": row[:4], "area": row[5], "iscrowd": int(row[6])}
            for number, (image, row) in enumerate(annotations, 1)  # 0 would count as unmatched
        ],
    }  # fmt: skip
    table = [[image, *row[:5], row[5]] for image, rows in enumerate(predictions) for row in rows if row[5] < classes]
    with contextlib.redirect_stdout(io.StringIO()):
        reference.createIndex()
        if not table:
            none = np.zeros((len(THRESHOLDS), 0), np.bool_)
            counts = np.zeros((classes, len(truths)))
            for image, row in annotations:
                counts[int(row[4]), image] += not row[6]
            return [MatchedClass(np.zeros(0, np.int64), none, none, each) for each in counts]
        evaluated = COCOeval(reference, reference.loadRes(np.array(table, np.float64)), "bbox")
        evaluated.params.areaRng, evaluated.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluated.params.maxDets = [MAX_BOXES]
        evaluated.evaluate()
    images = len(truths)
    return [_collect(evaluated.evalImgs[label * images : (label + 1) * images]) for label in range(classes)]


def _collect(images: Sequence[Any]) -> MatchedClass:
    there = [(place, each) for place, each in enumerate(images) if each is not None]
    objects = np.zeros(len(images))
    for place, each in there:
        objects[place] = np.count_nonzero(np.asarray(each["gtIgnore"]) == 0)
    scores = np.concatenate([each["dtScores"] for _, each in there]) if there else np.zeros(0)
    empty = np.zeros((len(THRESHOLDS), 0))
    matches, ignored = (
        np.concatenate([each[key] for _, each in there], axis=1) if there else empty
        for key in ("dtMatches", "dtIgnore")
    )
    image = np.concatenate([np.full(len(each["dtScores"]), place) for place, each in there]) if there else scores
    order = np.argsort(-scores, kind="mergesort")
    matched, counted = matches[:, order] > 0, ignored[:, order] == 0
    return MatchedClass(image[order].astype(np.int64), matched & counted, ~matched & counted, objects)


def compute_average_precision(matched: MatchedClass, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """AP (rows, thresholds), where image j counts weights[i, j] times; NaN for a row without objects."""
    size = max(1, CELLS // max(matched.image.size, 1))
    parts = [_sum_up(matched, weights[start : start + size]) for start in range(0, len(weights), size)]
    return np.concatenate(parts)


def _sum_up(matched: MatchedClass, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Looks only at right detections, where recall rises and precision is largest."""
    objects, each = weights @ matched.objects, weights[:, matched.image]
    found = np.where((objects > 0)[:, None], np.zeros((1, len(THRESHOLDS))), np.nan)
    seen = np.cumsum(each, axis=1)
    for place in range(len(THRESHOLDS)):
        right = np.flatnonzero(matched.right[place])
        if not right.size:
            continue
        judged = seen[:, right]
        if (uncounted := np.flatnonzero(~matched.right[place] & ~matched.wrong[place])).size:  # matched to crowds
            before = np.searchsorted(uncounted, right)
            judged = judged - np.pad(np.cumsum(each[:, uncounted], axis=1), ((0, 0), (1, 0)))[:, before]
        hits = np.cumsum(each[:, right], axis=1)
        precision = hits / (judged + np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        for row in np.flatnonzero(objects > 0):
            at = np.searchsorted(hits[row] / objects[row], RECALLS, side="left")
            found[row, place] = precision[row, at[at < right.size]].sum() / len(RECALLS)
    return found


class Detection(TaskContract):
    """A prediction is a list of (left, top, width, height, score, class), a truth of (left, top, width, height, class, area, crowd).

    Boxes are in pixels of the source image, clipped to it.
    """

    scores: ClassVar[tuple[str, ...]] = ("AP", "AP50", "AP75")

    def require_model(self, card: ModelCard) -> None:
        head = find_head(card)
        if head.layout in ("yolov5", "yolov8"):
            require_labels(card, count_head_classes(card, head), Task.DETECTION)

    def describe_scoring(self, card: ModelCard) -> str:
        return find_head(card).description

    def count_classes(self, card: ModelCard) -> int | None:
        return count_head_classes(card, find_head(card))

    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:
        if not isinstance(samples, ImageSet) or card.transform is None:
            return None
        found = read_boxes(samples, card.transform, card.labels, classes)
        if found is None:
            return None
        return [[[*one.box, float(one.label), one.area, float(one.crowd)] for one in boxes] for boxes in found]

    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:
        transform, found = card.transform, _decode_boxes(outputs, card)
        if not isinstance(samples, ImageSet) or transform is None:  # tensors have no other geometry
            return [_list_boxes(each, each.boxes) for each in found]
        rows = []
        for each, file in zip(found, files, strict=True):
            height, width = read_image_size(samples.root / file.path, transform)
            down, across = compute_geometry(transform, height, width)
            boxes = each.boxes.copy()
            for axis, places, side in ((across, [0, 2], width), (down, [1, 3], height)):
                boxes[:, places] = ((boxes[:, places] - axis.offset) / axis.scale).clip(0, side)
            rows.append(_list_boxes(each, boxes))
        return rows

    def compare_runs(self, card: ModelCard, inputs: Arrays, *runs: Callable[[Arrays], Arrays]) -> float | None:
        """The mean of `compute_sample_parity` of two `runs` over `inputs`, (samples, ...) each, where either finds boxes.

        None if no head fits the card, or the first run finds none.
        """
        try:
            find_head(card)
        except BadInputError:
            return None
        one, two = (
            [
                _list_boxes(each, each.boxes)
                for batch, count in split_batches(card, inputs)
                for each in _decode_boxes(rows_from_outputs(card.outputs, run(batch), count), card)
            ]
            for run in runs
        )
        if not any(self.take_as_truths(one)):
            return None
        shown = [any(pair) for pair in zip(self.take_as_truths(one), self.take_as_truths(two), strict=True)]
        return float(self.compute_sample_parity(one, two)[shown].mean())

    def take_as_truths(self, predictions: Values) -> Values:
        """Boxes with scores that a user would show."""
        return [
            [[*row[:4], row[5], row[2] * row[3], 0.0] for row in rows if row[4] >= PARITY_SCORE] for rows in predictions
        ]

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:  # noqa: ARG002
        return truths is None or any(truths)

    def gather(self, truths: Values, predictions: Values) -> list[MatchedClass]:
        return match_boxes(truths, predictions)

    def compute_scores(self, gathered: Any, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """AP over thresholds of 0.50 to 0.95, AP50 and AP75: means over the classes that occur."""
        each = np.stack([compute_average_precision(one, weights) for one in gathered if one.objects.any()])
        return np.stack(
            [np.nanmean(each, axis=(0, 2)), np.nanmean(each[..., 0], 0), np.nanmean(each[..., 5], 0)], axis=1
        )

    def compute_class_scores(self, truths: Values, gathered: Any) -> "NDArray[np.float64]":  # noqa: ARG002
        return np.array([compute_average_precision(one, np.ones((1, len(one.objects))))[0].mean() for one in gathered])

    def compute_sample_parity(self, source: Values, found: Values) -> "NDArray[np.float64]":
        """F1 of each image's boxes of one class with an IoU of at least PARITY_IOU; 1 if neither model has any."""
        return np.array([_compute_overlap(one, other) for one, other in zip(source, found, strict=True)])


def _decode_boxes(outputs: Arrays, card: ModelCard) -> list[Found]:
    transform, image = card.transform, card.inputs[0]
    sides = (transform.size if transform else None) or (int(image.opt[-2]), int(image.opt[-1]))
    return decode_outputs(outputs, card, find_head(card), sides)


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
    """0 for boxes of different classes."""
    if one[5] != other[5]:
        return 0.0
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    both = max(wide, 0.0) * max(high, 0.0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)
