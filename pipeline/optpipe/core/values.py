"""Names the type of an array's elements, and recognizes integers of any type."""

from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_KINDS = {
    "O": "objects",
    "S": "bytes",
    "U": "strings",
    "V": "records",
    "M": "dates",
    "m": "durations",
}


def describe_elements(array: "np.ndarray[Any, Any]") -> str:
    """`objects, the first of type NoneType`, `texts`, or the type of numbers, such as `complex64`."""
    kind = _KINDS.get(array.dtype.kind, str(array.dtype))
    if array.dtype.kind != "O" or not array.size:
        return kind
    return f"{kind}, the first of type {type(array.flat[0]).__name__}"


def is_integer(value: object) -> bool:
    """Whether it is a whole number of Python or NumPy, and no truth value.

    >>> [is_integer(value) for value in (3, True, 3.0, "3")]
    [True, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool)
