"""Sequences of a stated length: token inputs cut out of real texts, so that no position is padding."""

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.models.inputs.rows import Arrays, count_rows

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
