"""Results that are kept by the content of arrays: a report, a verdict, and a verification ask for the same several times."""

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_MOST_KEPT = 4096


def remember(
    compute: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Keeps the results of `compute`, which takes arrays, sequences of them, and values with a `repr`, and returns no array.

    >>> @remember
    ... def add_up(values: np.ndarray) -> float:
    ...     print("adding")
    ...     return float(values.sum())
    >>> add_up(np.ones(3)), add_up(np.ones(3))
    adding
    (3.0, 3.0)
    """
    kept: dict[bytes, _Result] = {}

    @wraps(compute)
    def ask(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        content = hashlib.blake2b(digest_size=16)
        for part in (arguments, *sorted(named.items())):
            _add_content(part, content)
        key = content.digest()
        if key not in kept:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = compute(*arguments, **named)
        return kept[key]

    return ask


def _add_content(value: object, content: "hashlib.blake2b") -> None:
    """Adds each value with its type and length, so that different values have different content."""
    if isinstance(value, np.ndarray):
        content.update(f"{value.dtype.str}{value.shape}".encode())
        content.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        content.update(f"[{len(value)}]".encode())
        for item in value:
            _add_content(item, content)
    else:
        content.update(f"{type(value).__name__}:{value!r};".encode())
