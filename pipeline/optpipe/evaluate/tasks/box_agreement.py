"""Whether two detectors show the same boxes of an image, whatever is true."""

from collections.abc import Sequence
from typing import Any

PARITY_SCORE, PARITY_IOU = 0.25, 0.5
"""Compares boxes with at least this score; boxes that overlap this much are the same."""


def compute_overlap(one: Sequence[Any], other: Sequence[Any]) -> float:
    mine, theirs = ([row for row in rows if row[4] >= PARITY_SCORE] for rows in (one, other))
    if not mine and not theirs:
        return 1.0
    return 2 * len(_pair_boxes(mine, theirs)) / (len(mine) + len(theirs))


def list_score_shifts(source: Sequence[Any], found: Sequence[Any]) -> list[float]:
    """The difference of the scores of each of the source's shown boxes that `found` has with any score."""
    shown = [row for row in source if row[4] >= PARITY_SCORE]
    return [other[4] - row[4] for row, other in _pair_boxes(shown, found)]


def _pair_boxes(mine: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each box of `mine` with the free one of `theirs` of its class that overlaps it most, by PARITY_IOU or more."""
    free: dict[float, list[Any]] = {}
    for row in theirs:
        free.setdefault(row[5], []).append(row)
    pairs = []
    for row in mine:
        alike = free.get(row[5], [])
        shares = [_compute_iou(row, each) for each in alike]
        best = max(shares, default=0.0)
        if best >= PARITY_IOU:
            pairs.append((row, alike.pop(shares.index(best))))
    return pairs


def _compute_iou(one: Sequence[float], other: Sequence[float]) -> float:
    wide = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    high = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    both = max(wide, 0.0) * max(high, 0.0)
    return both / (one[2] * one[3] + other[2] * other[3] - both)
