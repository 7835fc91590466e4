"""Words for the elements of an array that holds no numbers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_KINDS = {
    "O": "objects",
    "S": "bytes",
    "U": "texts",
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
