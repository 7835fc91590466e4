"""Object detection: boxes at the source's geometry, average precision, F1, recall, and the agreement of two detectors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import AP, AP50, AP75, F1, RECALL, find_score
from optpipe.core.transform import compute_geometry
from optpipe.core.verdict import Observation
from optpipe.evaluate.result import Agreement
from optpipe.evaluate.tasks.average_precision import (
    MatchedClass,
    compute_average_precision,
    compute_rates,
    match_boxes,
)
from optpipe.evaluate.tasks.box_agreement import PARITY_SCORE, compute_overlap, list_score_shifts
from optpipe.evaluate.tasks.contract import TaskContract, Values, require_labels
from optpipe.evaluate.tasks.detection_heads import (
    DetectedBoxes,
    count_head_classes,
    decode_outputs,
    find_head,
)
from optpipe.models.inputs.image_set import ImageSet, read_boxes, read_image_size
from optpipe.models.inputs.rows import Arrays, rows_from_outputs, split_batches
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.stats.paired import CONFIDENCE, figure_from_samples

LARGEST_SIDE = 2**20
"""Of a box and its place, in pixels."""
SCORE_THRESHOLDS = tuple(step / 20 for step in range(1, 20))
"""The scores from which a policy can count boxes."""


class Detection(TaskContract):
    """A prediction is a list of (left, top, width, height, score, class), a truth of (left, top, width, height, class, area, crowd).

    Boxes are in pixels of the source image, clipped to it.
    """

    scores: ClassVar[tuple[str, ...]] = tuple(score.name for score in (AP, AP50, AP75, F1, RECALL))
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
        images = read_boxes(samples, card.transform, card.labels, classes)
        if images is None:
            return None
        return [[[float(value) for value in box] for box in boxes] for boxes in images]

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        transform = card.transform
        images = _decode_boxes(outputs, card)
        if not isinstance(samples, ImageSet) or transform is None:  # tensors have no other geometry
            return [_list_boxes(image, image.boxes) for image in images]
        rows = []
        for image, file in zip(images, files, strict=True):
            height, width = read_image_size(samples.root / file.path, transform)
            down, across = compute_geometry(transform, height, width)
            boxes = image.boxes.copy()
            for axis, places, side in ((across, [0, 2], width), (down, [1, 3], height)):
                boxes[:, places] = ((boxes[:, places] - axis.offset) / axis.scale).clip(0, side)
            rows.append(_list_boxes(image, boxes))
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
        source_boxes: list[Any] = []
        run_boxes: list[Any] = []
        at = 0
        for batch, count in split_batches(card, inputs):
            known = {name: value[at : at + count] for name, value in expected.items()}
            outputs = rows_from_outputs(card.outputs, run(batch), count)
            source_boxes += [
                _list_boxes(image, image.boxes) for image in _decode_boxes(known, card)
            ]
            run_boxes += [_list_boxes(image, image.boxes) for image in _decode_boxes(outputs, card)]
            at += count
        shown_by_source = self.take_as_truths(source_boxes)
        if not any(shown_by_source):
            return None
        shown_by_run = self.take_as_truths(run_boxes)
        shown = [any(pair) for pair in zip(shown_by_source, shown_by_run, strict=True)]
        return float(self.compute_sample_parity(source_boxes, run_boxes)[shown].mean())

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
        return self.compute_all_scores(gathered, weights)[0]

    def compute_all_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        precisions = np.stack([compute_average_precision(matched, weights) for matched in gathered])
        occurring = precisions[[bool(matched.objects.any()) for matched in gathered]]
        means = [
            np.nanmean(occurring, axis=(0, 2)),
            np.nanmean(occurring[..., 0], 0),
            np.nanmean(occurring[..., 5], 0),
        ]
        rates = compute_rates(gathered, weights, PARITY_SCORE)
        return np.stack([*means, *rates], axis=1), precisions.mean(axis=2).T

    def spread_truths(self, gathered: Any) -> list[NDArray[np.float64]]:
        objects = self.spread_class_truths(gathered)
        together = objects.sum(axis=0, keepdims=True)
        return [objects if find_score(name).over_classes else together for name in self.scores]

    def spread_class_truths(self, gathered: Any) -> NDArray[np.float64]:
        return np.stack([matched.objects for matched in gathered]) if gathered else np.zeros((0, 1))

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """F1 of each image's boxes of one class with an IoU of at least PARITY_IOU; 1 if neither model has any."""
        return np.array(
            [compute_overlap(mine, theirs) for mine, theirs in zip(source, build, strict=True)]
        )

    def compute_parity(self, source: Values, build: Values) -> Agreement | None:
        """Adds the shift of the scores of the source's shown boxes: their mean with its interval, and quantiles."""
        agreement = TaskContract.compute_parity(self, source, build)
        by_image = [np.array(list_score_shifts(*pair)) for pair in zip(source, build, strict=True)]
        shifts = np.concatenate(by_image) if by_image else np.zeros(0)
        if agreement is None or not shifts.size:
            return agreement
        mean = float(shifts.mean())
        images = len(by_image)
        parts = np.array(
            [images * (moved.sum() - mean * moved.size) / shifts.size for moved in by_image]
        )
        figure = figure_from_samples(mean, parts, images, (-1.0, 1.0), groups=self.groups)
        low, high = figure.interval(CONFIDENCE)
        quantiles = {f"p{at}": float(np.percentile(shifts, at)) for at in (5, 50, 95)}
        shift = {"boxes": float(shifts.size), "mean": mean, "low": low, "high": high, **quantiles}
        return replace(agreement, score_shift=shift)

    def observe(
        self,
        truths: Values | None,
        source: Values,
        build: Values,
        confidence: float,
        about: str,
        labels: Sequence[str] = (),
    ) -> dict[str, Observation]:
        """Adds F1 and its drop at each of SCORE_THRESHOLDS, as `F1@25%`."""
        figures = TaskContract.observe(self, truths, source, build, confidence, about, labels)
        if truths is None:
            return figures
        rates = AT_THRESHOLDS.grouped_by(self.groups)
        more = TaskContract.observe(rates, truths, source, build, confidence, about)
        return figures | {name: rate for name, rate in more.items() if "@" in name}


class _AtThresholds(Detection):
    scores = tuple(f"{F1}@{score:.0%}" for score in SCORE_THRESHOLDS)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack(
            [compute_rates(gathered, weights, score)[0] for score in SCORE_THRESHOLDS], axis=1
        )

    def compute_all_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.compute_scores(gathered, weights), np.zeros((len(weights), 0))


AT_THRESHOLDS = _AtThresholds()


def _decode_boxes(outputs: Arrays, card: ModelCard) -> list[DetectedBoxes]:
    transform, image = card.transform, card.inputs[0]
    sides = (transform.size if transform else None) or (int(image.opt[-2]), int(image.opt[-1]))
    return decode_outputs(outputs, card, find_head(card), sides)


def _list_boxes(detected: DetectedBoxes, boxes: NDArray[np.float64]) -> list[list[float]]:
    """Rows (left, top, width, height, score, class) of the boxes that have an area and a score; `boxes` replace those of `detected`.

    No image has a side of LARGEST_SIDE pixels, which the boxes of a model that overflows have.
    """
    sizes = boxes[:, 2:] - boxes[:, :2]
    near = (np.abs(np.concatenate([boxes[:, :2], sizes], axis=1)) <= LARGEST_SIDE).all(1)
    kept = (sizes > 0).all(1) & near & np.isfinite(detected.scores)
    rows = np.concatenate(
        [boxes[:, :2], sizes, detected.scores[:, None], detected.labels[:, None]], axis=1
    )[kept]
    listed: list[list[float]] = rows.tolist()
    return listed
