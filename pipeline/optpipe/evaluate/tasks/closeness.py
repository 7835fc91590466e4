"""Whether two predictions are the same: numbers of continuous outputs within a tolerance, everything else exactly.

A number with a fraction never repeats exactly in another precision, so that its text says nothing. It counts as the same within
TOLERANCE of the spread (standard deviation) of the source model's numbers at that place of the prediction over the set.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.01
LEAST_RELATIVE = 1e-6
"""Of the number itself, for places where the source model's numbers do not differ."""
Path = tuple[Hashable, ...]


def compare_predictions(source: Sequence[Any], build: Sequence[Any]) -> NDArray[np.float64]:
    """1 for each sample whose predictions are the same, otherwise 0, (samples,).

    Predictions are values that JSON can hold.

    >>> compare_predictions([{"at": 1.0}, {"at": 3.0}], [{"at": 1.004}, {"at": 3.2}])
    array([1., 0.])
    """
    before, after = (
        [dict(_list_leaves(prediction)) for prediction in some] for some in (source, build)
    )
    numbers: dict[Path, list[float]] = {}
    for leaves in before:
        for path, value in leaves.items():
            if _is_number(value):
                numbers.setdefault(path, []).append(float(value))
    with np.errstate(invalid="ignore"):
        room = {path: TOLERANCE * float(np.std(values)) for path, values in numbers.items()}
    return np.array(
        [
            float(
                expected.keys() == actual.keys()
                and all(
                    _is_same(value, actual[path], room.get(path, 0.0))
                    for path, value in expected.items()
                )
            )
            for expected, actual in zip(before, after, strict=True)
        ]
    )


def _list_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Numbers, texts, and so on, by their place; of a container also its kind and length."""
    if isinstance(value, dict):
        yield (*path, "{}"), len(value)
        for key, part in value.items():
            yield from _list_leaves(part, (*path, f".{key}"))
    elif isinstance(value, list):
        yield (*path, "[]"), len(value)
        for key, part in enumerate(value):
            yield from _list_leaves(part, (*path, key))
    else:
        yield path, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(left: Any, right: Any, room: float) -> bool:
    if not (_is_number(left) and _is_number(right)) or float not in (type(left), type(right)):
        return type(left) is type(right) and bool(left == right)
    if left == right or (left != left and right != right):
        return True
    return bool(abs(left - right) <= max(room, LEAST_RELATIVE * abs(left)))
