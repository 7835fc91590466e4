"""COCO's average precision with weights on images.

pycocotools matches boxes once, and each weighting of images sums again. With all weights 1 the figures are those of
pycocotools and faster-coco-eval.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.errors import BadInputError

THRESHOLDS = np.linspace(0.5, 0.95, 10)


RECALLS = np.linspace(0, 1, 101)


CELLS = 1 << 24
"""Weights of detections in memory at once."""


MAX_BOXES = 100
"""Judged boxes of an image and class, best first, as in COCO."""


MOST_CLASSES = 20_000
"""Each class takes memory for each image; the largest public sets have some 13,000 classes."""


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
                MatchedClass(np.zeros(0, np.int64), none, none, np.zeros(0), objects)
                for objects in counts
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
    there = [(place, record) for place, record in enumerate(images) if record is not None]
    objects = np.zeros(len(images))
    for place, record in there:
        objects[place] = np.count_nonzero(np.asarray(record["gtIgnore"]) == 0)
    scores = np.concatenate([record["dtScores"] for _, record in there]) if there else np.zeros(0)
    empty = np.zeros((len(THRESHOLDS), 0))
    columns = ([record[key] for _, record in there] or [empty] for key in ("dtMatches", "dtIgnore"))
    matches, ignored = (np.concatenate(parts, axis=1) for parts in columns)
    image = (
        np.concatenate([np.full(len(record["dtScores"]), place) for place, record in there])
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
    for matched in gathered:
        shown = matched.score >= score
        right += np.bincount(matched.image, matched.right[0] & shown, weights.shape[1])
        wrong += np.bincount(matched.image, matched.wrong[0] & shown, weights.shape[1])
        objects += matched.objects
    hits, misses, there = weights @ right, weights @ wrong, weights @ objects
    f1 = 2 * hits / np.maximum(hits + misses + there, np.spacing(1.0))
    recall = hits / np.maximum(there, np.spacing(1.0))
    return f1, recall


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
    objects = weights @ matched.objects
    counts = weights[:, matched.image]  # how often each detection counts, in each row
    average = np.where((objects > 0)[:, None], np.zeros((1, len(THRESHOLDS))), np.nan)
    seen = np.cumsum(counts, axis=1)
    for place in range(len(THRESHOLDS)):
        right = np.flatnonzero(matched.right[place])
        if not right.size:
            continue
        judged = seen[:, right]
        in_crowds = np.flatnonzero(~matched.right[place] & ~matched.wrong[place])
        if in_crowds.size:
            before = np.searchsorted(in_crowds, right)
            uncounted = np.pad(np.cumsum(counts[:, in_crowds], axis=1), ((0, 0), (1, 0)))
            judged = judged - uncounted[:, before]
        hits = np.cumsum(counts[:, right], axis=1)
        precision = hits / (judged + np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        for row in np.flatnonzero(objects > 0):
            at = np.searchsorted(hits[row] / objects[row], RECALLS, side="left")
            average[row, place] = precision[row, at[at < right.size]].sum() / len(RECALLS)
    return average
