"""Samples as rows, first axis the sample, and as a model takes and gives them: its batch axis where its card has it.

Everything that is stored or compared is rows; what every call has in common (a sampling rate) is repeated for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import InputSpec, ModelCard, TensorSpec
from optpipe.core.errors import BadInputError

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
    """The outputs for `count` samples as rows. Raises BadInputError for one without the axis of the samples."""
    found = {}
    for each in specs:
        value, axis = np.asarray(outputs[each.name]), each.batch
        if axis is not None and value.ndim <= axis:
            if count > 1:
                raise BadInputError(
                    f"output '{each.name}' is a single value for a whole batch: leave it out, or give --batch 1"
                )
            axis = None
        found[each.name] = to_rows(value, axis, count)
    return found


def count_rows(rows: Arrays) -> int:
    """How many samples there are."""
    return len(next(iter(rows.values())))


def list_runs(inputs: Sequence[InputSpec], rows: Arrays) -> list[slice]:
    """The samples that can share a batch: one after the other, with the same values of what has no batch axis."""
    count = count_rows(rows)
    shared = [rows[each.name].reshape(count, -1) for each in inputs if each.batch is None]
    edges = [0, *(at for at in range(1, count) if any((one[at] != one[at - 1]).any() for one in shared)), count]
    return [slice(*pair) for pair in pairwise(edges)]


def list_batches(card: ModelCard, rows: Arrays, size: int | None = None) -> list[slice]:
    """The rows of each batch of `split_batches`."""
    smallest, _, largest = card.batch_range
    found = []
    for run in list_runs(card.inputs, rows):
        step = min(size or largest, largest, run.stop - run.start)
        starts = range(run.start, run.stop, step)
        found += [slice(start, end) for start in starts if (end := min(start + step, run.stop)) - start >= smallest]
    return found


def split_batches(
    card: ModelCard, rows: Arrays, size: int | None = None
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """All rows as batches of `size`, or of the largest that the profile allows, each with its number of samples.

    The rest is a smaller batch; a rest that is smaller than the profile's smallest batch is left out. Samples with other values of
    an input without a batch axis are another batch.
    """
    for part in list_batches(card, rows, size):
        yield batch_from_rows(card, {name: value[part] for name, value in rows.items()}), part.stop - part.start


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


def run_rows(
    card: ModelCard, rows: Arrays, run: Callable[[Arrays], Arrays], size: int | None = None
) -> dict[str, NDArray[Any]]:
    """The outputs of `run`, from a batch of inputs to outputs by name, as rows: all of `rows` in the batches of `split_batches`."""
    runs = [rows_from_outputs(card.outputs, run(batch), count) for batch, count in split_batches(card, rows, size)]
    return {each.name: join_batches(each.name, [one[each.name] for one in runs]) for each in card.outputs}


TOKENS_OF_A_POOL = 4096
"""Of filled sequences, whose reference outputs are computed in FP32 on the CPU: 64 of 64 tokens, 8 of 512."""
FEWEST_SEQUENCES = 8
MASK = "attention_mask"


def read_length(card: ModelCard, rows: Arrays) -> int | None:
    """Tokens of each row, padding included; None for a model without sequences."""
    return next((rows[name].shape[axis] for name, axis in _find_axes(card).items()), None)


def compute_padding(rows: Arrays) -> float:
    """Share of the positions that the attention mask leaves out; 0 without a mask."""
    return float(1 - np.mean(rows[MASK] != 0)) if MASK in rows else 0.0


def fill_sequences(card: ModelCard, rows: Arrays, length: int, most: int) -> dict[str, "np.ndarray"]:
    """Up to `most` rows of `length` tokens without padding: the tokens of the rows one after the other, from each in turn.

    `rows` are `(samples, ...)` by input; what counts no tokens is kept.
    """
    known, axes = count_rows(rows), _find_axes(card)
    mask = rows.get(MASK)
    if mask is None:
        mask = np.ones((known, read_length(card, rows) or 1))
    of, at = np.nonzero(mask)  # the row and the place of every token
    starts = np.searchsorted(of, np.arange(known))
    count = max(card.batch_range[0], min(most, max(FEWEST_SEQUENCES, TOKENS_OF_A_POOL // length)))
    # a second round over the rows starts one token later: no two sequences are the same
    begin = [starts[index % known] + index // known for index in range(count)]
    taken = (np.array(begin)[:, None] + np.arange(length)) % len(of)
    filled = {}
    for name, value in rows.items():
        if name in axes:
            tokens = np.moveaxis(value, axes[name], 1)[of[taken], at[taken]]
            filled[name] = np.ascontiguousarray(np.moveaxis(tokens, 1, axes[name]))
        else:
            filled[name] = value[np.arange(count) % known]
    return filled


def _find_axes(card: ModelCard) -> dict[str, int]:
    """The axis that counts tokens in rows, whose first axis is the batch, by input."""
    batches = {each.name: each.batch or 0 for each in card.inputs}
    return {name: axis if axis > batches[name] else axis + 1 for name, axis in card.length_axes.items()}
