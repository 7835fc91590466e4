"""Detectors' heads: their outputs become boxes, scores and classes in pixels of the input, by layout.

| layout | outputs |
|---|---|
| `yolov5` (to v7) | (n, boxes, 5 + classes): center, size, objectness, class scores |
| `yolov8` (to v11) | (n, 4 + classes, boxes): center, size, class scores |
| `boxes6` (YOLO with NMS inside, YOLOv10) | (n, boxes, 6): corners, score, class |
| `detr` | logits (n, queries, classes + 1), boxes (n, queries, 4): softmax, the last class means no object; centers and sizes as shares |
| `rt-detr` | logits (n, queries, classes), boxes (n, queries, 4): sigmoid; centers and sizes as shares |
| `torchvision` | boxes (k, 4) as corners, scores (k), labels (k) of one image, NMS inside; or (n, k, …) with rows of zeros behind |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core import torch
from optpipe.core.card import ModelCard, Task, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.rows import Arrays

LAYOUTS = ("yolov5", "yolov8", "boxes6", "detr", "rt-detr", "torchvision")


SUPPRESSED = ("yolov5", "yolov8")
"""Layouts that need non-maximum suppression (NMS) outside the engine."""

STRIDES, ANCHORS = (8, 16, 32), 3
"""Pixels of a cell of YOLO's three grids, and the boxes of a cell up to v7; later versions have one."""


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
class DetectedBoxes:
    """Boxes of one image: corners (k, 4) in pixels of the input, scores (k,), class indices (k,); best first."""

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]


def _read_number(name: str, value: object, defaults: Head) -> Any:
    """`value` in the type of the default. Raises ValueError for what that would change, such as 2.7 boxes."""
    default = getattr(defaults, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} = {value!r} is not a number")
    if (typed := type(default)(value)) != value:
        raise ValueError(f"{name} = {value!r} is not a whole number")
    return typed


def find_head(card: ModelCard) -> Head:
    """The head from the card's `[head]`, or from the shapes of the outputs. Raises BadInputError if none fits."""
    given = dict(card.head)
    layout = str(given.pop("layout", "")) or _guess_layout(card.outputs, len(card.labels))
    if layout not in LAYOUTS:
        shapes = ", ".join(f"{spec.name} {'×'.join(map(str, spec.shape))}" for spec in card.outputs)
        problem = f"{card.name}: no detection head fits its outputs ({shapes})"
        raise BadInputError(
            f"{problem}\na model card names one: [head] layout = {' | '.join(LAYOUTS)}"
        )
    try:
        head = Head(
            layout,
            **{name: _read_number(name, value, Head(layout)) for name, value in given.items()},
        )
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"{card.name}: [head] has layout, minimum_score, nms_iou and max_boxes"
        raise BadInputError(f"{problem} ({error})") from error
    if not (0 <= head.minimum_score < 1 and 0 < head.nms_iou <= 1 and head.max_boxes >= 1):
        raise BadInputError(f"{card.name}: [head] has a value out of range: {head.description}")
    return head


def _guess_layout(outputs: Sequence[TensorSpec], labels: int) -> str | None:
    shapes = [spec.shape for spec in outputs]
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


def guess_detector(card: ModelCard) -> str | None:
    """The layout of an image model whose outputs have the shapes of boxes, whatever its task; None without one.

    Three axes alone are features too, so that a YOLO head needs the number of boxes of its strides.
    """
    image = card.inputs[0] if len(card.inputs) == 1 and card.inputs[0].is_image else None
    layout = _guess_layout(card.outputs, len(card.labels)) if image is not None else None
    if image is None or layout not in SUPPRESSED:
        return layout
    shape = image.sample
    height, width = shape[1:] if shape[0] in (1, 3) else shape[:2]
    cells = sum((height // stride) * (width // stride) for stride in STRIDES)
    counts = (cells, ANCHORS * cells)
    axis = 2 if layout == "yolov8" else 1
    return layout if card.outputs[0].shape[axis] in counts else None


def _find_torchvision(outputs: Sequence[TensorSpec]) -> tuple[str, str, str] | None:
    """Names of boxes, scores, and labels, by rank and type: torchvision's detectors order them differently."""
    boxes = [spec.name for spec in outputs if len(spec.shape) == 2 and spec.shape[-1] == 4]
    flat = [spec for spec in outputs if len(spec.shape) == 1]
    labels = [spec.name for spec in flat if spec.dtype.startswith("int")]
    scores = [spec.name for spec in flat if spec.dtype.startswith("float")]
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
) -> list[DetectedBoxes]:
    if head.layout == "torchvision":
        names = _find_torchvision(card.outputs)
        assert names is not None
        boxes, scores, labels = (np.asarray(outputs[name]) for name in names)
        images = (
            (boxes[None], scores[None], labels[None])
            if boxes.ndim == 2
            else (boxes, scores, labels)
        )
        return [_select(*image, head) for image in zip(*images, strict=True)]
    first = np.asarray(outputs[card.outputs[0].name], np.float64)
    if head.layout == "boxes6":
        return [
            _select(image[:, :4], image[:, 4], image[:, 5].astype(np.int64), head)
            for image in first
        ]
    if head.layout in SUPPRESSED:
        rows = first if head.layout == "yolov5" else first.transpose(0, 2, 1)
        return [_decode_yolo(image, head) for image in rows]
    name = next(
        spec.name for spec in card.outputs[1:] if len(spec.shape) == 3 and spec.shape[-1] == 4
    )
    scale = np.array([sides[1], sides[0], sides[1], sides[0]], np.float64)
    pairs = zip(first, np.asarray(outputs[name], np.float64), strict=True)
    return [_decode_queries(logits, _to_corners(boxes) * scale, head) for logits, boxes in pairs]


def _decode_yolo(rows: NDArray[np.float64], head: Head) -> DetectedBoxes:
    """Each class of a box above the minimum becomes a separate box; then NMS within each class."""
    scores = rows[:, 4:] if head.layout == "yolov8" else rows[:, 5:] * rows[:, 4:5]
    place, labels = np.nonzero(scores >= head.minimum_score)
    chosen = DetectedBoxes(_to_corners(rows[place, :4]), scores[place, labels], labels)
    kept = suppress(chosen, head.nms_iou)
    return _select(chosen.boxes[kept], chosen.scores[kept], chosen.labels[kept], head)


def _decode_queries(
    logits: NDArray[np.float64], boxes: NDArray[np.float64], head: Head
) -> DetectedBoxes:
    if head.layout == "detr":
        powers = np.exp(logits - logits.max(1, keepdims=True))
        shares = (powers / powers.sum(1, keepdims=True))[:, :-1]
        return _select(boxes, shares.max(1), shares.argmax(1), head)
    # every pair of query and class is a box, as in RT-DETR's postprocessing
    scores = 1 / (1 + np.exp(-logits))
    order = np.argsort(-scores, axis=None, kind="stable")[: head.max_boxes]
    query, label = np.unravel_index(order, scores.shape)
    return _select(boxes[query], scores[query, label], label, head)


def suppress(detected: DetectedBoxes, iou: float) -> NDArray[np.int64]:
    """Indices that non-maximum suppression within each class keeps (torchvision's `batched_nms`), best first."""
    from torchvision.ops import batched_nms

    tensors = (
        torch.from_numpy(np.ascontiguousarray(array))
        for array in (detected.boxes, detected.scores, detected.labels)
    )
    return np.asarray(batched_nms(*tensors, iou).numpy())


def _select(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[Any], head: Head
) -> DetectedBoxes:
    order = np.argsort(-scores, kind="stable")[: head.max_boxes]
    order = order[scores[order] >= head.minimum_score]
    return DetectedBoxes(
        boxes[order].astype(np.float64),
        scores[order].astype(np.float64),
        labels[order].astype(np.int64),
    )


def _to_corners(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    center, half = boxes[:, :2], boxes[:, 2:4] / 2
    return np.concatenate([center - half, center + half], axis=1)
