"""Object detection: boxes at the source's geometry, COCO's average precision with weights on images.

pycocotools matches boxes once, and each weighting of images sums again. With all weights 1 the figures are those of
pycocotools and faster-coco-eval. A detector's outputs become boxes, scores and classes in pixels of the input by the layout of
its head:

| layout | outputs |
|---|---|
| `yolov5` (to v7) | (n, boxes, 5 + classes): center, size, objectness, class scores |
| `yolov8` (to v11) | (n, 4 + classes, boxes): center, size, class scores |
| `boxes6` (YOLO with NMS inside, YOLOv10) | (n, boxes, 6): corners, score, class |
| `detr` | logits (n, queries, classes + 1), boxes (n, queries, 4): softmax, the last class means no object; centers and sizes as shares |
| `rt-detr` | logits (n, queries, classes), boxes (n, queries, 4): sigmoid; centers and sizes as shares |
| `torchvision` | boxes (k, 4) as corners, scores (k), labels (k) of one image, NMS inside; or (n, k, …) with rows of zeros behind |
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core import torch
from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import AP, AP50, AP75, F1, RECALL, find_score
from optpipe.core.transform import compute_geometry
from optpipe.core.verdict import Observation
from optpipe.evaluate.result import Agreement
from optpipe.evaluate.tasks.contract import TaskContract, Values, require_labels
from optpipe.models.inputs.image_set import ImageSet, read_boxes, read_image_size
from optpipe.models.inputs.rows import Arrays, rows_from_outputs, split_batches
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.stats.paired import CONFIDENCE, figure_from_samples

LAYOUTS = ("yolov5", "yolov8", "boxes6", "detr", "rt-detr", "torchvision")
SUPPRESSED = ("yolov5", "yolov8")
"""Layouts that need non-maximum suppression (NMS) outside the engine."""


@dataclass(frozen=True, slots=True)
class Head:
    """A detector's layout, and the choice of its boxes. The defaults are those of Ultralytics' validation."""

    layout: str
    minimum_score: float = 0.001
    nms_iou: float = 0.7
    max_boxes: int = 300

    @property
    def description(self) -> str:
        kept = f"scores of at least {self.minimum_score:g}, at most {self.max_boxes} boxes"
        per_class = f"NMS outside the engine per class (IoU {self.nms_iou:g})"
        nms = per_class if self.layout in SUPPRESSED else "no NMS outside the engine"
        return f"{self.layout} head, {nms}, {kept}"


@dataclass(frozen=True, eq=False)
class Found:
    """Boxes of one image: corners (k, 4) in pixels of the input, scores (k,), class indices (k,); best first."""

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]


def find_head(card: ModelCard) -> Head:
    """The head from the card's `[head]`, or from the shapes of the outputs. Raises BadInputError if none fits."""
    given = dict(card.head)
    layout = str(given.pop("layout", "")) or _guess_layout(card.outputs, len(card.labels))
    if layout not in LAYOUTS:
        shapes = ", ".join(f"{each.name} {'×'.join(map(str, each.shape))}" for each in card.outputs)
        problem = f"{card.name}: no detection head fits its outputs ({shapes})"
        raise BadInputError(
            f"{problem}\na model card names one: [head] layout = {' | '.join(LAYOUTS)}"
        )
    try:
        head = Head(
            layout,
            **{name: type(getattr(Head(layout), name))(value) for name, value in given.items()},
        )
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"{card.name}: [head] has layout, minimum_score, nms_iou and max_boxes"
        raise BadInputError(f"{problem} ({error})") from error
    if not (0 <= head.minimum_score < 1 and 0 < head.nms_iou <= 1 and head.max_boxes >= 1):
        raise BadInputError(f"{card.name}: [head] has a value out of range: {head.description}")
    return head


def _guess_layout(outputs: Sequence[TensorSpec], labels: int) -> str | None:
    shapes = [each.shape for each in outputs]
    three = [shape for shape in shapes if len(shape) == 3]
    if _find_torchvision(outputs) is not None:
        return "torchvision"
    if len(three) >= 2 and three[1][-1] == 4:
        return "detr" if labels and three[0][-1] == labels + 1 else "rt-detr"
    if len(three) != 1 and not (three and len(shapes[0]) == 3):
        return None
    _, second, third = three[0]
    if labels and second == 4 + labels:
        return "yolov8"
    if labels and third == 5 + labels:
        return "yolov5"
    if third == 6:
        return "boxes6"
    if labels or not isinstance(second, int) or not isinstance(third, int):
        return None
    return "yolov8" if second < third else "yolov5"


def _find_torchvision(outputs: Sequence[TensorSpec]) -> tuple[str, str, str] | None:
    """Names of boxes, scores, and labels, by rank and type: torchvision's detectors order them differently."""
    boxes = [each.name for each in outputs if len(each.shape) == 2 and each.shape[-1] == 4]
    flat = [each for each in outputs if len(each.shape) == 1]
    labels = [each.name for each in flat if each.dtype.startswith("int")]
    scores = [each.name for each in flat if each.dtype.startswith("float")]
    return (boxes[0], scores[0], labels[0]) if boxes and scores and labels else None


def lacks_image_axis(card: ModelCard) -> bool:
    """True if the outputs are the boxes of one image, without an axis for it. Raises BadInputError if no head fits."""
    return card.task is Task.DETECTION and find_head(card).layout == "torchvision"


def count_head_classes(card: ModelCard, head: Head) -> int | None:
    """None if the outputs do not tell."""
    shape = card.outputs[0].shape
    sizes = {
        "yolov5": (shape[-1], 5),
        "yolov8": (shape[1] if len(shape) > 1 else None, 4),
        "detr": (shape[-1], 1),
        "rt-detr": (shape[-1], 0),
    }
    size, other = sizes.get(head.layout, (None, 0))
    return size - other if isinstance(size, int) else (len(card.labels) or None)


def decode_outputs(
    outputs: Arrays, card: ModelCard, head: Head, sides: tuple[int, int]
) -> list[Found]:
    if head.layout == "torchvision":
        names = _find_torchvision(card.outputs)
        assert names is not None
        boxes, scores, labels = (np.asarray(outputs[name]) for name in names)
        images = (
            (boxes[None], scores[None], labels[None])
            if boxes.ndim == 2
            else (boxes, scores, labels)
        )
        return [_select(*each, head) for each in zip(*images, strict=True)]
    first = np.asarray(outputs[card.outputs[0].name], np.float64)
    if head.layout == "boxes6":
        return [
            _select(each[:, :4], each[:, 4], each[:, 5].astype(np.int64), head) for each in first
        ]
    if head.layout in SUPPRESSED:
        rows = first if head.layout == "yolov5" else first.transpose(0, 2, 1)
        return [_decode_yolo(each, head) for each in rows]
    name = next(
        each.name for each in card.outputs[1:] if len(each.shape) == 3 and each.shape[-1] == 4
    )
    scale = np.array([sides[1], sides[0], sides[1], sides[0]], np.float64)
    pairs = zip(first, np.asarray(outputs[name], np.float64), strict=True)
    return [_decode_queries(logits, _to_corners(boxes) * scale, head) for logits, boxes in pairs]


def _decode_yolo(rows: NDArray[np.float64], head: Head) -> Found:
    """Each class of a box above the minimum becomes a separate box; then NMS within each class."""
    scores = rows[:, 4:] if head.layout == "yolov8" else rows[:, 5:] * rows[:, 4:5]
    place, labels = np.nonzero(scores >= head.minimum_score)
    chosen = Found(_to_corners(rows[place, :4]), scores[place, labels], labels)
    kept = suppress(chosen, head.nms_iou)
    return _select(chosen.boxes[kept], chosen.scores[kept], chosen.labels[kept], head)


def _decode_queries(logits: NDArray[np.float64], boxes: NDArray[np.float64], head: Head) -> Found:
    if head.layout == "detr":
        powers = np.exp(logits - logits.max(1, keepdims=True))
        shares = (powers / powers.sum(1, keepdims=True))[:, :-1]
        return _select(boxes, shares.max(1), shares.argmax(1), head)
    scores = 1 / (
        1 + np.exp(-logits)
    )  # every pair of query and class, as in RT-DETR's postprocessing
    order = np.argsort(-scores, axis=None, kind="stable")[: head.max_boxes]
    query, label = np.unravel_index(order, scores.shape)
    return _select(boxes[query], scores[query, label], label, head)


def suppress(found: Found, iou: float) -> NDArray[np.int64]:
    """Indices that non-maximum suppression within each class keeps (torchvision's `batched_nms`), best first."""
    from torchvision.ops import batched_nms

    tensors = (
        torch.from_numpy(np.ascontiguousarray(each))
        for each in (found.boxes, found.scores, found.labels)
    )
    return np.asarray(batched_nms(*tensors, iou).numpy())


def _select(boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[Any], head: Head) -> Found:
    order = np.argsort(-scores, kind="stable")[: head.max_boxes]
    order = order[scores[order] >= head.minimum_score]
    return Found(
        boxes[order].astype(np.float64),
        scores[order].astype(np.float64),
        labels[order].astype(np.int64),
    )


def _to_corners(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    center, half = boxes[:, :2], boxes[:, 2:4] / 2
    return np.concatenate([center - half, center + half], axis=1)


THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
CELLS = 1 << 24
"""Weights of detections in memory at once."""
MAX_BOXES = 100
"""Judged boxes of an image and class, best first, as in COCO."""
MOST_CLASSES = 20_000
"""Each class takes memory for each image; the largest public sets have some 13,000 classes."""
SCORE_THRESHOLDS = tuple(each / 20 for each in range(1, 20))
"""The scores from which a policy can count boxes."""
PARITY_SCORE, PARITY_IOU = 0.25, 0.5
"""Compares boxes with at least this score; boxes that overlap this much are the same."""


@dataclass(frozen=True, eq=False)
class MatchedClass:
    """Detections of one class over all images, best first, and the number of objects in each image."""

    image: NDArray[np.int64]
    """Image of each detection, (detections,)."""
    right: NDArray[np.bool_]
    """(thresholds, detections): matched to an object that counts."""
    wrong: NDArray[np.bool_]
    """(thresholds, detections): not matched; a match with a crowd is neither right nor wrong."""
    score: NDArray[np.float64]
    """(detections,)"""
    objects: NDArray[np.float64]
    """(images,), without crowds."""


def match_boxes(truths: Sequence[Any], predictions: Sequence[Any]) -> list[MatchedClass]:
    """COCO's matching at IoU 0.50 to 0.95, per class.

    Truths of an image are rows (left, top, width, height, class, area, crowd), predictions (left, top, width, height, score,
    class).
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    classes = 1 + max((int(row[4]) for rows in truths for row in rows), default=-1)
    if classes > MOST_CLASSES:
        raise BadInputError(
            f"a true box has class {classes - 1}; the largest number of a class is {MOST_CLASSES - 1}"
        )
    reference = COCO()
    annotations = [(image, row) for image, rows in enumerate(truths) for row in rows]
    reference.dataset = {
        "images": [{"id": image} for image in range(len(truths))],
        "categories": [{"id": label} for label in range(classes)],
        "annotations": [
            {
                "id": number,
                "image_id": image,
                "category_id": int(row[4]),
                "bbox": row[:4],
                "area": row[5],
                "iscrowd": int(row[6]),
            }
            for number, (image, row) in enumerate(annotations, 1)  # 0 would count as unmatched
        ],
    }
    table = [
        [image, *row[:5], row[5]]
        for image, rows in enumerate(predictions)
        for row in rows
        if row[5] < classes
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        reference.createIndex()
        if not table:
            none = np.zeros((len(THRESHOLDS), 0), np.bool_)
            counts = np.zeros((classes, len(truths)))
            for image, row in annotations:
                counts[int(row[4]), image] += not row[6]
            return [
                MatchedClass(np.zeros(0, np.int64), none, none, np.zeros(0), each)
                for each in counts
            ]
        evaluated = COCOeval(reference, reference.loadRes(np.array(table, np.float64)), "bbox")
        evaluated.params.areaRng, evaluated.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluated.params.maxDets = [MAX_BOXES]
        evaluated.evaluate()
    return [
        _collect(evaluated.evalImgs[label * len(truths) : (label + 1) * len(truths)])
        for label in range(classes)
    ]


def _collect(images: Sequence[Any]) -> MatchedClass:
    there = [(place, each) for place, each in enumerate(images) if each is not None]
    objects = np.zeros(len(images))
    for place, each in there:
        objects[place] = np.count_nonzero(np.asarray(each["gtIgnore"]) == 0)
    scores = np.concatenate([each["dtScores"] for _, each in there]) if there else np.zeros(0)
    empty = np.zeros((len(THRESHOLDS), 0))
    columns = ([each[key] for _, each in there] or [empty] for key in ("dtMatches", "dtIgnore"))
    matches, ignored = (np.concatenate(parts, axis=1) for parts in columns)
    image = (
        np.concatenate([np.full(len(each["dtScores"]), place) for place, each in there])
        if there
        else scores
    )
    order = np.argsort(-scores, kind="mergesort")
    matched, counted = matches[:, order] > 0, ignored[:, order] == 0
    right, wrong = matched & counted, ~matched & counted
    return MatchedClass(image[order].astype(np.int64), right, wrong, scores[order], objects)


def compute_rates(
    gathered: Sequence[MatchedClass], weights: NDArray[np.float64], score: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """F1 and recall (rows,) of all classes together, of boxes with at least `score` that match at an IoU of 0.5."""
    right, wrong, objects = np.zeros((3, weights.shape[1]))
    for one in gathered:
        shown = one.score >= score
        right += np.bincount(one.image, one.right[0] & shown, weights.shape[1])
        wrong += np.bincount(one.image, one.wrong[0] & shown, weights.shape[1])
        objects += one.objects
    hits, misses, there = weights @ right, weights @ wrong, weights @ objects
    return 2 * hits / np.maximum(hits + misses + there, np.spacing(1.0)), hits / np.maximum(
        there, np.spacing(1.0)
    )


def compute_average_precision(
    matched: MatchedClass, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """AP (rows, thresholds), where image j counts weights[i, j] times; NaN for a row without objects."""
    size = max(1, CELLS // max(matched.image.size, 1))
    return np.concatenate(
        [_sum_up(matched, weights[start : start + size]) for start in range(0, len(weights), size)]
    )


def _sum_up(matched: MatchedClass, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Looks only at right detections, where recall rises and precision is largest."""
    objects, each = weights @ matched.objects, weights[:, matched.image]
    found = np.where((objects > 0)[:, None], np.zeros((1, len(THRESHOLDS))), np.nan)
    seen = np.cumsum(each, axis=1)
    for place in range(len(THRESHOLDS)):
        right = np.flatnonzero(matched.right[place])
        if not right.size:
            continue
        judged = seen[:, right]
        if (
            uncounted := np.flatnonzero(~matched.right[place] & ~matched.wrong[place])
        ).size:  # matched to crowds
            before = np.searchsorted(uncounted, right)
            judged = (
                judged - np.pad(np.cumsum(each[:, uncounted], axis=1), ((0, 0), (1, 0)))[:, before]
            )
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

    scores: ClassVar[tuple[str, ...]] = tuple(one.name for one in (AP, AP50, AP75, F1, RECALL))
    """F1 and recall are of the boxes with a score of at least PARITY_SCORE."""

    def require_model(self, card: ModelCard) -> None:
        head = find_head(card)
        if head.layout in ("yolov5", "yolov8"):
            require_labels(card, count_head_classes(card, head), Task.DETECTION)

    def describe_scoring(self, card: ModelCard) -> str:
        return find_head(card).description

    def count_classes(self, card: ModelCard) -> int | None:
        return count_head_classes(card, find_head(card))

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        if not isinstance(samples, ImageSet) or card.transform is None:
            return None
        found = read_boxes(samples, card.transform, card.labels, classes)
        return (
            None
            if found is None
            else [[[float(each) for each in one] for one in boxes] for boxes in found]
        )

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
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

    def compare_outputs(
        self,
        card: ModelCard,
        inputs: Arrays,
        expected: Arrays,
        run: Callable[[Arrays], Arrays],
    ) -> float | None:
        """The mean of `compute_sample_parity` of the source's outputs, `expected`, and those of `run`, where either finds boxes.

        `inputs` and `expected` are rows, (samples, ...) each. None if no head fits the card, or the source finds none.
        """
        try:
            find_head(card)
        except BadInputError:
            return None
        one, two, at = list[Any](), list[Any](), 0
        for batch, count in split_batches(card, inputs):
            known = {name: value[at : at + count] for name, value in expected.items()}
            found = rows_from_outputs(card.outputs, run(batch), count)
            one += [_list_boxes(each, each.boxes) for each in _decode_boxes(known, card)]
            two += [_list_boxes(each, each.boxes) for each in _decode_boxes(found, card)]
            at += count
        if not any(self.take_as_truths(one)):
            return None
        shown = [
            any(pair)
            for pair in zip(self.take_as_truths(one), self.take_as_truths(two), strict=True)
        ]
        return float(self.compute_sample_parity(one, two)[shown].mean())

    def take_as_truths(self, predictions: Values) -> Values:
        """Boxes with scores that a user would show."""
        shown = ([row for row in rows if row[4] >= PARITY_SCORE] for rows in predictions)
        return [[[*row[:4], row[5], row[2] * row[3], 0.0] for row in rows] for rows in shown]

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        return truths is None or any(truths)

    def gather(self, truths: Values, predictions: Values) -> list[MatchedClass]:
        return match_boxes(truths, predictions)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """AP over thresholds of 0.50 to 0.95, AP50 and AP75: means over the classes that occur; then F1 and recall."""
        each = np.stack(
            [compute_average_precision(one, weights) for one in gathered if one.objects.any()]
        )
        means = [
            np.nanmean(each, axis=(0, 2)),
            np.nanmean(each[..., 0], 0),
            np.nanmean(each[..., 5], 0),
        ]
        return np.stack([*means, *compute_rates(gathered, weights, PARITY_SCORE)], axis=1)

    def spread_truths(self, gathered: Any) -> list[NDArray[np.float64]]:
        objects = np.stack([one.objects for one in gathered]) if gathered else np.zeros((0, 1))
        together = objects.sum(axis=0, keepdims=True)
        return [objects if find_score(name).over_classes else together for name in self.scores]

    def compute_class_scores(self, truths: Values, gathered: Any) -> NDArray[np.float64]:
        return np.array(
            [
                compute_average_precision(one, np.ones((1, len(one.objects))))[0].mean()
                for one in gathered
            ]
        )

    def compute_sample_parity(self, source: Values, found: Values) -> NDArray[np.float64]:
        """F1 of each image's boxes of one class with an IoU of at least PARITY_IOU; 1 if neither model has any."""
        return np.array(
            [_compute_overlap(one, other) for one, other in zip(source, found, strict=True)]
        )

    def compute_parity(self, source: Values, found: Values) -> Agreement | None:
        """Adds the shift of the scores of the source's shown boxes: their mean with its interval, and quantiles."""
        agreement = TaskContract.compute_parity(self, source, found)
        each = [np.array(_list_score_shifts(*pair)) for pair in zip(source, found, strict=True)]
        shifts = np.concatenate(each) if each else np.zeros(0)
        if agreement is None or not shifts.size:
            return agreement
        mean = float(shifts.mean())
        parts = np.array([len(each) * (one.sum() - mean * one.size) / shifts.size for one in each])
        figure = figure_from_samples(mean, parts, len(each), (-1.0, 1.0), groups=self.groups)
        low, high = figure.interval(CONFIDENCE)
        quantiles = {f"p{at}": float(np.percentile(shifts, at)) for at in (5, 50, 95)}
        shift = {"boxes": float(shifts.size), "mean": mean, "low": low, "high": high, **quantiles}
        return replace(agreement, score_shift=shift)

    def observe(
        self, truths: Values | None, source: Values, found: Values, confidence: float, about: str
    ) -> dict[str, Observation]:
        """Adds F1 and its drop at each of SCORE_THRESHOLDS, as `F1@25%`."""
        figures = TaskContract.observe(self, truths, source, found, confidence, about)
        if truths is None:
            return figures
        rates = AT_THRESHOLDS.grouped_by(self.groups)
        more = TaskContract.observe(rates, truths, source, found, confidence, about)
        return figures | {name: each for name, each in more.items() if "@" in name}


class _AtThresholds(Detection):
    scores = tuple(f"{F1}@{each:.0%}" for each in SCORE_THRESHOLDS)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack(
            [compute_rates(gathered, weights, each)[0] for each in SCORE_THRESHOLDS], axis=1
        )


AT_THRESHOLDS = _AtThresholds()


def _decode_boxes(outputs: Arrays, card: ModelCard) -> list[Found]:
    transform, image = card.transform, card.inputs[0]
    sides = (transform.size if transform else None) or (int(image.opt[-2]), int(image.opt[-1]))
    return decode_outputs(outputs, card, find_head(card), sides)


def _list_boxes(found: Found, boxes: NDArray[np.float64]) -> list[list[float]]:
    sizes = boxes[:, 2:] - boxes[:, :2]
    kept = (sizes > 0).all(1)
    rows = np.concatenate(
        [boxes[:, :2], sizes, found.scores[:, None], found.labels[:, None]], axis=1
    )[kept]
    listed: list[list[float]] = rows.tolist()
    return listed


def _compute_overlap(one: Sequence[Any], other: Sequence[Any]) -> float:
    mine, theirs = ([row for row in rows if row[4] >= PARITY_SCORE] for rows in (one, other))
    if not mine and not theirs:
        return 1.0
    return 2 * len(_pair_boxes(mine, theirs)) / (len(mine) + len(theirs))


def _list_score_shifts(source: Sequence[Any], found: Sequence[Any]) -> list[float]:
    """The difference of the scores of each of the source's shown boxes that `found` has with any score."""
    shown = [row for row in source if row[4] >= PARITY_SCORE]
    return [other[4] - row[4] for row, other in _pair_boxes(shown, found)]


def _pair_boxes(mine: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each box of `mine` with the free one of `theirs` that overlaps it most, by PARITY_IOU or more."""
    free, pairs = list(theirs), []
    for row in mine:
        best = max(free, key=lambda each: _compute_iou(row, each), default=None)
        if best is not None and _compute_iou(row, best) >= PARITY_IOU:
            free.remove(best)
            pairs.append((row, best))
    return pairs


def _compute_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """0 for boxes of different classes."""
    if one[5] != other[5]:
        return 0.0
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    both = max(wide, 0.0) * max(high, 0.0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)
