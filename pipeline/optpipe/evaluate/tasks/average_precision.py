"""COCO's average precision with weights on images: pycocotools matches boxes once, every replicate of the bootstrap sums anew.

With all weights 1 the figures are those of pycocotools and faster-coco-eval.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
CELLS = 1 << 24
"""Weights of detections that are held at once."""
MAX_BOXES = 100
"""Boxes of an image and class that are judged, the best ones, as COCO does."""


@dataclass(frozen=True, eq=False)
class MatchedClass:
    """Detections of one class over all images, the best first, and how many objects each image has."""

    image: "NDArray[np.int64]"
    """Of each detection, (detections,)."""
    right: "NDArray[np.bool_]"
    """(thresholds, detections): matched to an object that counts."""
    wrong: "NDArray[np.bool_]"
    """(thresholds, detections): matched to none; what is matched to a crowd is neither."""
    objects: "NDArray[np.float64]"
    """(images,), without crowds."""


def match_boxes(truths: Sequence[Any], predictions: Sequence[Any]) -> list[MatchedClass]:
    """COCO's matching at IoU 0.50 to 0.95, per class.

    Of each image, truths are rows (left, top, width, height, class, area, crowd) and predictions (left, top, width, height,
    score, class).
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
            return [_match_none(truths, label) for label in range(classes)]
        evaluated = COCOeval(reference, reference.loadRes(np.array(table, np.float64)), "bbox")
        evaluated.params.areaRng, evaluated.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluated.params.maxDets = [MAX_BOXES]
        evaluated.evaluate()
    images = len(truths)
    return [_collect(evaluated.evalImgs[label * images : (label + 1) * images]) for label in range(classes)]


def _match_none(truths: Sequence[Any], label: int) -> MatchedClass:
    counts = [sum(1 for row in rows if row[4] == label and not row[6]) for rows in truths]
    none = np.zeros((len(THRESHOLDS), 0), np.bool_)
    return MatchedClass(np.zeros(0, np.int64), none, none, np.array(counts, np.float64))


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
    """AP (replicates, thresholds), where image j counts weights[i, j] times; NaN where a replicate has no object."""
    size = max(1, CELLS // max(matched.image.size, 1))
    parts = [_sum_up(matched, weights[start : start + size]) for start in range(0, len(weights), size)]
    return np.concatenate(parts)


def _sum_up(matched: MatchedClass, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Of a few replicates. Recall rises at right detections only, and precision is largest there: no others are looked at."""
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
        for replicate in np.flatnonzero(objects > 0):
            at = np.searchsorted(hits[replicate] / objects[replicate], RECALLS, side="left")
            found[replicate, place] = precision[replicate, at[at < right.size]].sum() / len(RECALLS)
    return found
