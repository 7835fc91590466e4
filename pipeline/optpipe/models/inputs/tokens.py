"""Text as token identifiers, by the tokenizer that is stored beside a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.core.card import ModelCard

SENTENCES = (
    "Yes.",
    "The plot is thin, but the two leads carry it.",
    "I would not send this back to the shop: it does what the box says, and quietly.",
    "Two hours in, nothing had happened that the trailer did not show.",
    "Delivery took nine days; the support line answered at once and sent a second one free of charge.",
    "What a mess",
    "Neither the sound nor the picture is perfect, yet together they make the old recording feel close, almost present, "
    "and after a while one stops listening for faults and simply listens.",
    "12 screws, 3 of them bent. Manual in four languages, none of which explains step 7!",
)
"""What a text model's build is verified on: short and long, so that padding is part of it."""


def encode_texts(texts: Sequence[str], tokenizer: Path, max_length: int) -> list[list[int]]:
    """The token identifiers of each text, special ones included, cut at `max_length`."""
    return [each.ids for each in tokenize(texts, tokenizer, max_length)]


def find_long_texts(texts: Mapping[str, str], tokenizer: str, max_length: int) -> dict[str, int]:
    """The names of the texts with more than `max_length` tokens, and how many they have.

    `tokenizer` is the content of a `tokenizer.json`; where it truncates texts itself, that comes first.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(tokenizer)
    loaded.no_padding()
    counts = (len(each.ids) for each in loaded.encode_batch(list(texts.values())))
    return {name: count for name, count in zip(texts, counts, strict=True) if count > max_length}


def find_first_tokens(text: str, encoded: Any) -> list[int]:
    """The first token of each word of `text`, where words are what spaces separate; -1 for a word without a token.

    `encoded` is what `tokenize` gave for the text.
    """
    ends = np.cumsum([len(word) + 1 for word in text.split(" ")])
    firsts = [-1] * len(ends)
    for place, ((_, end), special) in enumerate(zip(encoded.offsets, encoded.special_tokens_mask, strict=True)):
        # by its last character, since a token may begin with the space before the word
        word = int(np.searchsorted(ends, end - 1, side="right"))
        if not special and firsts[word] < 0:
            firsts[word] = place
    return firsts


def tokenize(texts: Sequence[str], tokenizer: Path, max_length: int) -> list[Any]:
    """The `tokenizers.Encoding` of each text, not padded, and cut at `max_length` or where the tokenizer itself cuts."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.no_padding()
    own = loaded.truncation or {"max_length": max_length}
    loaded.enable_truncation(**{**own, "max_length": min(own["max_length"], max_length)})
    return list(loaded.encode_batch(list(texts)))


def compute_max_tokens(card: ModelCard) -> int:
    """The most tokens that a text may have: what the tokenizer and the profile both allow."""
    assert card.tokenization is not None
    return min(card.tokenization.max_length, card.inputs[0].max[1])


def pad_tokens(
    card: ModelCard, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> "dict[str, np.ndarray]":
    """Rows of token identifiers as a text model's inputs: padded to the longest, or to the shortest length it takes.

    `types` says of which of two texts each token is; the first for all without it.
    """
    assert card.tokenization is not None
    width = max(card.inputs[0].min[1], *(len(row) for row in rows))
    ids = np.full((len(rows), width), card.tokenization.pad_id, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    kinds = np.zeros_like(ids)
    for index, row in enumerate(types or ()):
        kinds[index, : len(row)] = row
    known = {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}
    return {each.name: known[each.name].astype(each.dtype) for each in card.inputs}
