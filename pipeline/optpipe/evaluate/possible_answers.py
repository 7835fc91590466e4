"""What truths and answers can be, by task: section 8.1.2 of docs/dossier-format.md.

An answer that no model gives would be scored in some way by each verifier, and in another way by the next: a box of a negative
width, half a class, two ratings of one pair. Each column is checked before it is scored.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import polars as pl

from optpipe.core.card import Task
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.average_precision import MOST_CLASSES
from optpipe.evaluate.tasks.classification import TOP_K
from optpipe.evaluate.tasks.detection import LARGEST_SIDE
from optpipe.evaluate.tasks.masks import decode_mask
from optpipe.evaluate.tasks.texts import ALONE, OUTSIDE
from optpipe.evaluate.tasks.user_file import PREFIX
from optpipe.models.inputs.image_set import IGNORED

NUMBERS_OF_BOX, NUMBERS_OF_TRUE_BOX = 6, 7
MEMBERS_OF_PAIR = 2
WITH_NAMES = (Task.SEGMENTATION, Task.TOKEN_CLASSIFICATION, Task.MULTI_LABEL)
"""Their classes may have names; a head of a detector may skip some of its own."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a record says of the classes of its data set."""

    classes: int
    labels: Sequence[str] = ()


Check = Callable[[Any, Known], bool]


@dataclass(frozen=True, slots=True)
class Possible:
    """Whether a truth and an answer are possible, and whether those of one sample fit each other."""

    truth: Check
    answer: Check
    fit: Callable[[Any, Sequence[Any]], bool] = lambda _, __: True
    """Of the truth of a sample, None without one, and all answers."""


def find_impossible_answers(task: str, known: Known, frame: pl.DataFrame) -> Iterator[str]:
    """One line for the first column that has what no sample and no model can have, and for answers that do not fit each other."""
    if not _are_names(task, known):
        yield f"{len(known.labels)} names of {known.classes} classes are not possible for {task}"
    possible = _USER if task.startswith(PREFIX) else POSSIBLE.get(task)
    if possible is None:
        return
    truth = "class" if "class" in frame.columns else "truth"
    columns = {name: frame[name].to_list() for name in frame.columns if _is_answer(name)}
    truths = frame[truth].to_list() if truth in frame.columns else [None] * frame.height
    if None in truths:  # such truths are not read
        truths = [None] * frame.height
    for name, values in (*columns.items(), (truth, truths)):
        holds = possible.truth if name == truth else possible.answer
        for at, value in enumerate(values):
            if name == truth and value is None:
                continue
            if (fault := _find_fault(holds, value, known)) is not None:
                yield f"{name} of sample {at} is not possible for {task}{fault}"
                return
    for at, (true, *answers) in enumerate(zip(truths, *columns.values(), strict=True)):
        if _find_fault(possible.fit, true, answers) is not None:
            yield f"the answers of sample {at} do not fit each other, or its truth"
            return
    if task == Task.EMBEDDING and not _are_pairs(truths):
        yield f"{truth} has pairs that are not of two samples with one rating"


def _are_names(task: str, known: Known) -> bool:
    """Whether the record names as many classes as there are, if the task names some."""
    return task == Task.DETECTION or len(known.labels) in (
        {0, known.classes} if task in WITH_NAMES else {0}
    )


def _is_answer(name: str) -> bool:
    return name.endswith((":best", ":prediction", "_prediction"))


def _find_fault(holds: Callable[..., bool], *values: Any) -> str | None:
    """None if it holds; otherwise what a reader says of values that it cannot read, or nothing."""
    try:
        return None if holds(*values) else ""
    except BadInputError as error:
        return f": {error}"
    except RecursionError:
        return ": JSON that is too deep"
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        return ""


def _is_class(value: Any, known: Known) -> bool:
    return isinstance(value, int) and 0 <= value < known.classes


def _are_best(value: Any, known: Known) -> bool:
    return 0 < len(value) == len({*value}) <= TOP_K and all(
        _is_class(label, known) for label in value
    )


def _are_classes(value: Any, known: Known) -> bool:
    return value == sorted({*value}) and all(_is_class(label, known) for label in value)


def _is_mask(value: Any, known: Known) -> bool:
    return int(decode_mask(value).max(initial=0)) < known.classes


def _is_true_mask(value: Any, known: Known) -> bool:
    pixels = decode_mask(value)
    return int(pixels[pixels != IGNORED].max(initial=0)) < known.classes


def _is_place(box: Sequence[float], label: float) -> bool:
    """Of finite numbers: an area, and the whole number of a class."""
    inside = all(isfinite(number) and abs(number) <= LARGEST_SIDE for number in box[:4])
    return inside and all(map(isfinite, box)) and min(box[2:4]) > 0 and 0 <= label == int(label)


def _are_boxes(value: Any, _known: Known) -> bool:
    return all(
        len(box) == NUMBERS_OF_BOX and _is_place(box, box[5]) and box[4] >= 0 for box in value
    )


def _are_true_boxes(value: Any, _known: Known) -> bool:
    return all(
        len(box) == NUMBERS_OF_TRUE_BOX
        and _is_place(box, box[4])
        and box[4] < MOST_CLASSES
        and box[5] >= 0
        and box[6] in (0, 1)
        for box in value
    )


def _are_tags(value: Any, known: Known) -> bool:
    return all(isinstance(tag, str) and tag and tag.isprintable() for tag in value) and (
        not known.labels or {*value} <= {*known.labels, OUTSIDE}
    )


def _are_finite(value: Any, _known: Known) -> bool:
    return bool(value) and all(map(isfinite, value))


def _is_text(value: Any, _known: Known) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any, _known: Known) -> bool:
    return all(isinstance(text, str) for text in value)


def _is_rating(value: Any, _known: Known) -> bool:
    number, rating = value
    return value == ALONE or (0 <= number == int(number) and isfinite(rating))


def _is_scored(value: Any, _known: Known) -> bool:
    json.loads(value["prediction"])
    return value["score"] is None or 0 <= value["score"] <= 1


def _have_one_length(truth: Any, answers: Sequence[Any]) -> bool:
    return len({len(answer) for answer in (*answers, *([] if truth is None else [truth]))}) < 2


def _are_as_long(_truth: Any, answers: Sequence[Any]) -> bool:
    return _have_one_length(None, answers)


def _are_pairs(truths: Sequence[Any]) -> bool:
    members: dict[float, list[float]] = {}
    for number, rating in (truth for truth in truths if truth is not None and truth != ALONE):
        members.setdefault(number, []).append(rating)
    return all(
        len(ratings) == MEMBERS_OF_PAIR and ratings[0] == ratings[1] for ratings in members.values()
    )


_CLASS = Possible(_is_class, _are_best)
_USER = Possible(lambda _, __: True, _is_scored)
POSSIBLE: Mapping[str, Possible] = {
    Task.CLASSIFICATION: _CLASS,
    Task.TEXT_CLASSIFICATION: _CLASS,
    Task.SEGMENTATION: Possible(_is_true_mask, _is_mask),
    Task.DETECTION: Possible(_are_true_boxes, _are_boxes),
    Task.TOKEN_CLASSIFICATION: Possible(_are_tags, _are_tags, _have_one_length),
    Task.QUESTION_ANSWERING: Possible(_are_texts, _is_text),
    Task.MULTI_LABEL: Possible(_are_classes, _are_classes),
    Task.REGRESSION: Possible(_are_finite, _are_finite, _have_one_length),
    Task.EMBEDDING: Possible(_is_rating, _are_finite, _are_as_long),
}
"""By task."""
