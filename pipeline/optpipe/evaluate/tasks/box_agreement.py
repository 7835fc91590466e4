"""Whether two detectors show the same boxes of an image, whatever is true."""

from collections.abc import Sequence
from typing import Any

PARITY_SCORE, PARITY_IOU = 0.25, 0.5
"""Compares boxes with at least this score; boxes that overlap this much are the same."""


def compute_overlap(left: Sequence[Any], right: Sequence[Any]) -> float:
    mine, theirs = ([row for row in rows if row[4] >= PARITY_SCORE] for rows in (left, right))
    if not mine and not theirs:
        return 1.0
    return 2 * len(_pair_boxes(mine, theirs)) / (len(mine) + len(theirs))


def list_score_shifts(source: Sequence[Any], build: Sequence[Any]) -> list[float]:
    """The difference of the scores of each of the source's shown boxes that `build` has with any score."""
    shown = [row for row in source if row[4] >= PARITY_SCORE]
    return [matched[4] - row[4] for row, matched in _pair_boxes(shown, build)]


def _pair_boxes(mine: Sequence[Any], theirs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each box of `mine` with the free one of `theirs` of its class that overlaps it most, by PARITY_IOU or more."""
    free: dict[float, list[Any]] = {}
    for row in theirs:
        free.setdefault(row[5], []).append(row)
    pairs = []
    for row in mine:
        alike = free.get(row[5], [])
        shares = [_compute_iou(row, candidate) for candidate in alike]
        best = max(shares, default=0.0)
        if best >= PARITY_IOU:
            pairs.append((row, alike.pop(shares.index(best))))
    return pairs


def _compute_iou(left: Sequence[float], right: Sequence[float]) -> float:
    wide = min(left[0] + left[2], right[0] + right[2]) - max(left[0], right[0])
    high = min(left[1] + left[3], right[1] + right[3]) - max(left[1], right[1])
    both = max(wide, 0.0) * max(high, 0.0)
    return both / (left[2] * left[3] + right[2] * right[3] - both)
