"""Several labels for each sample, and values: multi-label classification by F1, and regression by R², RMSE, and MAE."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import MAE, R2, RMSE
from optpipe.evaluate.tasks.closeness import compare_predictions
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.counted import CountedScores
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.task_data import index_labels
from optpipe.models.inputs.text_set import TextSet

THRESHOLD = "threshold"


class MultiLabel(CountedScores):
    """Predictions and truths are the ascending indices of the classes that a sample has; scores are micro-averages.

    A class is predicted if its output is above the card's `[head] threshold`, by default 0, for outputs before the sigmoid.
    """

    form: ClassVar[str] = "(n, classes)"
    class_axis: ClassVar[int | None] = 1

    def describe_scoring(self, card: ModelCard) -> str:
        return f"a class counts if its output is above {_read_threshold(card):g}"

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        """From a 0 or 1 for each class, names of classes, or their indices."""
        said = _read_labels(samples, "labels", "label")
        if said is None or classes is None:
            return None
        if all(_is_marks(value, classes) for value in said):
            return [[place for place, mark in enumerate(value) if mark] for value in said]
        places = (f"{samples.name}, {file.path}" for file in samples.files)
        return [
            _find_classes(value, card, classes, where)
            for value, where in zip(said, places, strict=True)
        ]

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        scores = np.asarray(outputs[card.outputs[0].name], np.float32)
        if THRESHOLD not in card.head and scores.size and scores.min() >= 0 and scores.max() <= 1:
            problem = f"{card.name}: all outputs are from 0 to 1, as probabilities are"
            raise BadInputError(
                f"{problem}\nsay from which one a class counts in a model card: [head] threshold = 0.5"
            )
        return [np.flatnonzero(row > _read_threshold(card)).tolist() for row in scores]

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        """Right, predicted, and true classes (samples, classes, 3)."""
        width = 1 + max(
            (max(classes, default=-1) for classes in (*truths, *predictions)), default=-1
        )
        counts = np.zeros((len(truths), max(width, 1), 3))
        for row, true, predicted in zip(counts, truths, predictions, strict=True):
            for column, classes in enumerate(({*true} & {*predicted}, predicted, true)):
                row[sorted(classes), column] = 1
        return counts

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """Classes of both over classes of either; 1 without a class."""
        pairs = (({*before}, {*after}) for before, after in zip(source, build, strict=True))
        return np.array(
            [
                len(before & after) / max(len(before | after), 1) if before | after else 1.0
                for before, after in pairs
            ]
        )

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        return len({tuple(prediction) for prediction in source}) > 1


class Regression(TaskContract):
    """Predictions and truths are lists of numbers: a sample's first output, flat.

    Errors are in units of the truths' standard deviation, and averaged over a sample's outputs, so that scores do not depend on
    units: R2 is 1 less the mean squared error, at least -1; RMSE is its root and MAE the mean absolute error, at most 1, which is
    the RMSE of a model that always predicts the mean. RMSE and MAE are better when lower, and a drop is their rise.
    """

    scores: ClassVar[tuple[str, ...]] = (R2.name, RMSE.name, MAE.name)
    score_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    names_classes: ClassVar[bool] = False
    needs_finite: ClassVar[bool] = True

    def describe_scoring(self, card: ModelCard) -> str:
        return "RMSE and MAE in units of the truths' standard deviation"

    def require_model(self, card: ModelCard) -> None:
        if card.outputs and not card.outputs[0].dtype.startswith(("float", "bfloat")):
            first = card.outputs[0]
            raise BadInputError(
                f"{card.name}: {card.task} needs a first output of floats, but {first.name} is {first.dtype}"
            )

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        said = _read_labels(samples, "label", "score")
        if said is None:
            return None
        places = (f"{samples.name}, {file.path}" for file in samples.files)
        truths = [_read_numbers(value, where) for value, where in zip(said, places, strict=True)]
        if len({len(truth) for truth in truths}) > 1:
            raise BadInputError(f"{samples.name}: its labels have different numbers of values")
        spread = np.array(truths).std(axis=0)
        if not (spread > 0).all():
            problem = f"{samples.name}: all labels are {truths[0][int(spread.argmin())]:g}"
            raise BadInputError(f"{problem} in one place; R2 needs values that differ")
        return truths

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        values = np.asarray(outputs[card.outputs[0].name], np.float64)
        rows: list[list[float]] = values.reshape(len(values), -1).tolist()
        return rows

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        """Squares and distances of the errors, the truths, and their squares, (4, samples, outputs)."""
        true, predicted = np.array(truths, np.float64), np.array(predictions, np.float64)
        if true.shape != predicted.shape:
            problem = f"labels have {true.shape[1]} values for each sample"
            raise BadInputError(f"{problem}, and the model's first output has {predicted.shape[1]}")
        apart = predicted - true
        return np.stack([apart**2, np.abs(apart), true, true**2])

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        total = weights.sum(axis=1, keepdims=True)
        square, distance, true, true_square = (weights @ moment / total for moment in gathered)
        with np.errstate(invalid="ignore", divide="ignore"):
            variance = np.maximum(true_square - true**2, 0.0)
            error = (square / variance).mean(axis=1)
            absolute = (distance / np.sqrt(variance)).mean(axis=1)
        scores = [
            np.maximum(1 - error, -1.0),
            np.minimum(np.sqrt(error), 1.0),
            np.minimum(absolute, 1.0),
        ]
        return np.stack(scores, axis=1)

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        return compare_predictions(source, build)

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        return bool(np.ptp(np.array(source, np.float64), axis=0).any())


def _read_threshold(card: ModelCard) -> float:
    """Raises BadInputError for a threshold that is not a number, and for another entry, which would have no effect."""
    stated: object = card.head.get(THRESHOLD, 0.0)
    if isinstance(stated, bool) or not isinstance(stated, int | float):
        raise BadInputError(f"{card.name}: [head] threshold = {stated!r} is not a number")
    if others := sorted(set(card.head) - {THRESHOLD}):
        raise BadInputError(f"{card.name}: [head] has no '{others[0]}'; it has threshold")
    return float(stated)


def _read_labels(samples: SampleSet, *keys: str) -> list[Any] | None:
    """The label of each sample as JSON has it, by the first of `keys` that its line has; None if one has none."""
    if isinstance(samples, TextSet):
        said = [
            next((value[key] for key in keys if value.get(key) is not None), None)
            for value in samples.read_objects()
        ]
        return None if any(label is None for label in said) else said
    if any(file.label is None for file in samples.files):
        return None
    return [_parse_label(str(file.label)) for file in samples.files]


def _parse_label(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_marks(value: Any, classes: int) -> bool:
    """Whether a label is a 0 or 1 for each class. The labels of a set are all of one form: [0, 1] is marks, or indices."""
    return (
        isinstance(value, list)
        and len(value) == classes
        and all(not isinstance(mark, str) and mark in (0, 1) for mark in value)
    )


def _find_classes(value: Any, card: ModelCard, classes: int, where: str) -> list[int]:
    """Ascending indices of the classes that a label names."""
    many = value if isinstance(value, list) else [value]
    names = index_labels(card, (label for label in many if isinstance(label, str)))
    places = set()
    for label in many:
        place = names.get(label, label) if isinstance(label, str) else label
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < classes:
            way = f"give a 0 or 1 for each of the {classes} classes, or a list of names or indices"
            raise BadInputError(f"{where}: {label!r} is not a class of {card.name}; {way}")
        places.add(place)
    return sorted(places)


def _read_numbers(value: Any, where: str) -> list[float]:
    many = np.array(value).reshape(-1).tolist() if isinstance(value, list) else [value]
    wrong = next(
        (number for number in many if isinstance(number, bool | str) or number is None), None
    )
    if wrong is not None or not np.isfinite(np.array(many, np.float64)).all():
        raise BadInputError(f"{where}: {value!r} is not a number or a list of numbers")
    return [float(number) for number in many]
