"""From texts to the tokens that a model reads, by the `tokenizer.json` or the function that is stored with it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.core import LazyModule
from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, first_line
from optpipe.core.files import read_user_text
from optpipe.models.inputs.text_lines import Text
from optpipe.models.sources.text_tokenizer import TYPES, Tokens, encode_by_function, is_function

tokenizers = LazyModule("tokenizers")


def takes_types(card: ModelCard) -> bool:
    return any(spec.name == TYPES for spec in card.inputs)


def gives_types(tokenizer: str) -> bool:
    """Whether a tokenizer tells the second of two texts from the first by its types; `tokenizer` is the content of its file."""
    pair = ("a", "b")
    if is_function(tokenizer):
        return any(any(row.types) for row in encode_by_function(tokenizer, [pair]))
    (encoding,) = encode_batch(tokenizers.Tokenizer.from_str(tokenizer), [pair])
    return any(encoding.type_ids)


def encode_batch(loaded: Any, texts: Sequence[Text]) -> list[Any]:
    """The `tokenizers.Encoding` of each text. Raises BadInputError where a rule of the tokenizer fails on one of them.

    A regular expression that gives up, as `(a+)+$` does, ends as a panic of Rust, which is no Exception and has no importable name.
    """
    try:
        return list(loaded.encode_batch(list(texts)))
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise BadInputError(
            f"the tokenizer fails on a text: {first_line(error)[:200]}",
            remedy="check the regular expressions of its tokenizer.json",
        ) from error


def find_long_texts(texts: Mapping[str, Text], tokenizer: str, max_length: int) -> dict[str, int]:
    """Token counts of the texts with more than `max_length` tokens, by name.

    `tokenizer` is the content of a `tokenizer.json`; its own truncation applies first.
    """
    if is_function(tokenizer):
        counts = [len(row.ids) for row in encode_by_function(tokenizer, list(texts.values()))]
    else:
        loaded = tokenizers.Tokenizer.from_str(tokenizer)
        loaded.no_padding()
        counts = [len(encoding.ids) for encoding in encode_batch(loaded, list(texts.values()))]
    return {name: count for name, count in zip(texts, counts, strict=True) if count > max_length}


def find_first_tokens(text: Text, encoded: Any) -> list[int]:
    """Index of the first token of each space-separated word of `text`; -1 for a word without a token.

    `encoded` is the result of `tokenize`. Raises BadInputError for two texts.
    """
    if not isinstance(text, str):
        raise BadInputError("tags belong to the words of one text, not of two")
    ends = np.cumsum([len(word) + 1 for word in text.split(" ")])
    firsts = [-1] * len(ends)
    for place, ((_, end), special) in enumerate(
        zip(encoded.offsets, encoded.special_tokens_mask, strict=True)
    ):
        # by its last character, since a token may begin with the preceding space
        word = int(np.searchsorted(ends, end - 1, side="right"))
        if not special and firsts[word] < 0:
            firsts[word] = place
    return firsts


def tokenize(texts: Sequence[Text], tokenizer: Path, max_length: int) -> list[Any]:
    """The `tokenizers.Encoding` of each sample, unpadded, cut at `max_length` or the tokenizer's own limit.

    Of two texts the tokenizer's strategy says which is cut; without one, tokens go from the longer first, as in transformers'
    `truncation=True`.
    """
    loaded = tokenizers.Tokenizer.from_str(read_user_text(tokenizer))
    loaded.no_padding()
    own = loaded.truncation or {"max_length": max_length}
    loaded.enable_truncation(**{**own, "max_length": min(own["max_length"], max_length)})
    return encode_batch(loaded, texts)


def encode(texts: Sequence[Text], tokenizer: Path, max_length: int) -> list[Tokens]:
    """The tokens of each sample, by a `tokenizer.json` or the function that it names, cut at `max_length`."""
    content = read_user_text(tokenizer)
    if is_function(content):
        return [row.cut(max_length) for row in encode_by_function(content, texts)]
    return [
        Tokens(tuple(encoding.ids), tuple(encoding.type_ids))
        for encoding in tokenize(texts, tokenizer, max_length)
    ]


def compute_max_tokens(card: ModelCard) -> int:
    assert card.tokenization is not None
    return min(card.tokenization.max_length, card.inputs[0].max[1])


def pad_tokens(card: ModelCard, rows: Sequence[Tokens]) -> dict[str, np.ndarray]:
    """Tokens as a text model's inputs, (rows, tokens) each, padded to the longest or the profile's minimum.

    Raises BadInputError for an input that no tokenizer gives.
    """
    assert card.tokenization is not None
    width = max(card.inputs[0].min[1], *(len(row.ids) for row in rows))
    fills = card.tokenization.pad_id, 0, 0
    ids, mask, types = (np.full((len(rows), width), fill, np.int64) for fill in fills)
    for index, row in enumerate(rows):
        count = len(row.ids)
        ids[index, :count], mask[index, :count], types[index, :count] = row.ids, 1, row.types

    known = {"input_ids": ids, "attention_mask": mask, TYPES: types}
    if len(card.inputs) == 1:
        known[card.inputs[0].name] = ids
    if unknown := [spec.name for spec in card.inputs if spec.name not in known]:
        raise BadInputError(
            f"{card.name}: a tokenizer gives {', '.join(known)}, not '{unknown[0]}'\n"
            "name the inputs so, or give its inputs as tensors (.npz)"
        )
    return {spec.name: known[spec.name].astype(spec.dtype) for spec in card.inputs}
