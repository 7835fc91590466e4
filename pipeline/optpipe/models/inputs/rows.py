"""Converts between rows (samples, ...) and a model's batches, whose batch axes are in its card.

Everything that is stored or compared is rows; a value that all samples of a call share (a sampling rate) is repeated
for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import InputSpec, ModelCard, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Argument

Arrays = Mapping[str, NDArray[Any]]


def batch_from_rows(card: ModelCard, rows: Arrays) -> dict[str, NDArray[Any]]:
    """One batch of the model from rows (samples, ...) by input."""
    return {spec.name: lay_out(rows[spec.name], spec.batch) for spec in card.inputs}


def lay_out(rows: NDArray[Any], axis: int | None) -> NDArray[Any]:
    """Moves the samples to `axis`; the first row if `axis` is None."""
    return np.asarray(rows[0]) if axis is None else np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def to_rows(value: NDArray[Any], axis: int | None, count: int = 1) -> NDArray[Any]:
    """Inverse of `lay_out`; without a batch axis, the value is repeated `count` times."""
    value = np.asarray(value)
    return (
        np.repeat(value[np.newaxis], count, axis=0) if axis is None else np.moveaxis(value, axis, 0)
    )


def rows_from_outputs(
    specs: Sequence[TensorSpec], outputs: Arrays, count: int
) -> dict[str, NDArray[Any]]:
    """The outputs for `count` samples as rows. Raises BadInputError for an output without its batch axis."""
    rows = {}
    for spec in specs:
        value, axis = np.asarray(outputs[spec.name]), spec.batch
        if axis is not None and value.ndim <= axis:
            if count > 1:
                problem = f"output '{spec.name}' is a single value for a whole batch"
                raise BadInputError(f"{problem}: leave it out, or give " + Argument("batch", 1))
            axis = None
        rows[spec.name] = to_rows(value, axis, count)
    return rows


def count_rows(rows: Arrays) -> int:
    return len(next(iter(rows.values())))


def list_runs(inputs: Sequence[InputSpec], rows: Arrays) -> list[slice]:
    """Consecutive samples that can share a batch: they have the same values of inputs without a batch axis."""
    count = count_rows(rows)
    shared = [rows[spec.name].reshape(count, -1) for spec in inputs if spec.batch is None]
    edges = [
        0,
        *(
            at
            for at in range(1, count)
            if any((values[at] != values[at - 1]).any() for values in shared)
        ),
        count,
    ]
    return [slice(*pair) for pair in pairwise(edges)]


def list_batches(card: ModelCard, rows: Arrays, size: int | None = None) -> list[slice]:
    smallest, _, largest = card.batch_range
    batches = []
    for run in list_runs(card.inputs, rows):
        step = min(size or largest, largest, run.stop - run.start)
        starts = range(run.start, run.stop, step)
        batches += [
            slice(start, end)
            for start in starts
            if (end := min(start + step, run.stop)) - start >= smallest
        ]
    return batches


def split_batches(
    card: ModelCard, rows: Arrays, size: int | None = None
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """All rows as batches of `size`, or of the profile's maximum, each with its number of samples.

    The rest is a smaller batch, or is left out if it is below the profile's minimum. Samples with different values of
    an input without a batch axis are in different batches.
    """
    for part in list_batches(card, rows, size):
        yield (
            batch_from_rows(card, {name: value[part] for name, value in rows.items()}),
            part.stop - part.start,
        )


def join_batches(name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One output's rows of all batches. Raises BadInputError if their axes differ or are missing."""
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1 or not all(part.ndim for part in parts):
        seen = "one value for a whole batch"
        if len(shapes) > 1:
            seen = f"{shapes[0]} for one batch and {shapes[1]} for another"
        problem = f"output '{name}' is {seen}, and outputs are compared input by input"
        raise BadInputError(f"{problem}: pad it in the model, or leave it out")
    return np.concatenate(parts)


def run_rows(
    card: ModelCard, rows: Arrays, run: Callable[[Arrays], Arrays], size: int | None = None
) -> dict[str, NDArray[Any]]:
    """Runs `run`, from a batch of inputs to outputs by name, on all of `rows` in the batches of `split_batches`; returns rows."""
    runs = [
        rows_from_outputs(card.outputs, run(batch), count)
        for batch, count in split_batches(card, rows, size)
    ]
    return {
        spec.name: join_batches(spec.name, [outputs[spec.name] for outputs in runs])
        for spec in card.outputs
    }


TOKENS_OF_A_POOL = 4096
"""Limits filled sequences, whose FP32 reference is computed on the CPU: 64 of 64 tokens, 8 of 512."""
FEWEST_SEQUENCES = 8
MASK = "attention_mask"


def read_length(card: ModelCard, rows: Arrays) -> int | None:
    return next((rows[name].shape[axis] for name, axis in _find_axes(card).items()), None)


def compute_padding(rows: Arrays) -> float:
    """Share of positions that the attention mask excludes; 0 without a mask."""
    return float(1 - np.mean(rows[MASK] != 0)) if MASK in rows else 0.0


def fill_sequences(card: ModelCard, rows: Arrays, length: int, most: int) -> dict[str, np.ndarray]:
    """Up to `most` rows of `length` tokens without padding, made of the rows' consecutive tokens, starting at each row in turn.

    `rows` are (samples, ...) by input; inputs without tokens are kept.
    """
    known, axes = count_rows(rows), _find_axes(card)
    mask = rows.get(MASK)
    if mask is None:
        mask = np.ones((known, read_length(card, rows) or 1))
    of, at = np.nonzero(mask)  # row and position of every token
    starts = np.searchsorted(of, np.arange(known))
    count = max(card.batch_range[0], min(most, max(FEWEST_SEQUENCES, TOKENS_OF_A_POOL // length)))
    # a second round over the rows starts one token later, so that all sequences differ
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
    batches = {spec.name: spec.batch or 0 for spec in card.inputs}
    return {
        name: axis if axis > batches[name] else axis + 1 for name, axis in card.length_axes.items()
    }
