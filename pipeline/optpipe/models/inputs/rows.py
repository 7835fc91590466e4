"""Samples as rows, first axis the sample, and as a model takes and gives them: its batch axis where its card has it.

Everything that is stored or compared is rows; what every call has in common (a sampling rate) is repeated for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.tensors import TensorSpec

Arrays = Mapping[str, NDArray[Any]]


def batch_from_rows(card: ModelCard, rows: Arrays) -> dict[str, NDArray[Any]]:
    """Rows `(samples, ...)` by input as one batch of the model."""
    return {each.name: lay_out(rows[each.name], each.batch) for each in card.inputs}


def lay_out(rows: NDArray[Any], axis: int | None) -> NDArray[Any]:
    """Rows with the samples on `axis`; the first row where there is no such axis."""
    return np.asarray(rows[0]) if axis is None else np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def to_rows(value: NDArray[Any], axis: int | None, count: int = 1) -> NDArray[Any]:
    """The inverse: `(samples, ...)`; what has no batch axis is repeated for each of `count` samples."""
    value = np.asarray(value)
    return np.repeat(value[np.newaxis], count, axis=0) if axis is None else np.moveaxis(value, axis, 0)


def rows_from_outputs(specs: Sequence[TensorSpec], outputs: Arrays, count: int) -> dict[str, NDArray[Any]]:
    """The outputs for `count` samples as rows."""
    return {each.name: to_rows(outputs[each.name], each.batch, count) for each in specs}


def count_rows(rows: Arrays) -> int:
    """How many samples there are."""
    return len(next(iter(rows.values())))


def count_batched(card: ModelCard, total: int, size: int | None = None) -> int:
    """How many of `total` samples `split_batches` gives."""
    return sum(_list_batch_sizes(card, total, size))


def _list_batch_sizes(card: ModelCard, total: int, size: int | None) -> list[int]:
    smallest, _, largest = card.batch_range
    step = min(size or largest, largest, total)
    return [count for start in range(0, total, step) if (count := min(step, total - start)) >= smallest]


def split_batches(
    card: ModelCard, rows: Arrays, size: int | None = None
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """All rows as batches of `size`, or of the largest that the profile allows, each with its number of samples.

    The rest is a smaller batch; a rest that is smaller than the profile's smallest batch is left out.
    """
    start = 0
    for count in _list_batch_sizes(card, count_rows(rows), size):
        yield batch_from_rows(card, {name: value[start : start + count] for name, value in rows.items()}), count
        start += count


def join_batches(name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One output's rows of all batches; raises `BadInputError` where they have no axes or not the same ones."""
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1 or not all(part.ndim for part in parts):
        seen = (
            "one value for a whole batch"
            if len(shapes) == 1
            else f"{shapes[0]} for one batch and {shapes[1]} for another"
        )
        raise BadInputError(
            f"output '{name}' is {seen}, and answers are compared input by input: pad it in the model, or leave it out"
        )
    return np.concatenate(parts)
