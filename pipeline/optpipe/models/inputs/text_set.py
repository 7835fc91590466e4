"""Text sets with provenance from JSON lines.

`{"text": "...", "label": "..."}`, also with `"group": "..."` if texts share a source; or words with tags:
`{"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from optpipe.core import LazyModule
from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.files import (
    MAX_LIST_BYTES,
    hash_text,
    open_user_file,
    read_user_text,
)
from optpipe.models.inputs.sample_set import (
    MAX_UNREADABLE_SHARE,
    SampleSet,
    SetFile,
    Unusable,
    draw_indices,
    draw_subset,
    format_unreadable,
    read_group,
)
from optpipe.models.sources.text_tokenizer import encode_by_function, is_function

tokenizers = LazyModule("tokenizers")


@dataclass(frozen=True)
class TextSet(SampleSet):
    format: ClassVar[str] = "optpipe.text-set/1"
    kind: ClassVar[str] = "texts"

    texts: Mapping[str, str] = field(default_factory=dict)
    first_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The first token of each word, whose tag is the word's, by `files[].path`; -1 for a truncated word."""
    truncated: int = 0

    def read_objects(self) -> list[dict[str, Any]]:
        """The JSON object of each sample's line, in the order of `files`."""
        lines = dict(_read_raw_lines(self.root))
        return [json.loads(lines[int(each.path)]) for each in self.files]


Line = tuple[str, str | None, str | None, str | None]
"""(text, label, pair, group)."""


def text_set_from_path(
    source: Path, count: int | None = None, seed: int = 0
) -> tuple[TextSet, tuple[Unusable, ...]]:
    """The set that `source` names: a manifest, or `count` lines drawn from a file of JSON lines; and the bad lines.

    The sample is stratified by labels. Raises BadInputError for a file without a usable line, or with more than
    MAX_UNREADABLE_SHARE bad ones.
    """
    if source.is_dir() or not source.exists():
        what = "is a folder" if source.is_dir() else "no such file"
        raise BadInputError(f"{source}: {what}; a text model needs a JSON Lines file")
    with open_user_file(source, MAX_LIST_BYTES) as file:
        is_manifest = TextSet.format.partition("/")[0].encode() in file.read(200)
    if is_manifest:
        whole = TextSet.from_manifest(source)
        lines, texts = _parse_lines(whole.root)[0], {}
        for each in whole.files:
            text = (
                lines[int(each.path)][0]
                if each.path.isdecimal() and int(each.path) in lines
                else None
            )
            if text is None or hash_text(text) != each.sha256:
                problem = f"text set {whole.name}: line {each.path} of {whole.root} has changed"
                raise BadInputError(f"{problem}; draw the set again")
            texts[each.path] = text
        whole = replace(whole, texts=texts, pairs=_name_pairs(lines))
        return (whole if count is None else draw_subset(whole, count, seed)), ()
    lines, bad = _parse_lines(source)
    allowed = max(1, MAX_UNREADABLE_SHARE * (len(lines) + len(bad)))
    if not lines or len(bad) > allowed:
        found = (
            f"{len(bad)} of {len(lines) + len(bad)} lines cannot be used; at most 5% allowed"
            if bad
            else "is empty"
        )
        form = 'each line must be {"text": "...", "label": "..."}; the label may be omitted from all lines'
        raise BadInputError(
            f"{source}: {found}\n{form}" + (f"; {format_unreadable(bad, 3)}" if bad else "")
        )
    wanted = len(lines) if count is None else min(count, len(lines))
    numbers = list(lines)
    _, marked, pairs, _ = zip(*lines.values(), strict=True)
    chosen = [numbers[index] for index in draw_indices(marked, pairs, wanted, seed)]
    files = tuple(
        SetFile(str(number), hash_text(lines[number][0]), lines[number][1], lines[number][3])
        for number in chosen
    )
    labels = tuple(sorted({label for label in marked if label is not None}))
    texts = {str(number): lines[number][0] for number in chosen}
    return TextSet(
        source.name, source, seed, files, labels, texts=texts, pairs=_name_pairs(lines)
    ), bad


def _name_pairs(lines: Mapping[int, Line]) -> dict[str, str]:
    return {str(number): pair for number, (_, _, pair, _) in lines.items() if pair is not None}


def _parse_lines(source: Path) -> tuple[dict[int, Line], tuple[Unusable, ...]]:
    """Lines by number from 1, without blank ones, and bad lines. If any has a label, those without one are bad."""
    lines: dict[int, Line] = {}
    bad: dict[int, str] = {}
    for number, raw in _read_raw_lines(source):
        try:
            lines[number] = _parse_line(json.loads(raw))
        except (ValueError, TypeError, RecursionError) as error:
            bad[number] = _format_reason(error)
    for place, name in ((1, "label"), (3, "group")):
        without = [number for number, line in lines.items() if line[place] is None]
        if len(without) < len(lines):
            bad |= dict.fromkeys(without, f"no {name}, although other lines have one")
            for number in without:
                del lines[number]
    return lines, tuple((Path(f"line {number}"), bad[number]) for number in sorted(bad))


def _read_raw_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open_user_file(source, MAX_LIST_BYTES) as file:
            yield from ((number, raw) for number, raw in enumerate(file, 1) if raw.strip())
    except OSError as error:
        raise BadInputError(f"cannot read {source}: {error.strerror}") from error


def _parse_line(value: Any) -> Line:
    if isinstance(value, dict) and "tokens" in value and "text" not in value:
        words = value["tokens"]
        if not isinstance(words, list) or not all(
            isinstance(each, str) and each.split() == [each] for each in words
        ):
            raise TypeError('its "tokens" are not a list of words without spaces')
        value = {**value, "text": " ".join(words)}
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise TypeError('not an object with a "text"')
    if not value["text"].strip():
        raise ValueError("its text is empty")
    label = value.get("label")
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int | float)):
        raise TypeError(f"its label is neither a string nor a number: {json.dumps(label)[:40]}")
    label, pair = (None if each is None else str(each) for each in (label, value.get("pair")))
    return value["text"], label, pair, read_group(value.get("group"))


def _format_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return f"invalid JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)


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
"""Default texts for verification, short and long, so that padding is tested."""


def find_long_texts(texts: Mapping[str, str], tokenizer: str, max_length: int) -> dict[str, int]:
    """Token counts of the texts with more than `max_length` tokens, by name.

    `tokenizer` is the content of a `tokenizer.json`; its own truncation applies first.
    """
    if is_function(tokenizer):
        counts = [len(ids) for ids in encode_by_function(tokenizer, list(texts.values()))]
    else:
        loaded = tokenizers.Tokenizer.from_str(tokenizer)
        loaded.no_padding()
        counts = [len(each.ids) for each in loaded.encode_batch(list(texts.values()))]
    return {name: count for name, count in zip(texts, counts, strict=True) if count > max_length}


def find_first_tokens(text: str, encoded: Any) -> list[int]:
    """Index of the first token of each space-separated word of `text`; -1 for a word without a token.

    `encoded` is the result of `tokenize`.
    """
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


def tokenize(texts: Sequence[str], tokenizer: Path, max_length: int) -> list[Any]:
    """The `tokenizers.Encoding` of each text, unpadded, cut at `max_length` or the tokenizer's own limit."""
    loaded = tokenizers.Tokenizer.from_str(read_user_text(tokenizer))
    loaded.no_padding()
    own = loaded.truncation or {"max_length": max_length}
    loaded.enable_truncation(**{**own, "max_length": min(own["max_length"], max_length)})
    return list(loaded.encode_batch(list(texts)))


def encode(texts: Sequence[str], tokenizer: Path, max_length: int) -> list[list[int]]:
    """Token identifiers of each text, by a `tokenizer.json` or the function that it names, cut at `max_length`."""
    content = read_user_text(tokenizer)
    if is_function(content):
        return [ids[:max_length] for ids in encode_by_function(content, texts)]
    return [each.ids for each in tokenize(texts, tokenizer, max_length)]


def compute_max_tokens(card: ModelCard) -> int:
    assert card.tokenization is not None
    return min(card.tokenization.max_length, card.inputs[0].max[1])


def pad_tokens(card: ModelCard, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of token identifiers as a text model's inputs, padded to the longest or the profile's minimum."""
    assert card.tokenization is not None
    width = max(card.inputs[0].min[1], *map(len, rows))
    ids = np.full((len(rows), width), card.tokenization.pad_id, np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    known = {"input_ids": ids, "attention_mask": mask}
    if len(card.inputs) == 1:
        known[card.inputs[0].name] = ids
    if unknown := [each.name for each in card.inputs if each.name not in known]:
        raise BadInputError(
            f"{card.name}: a tokenizer gives input_ids and attention_mask, not '{unknown[0]}'\n"
            "name the inputs so, or give its inputs as tensors (.npz)"
        )
    return {each.name: known[each.name].astype(each.dtype) for each in card.inputs}
