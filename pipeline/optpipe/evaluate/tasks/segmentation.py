"""Semantic segmentation: the class of every pixel at the source's geometry, mean IoU, and pixel accuracy."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import MIOU, PIXEL_ACCURACY
from optpipe.core.transform import Axis, compute_geometry
from optpipe.evaluate.tasks.bounds import Asked, require_bounded
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.masks import decode_mask, decode_pair, encode_mask
from optpipe.models.inputs.image_set import (
    IGNORED,
    ImageSet,
    NothingJudgedError,
    read_image_size,
    read_mask,
    require_masks,
)
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile

MAX_CLASSES = 255


class Segmentation(TaskContract):
    """Predictions and truths are PNG files of class indices, as large as the source image.

    Logits are interpolated bilinearly to the source's geometry before argmax. The mean IoU is that of the whole set, over the
    classes that occur (Everingham et al., IJCV 88, 2010), not of images.
    """

    form: ClassVar[str] = "(n, classes, height, width)"
    class_axis: ClassVar[int | None] = 1
    scores: ClassVar[tuple[str, ...]] = (MIOU.name, PIXEL_ACCURACY.name)

    def require_model(self, card: ModelCard) -> None:
        super().require_model(card)
        classes = self.count_classes(card)
        if classes is not None and not 2 <= classes <= MAX_CLASSES:
            raise BadInputError(
                f"{card.name}: {classes} classes; segmentation is judged for 2 to {MAX_CLASSES}"
            )

    def require_capacity(self, samples: SampleSet, card: ModelCard, models: int) -> None:
        transform = card.transform
        if isinstance(samples, ImageSet) and transform is not None:
            sizes = (read_image_size(path, transform) for path in samples.paths)
            pixels = sum(height * width for height, width in sizes)
            require_bounded(Asked((1 + models) * pixels), samples.name)  # truths too

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        if not isinstance(samples, ImageSet) or card.transform is None:
            return None
        paths = require_masks(samples, card.transform, classes)
        if paths is None:
            return None
        if not any((read_mask(path) != IGNORED).any() for path in paths):
            problem = f"{samples.name}: none of the {len(paths)} masks has a judged pixel"
            raise NothingJudgedError(f"{problem} ({IGNORED} is ignored)")
        return [encode_mask(read_mask(path)) for path in paths]

    def show_sample(self, prediction: Any, truth: Any, file: SetFile) -> tuple[Any, Any]:
        return decode_mask(prediction), decode_mask(truth)

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        first, transform, masks = (
            outputs[card.outputs[0].name].astype(np.float32),
            card.transform,
            [],
        )
        # tensors have no other geometry
        if not isinstance(samples, ImageSet) or transform is None or transform.size is None:
            return [encode_mask(logits.argmax(0).astype(np.uint8)) for logits in first]
        for logits, file in zip(first, files, strict=True):
            axes = compute_geometry(
                transform, *read_image_size(samples.root / file.path, transform)
            )
            rows, columns = map(_make_interpolation, axes, transform.size, logits.shape[1:])
            masks.append(encode_mask((rows @ logits @ columns.T).argmax(0).astype(np.uint8)))
        return masks

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        """Correct, predicted, and true pixels, (3, images, classes), without ignored ones."""
        tables = []
        for pair in zip(truths, predictions, strict=True):
            truth, mask = decode_pair(*pair)
            judged = truth != IGNORED
            truth, mask = truth[judged], mask[judged]
            counted = (truth[truth == mask], mask, truth)
            tables.append(
                np.stack([np.bincount(counts, minlength=MAX_CLASSES + 1) for counts in counted])
            )
        return np.stack(tables, axis=1).astype(np.float64)

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.compute_all_scores(gathered, weights)[0]

    def compute_all_scores(
        self, gathered: Any, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        both, predicted, true = (weights @ counts for counts in gathered)
        by_class = _divide(both, predicted + true - both)
        with np.errstate(invalid="ignore"):
            accuracy = both.sum(1) / true.sum(1)
        return np.stack([np.nanmean(by_class, axis=1), accuracy], axis=1), by_class

    def spread_truths(self, gathered: Any) -> list[NDArray[np.float64]]:
        true = self.spread_class_truths(gathered)
        return [true, true.sum(axis=0, keepdims=True)]

    def spread_class_truths(self, gathered: Any) -> NDArray[np.float64]:
        return np.asarray(gathered[2].T)

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        pairs = (decode_pair(*pair) for pair in zip(source, build, strict=True))
        return np.array([float((before == after).mean()) for before, after in pairs])


def _make_interpolation(axis: Axis, side: int, cells: int) -> NDArray[np.float32]:
    """The matrix (source pixels, output cells) of linear interpolation between centers of cells, clamped at the border.

    `side` is the input's; the output's cells divide it evenly.
    """
    centers = (np.arange(axis.source) + 0.5) * axis.scale + axis.offset
    place = np.clip(centers * cells / side - 0.5, 0, cells - 1)
    low = np.minimum(np.floor(place).astype(int), max(cells - 2, 0))
    high, share = np.minimum(low + 1, cells - 1), place - low
    matrix = np.zeros((axis.source, cells), np.float32)
    np.add.at(matrix, (np.arange(axis.source), low), 1 - share)
    np.add.at(matrix, (np.arange(axis.source), high), share)
    return matrix


def _divide(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0))
