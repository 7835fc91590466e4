"""Texts with labels as JSON lines have them.

A sample is one text, or two that a model reads together, such as a premise and a hypothesis. The names of the fields are those of the
data sets that people have (GLUE, SNLI, MNLI, SQuAD); the order of a pair is the model's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optpipe.core.errors import BadInputError
from optpipe.core.files import MAX_LIST_BYTES, hash_text, hash_value, open_user_file
from optpipe.models.inputs.questions import (
    CONTEXT,
    QUESTION,
    is_squad,
    iterate_squad,
    name_passage,
    read_answers,
)
from optpipe.models.inputs.sample_set import Unusable, read_group

Text = str | tuple[str, str]
"""What a model reads as one sample: a text, or two in the model's order."""

PAIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": ("text_pair",),
        "premise": ("hypothesis",),
        "sentence1": ("sentence2",),
        "question1": ("question2",),
        QUESTION: (CONTEXT, "sentence"),
    }
)
"""What the second text's field may be, by the first's; of a line that has several, the first row of this table counts."""
SINGLE = ("text", "sentence")
"""Fields of a text that may stand alone."""
LABELS = ("label", "gold_label")
NO_GOLD_LABEL = "-"
"""What SNLI and MNLI give a pair whose annotators did not agree; -1 where their labels are numbers."""
FORMS = (
    'each line must be {"text": "...", "label": "..."}, or a pair such as {"premise": "...", "hypothesis": "...", '
    '"label": "..."}; the label may be omitted from all lines'
)


@dataclass(frozen=True, slots=True)
class TextLine:
    text: Text
    label: str | None = None
    pair: str | None = None
    """The name that two lines share whose embeddings are compared."""
    group: str | None = None
    asks: bool = False
    """Whether the first text is a question about the second."""
    answers: tuple[str, ...] | None = None
    """What answers a question about its passage, nothing if the passage does not; None for other texts, and if it is not known."""


_COMMON: Mapping[str, Callable[[TextLine], bool]] = MappingProxyType(
    {
        "label": lambda line: line.label is not None,
        "group": lambda line: line.group is not None,
        "answers": lambda line: line.answers is not None,
        "second text": lambda line: not isinstance(line.text, str),
    }
)
"""What all lines of a file have if one has it."""


def hash_sample(text: Text) -> str:
    """SHA-256 of a text; of two, that of the JSON array of both."""
    return hash_text(text) if isinstance(text, str) else hash_value(list(text))


def read_text_lines(source: Path) -> tuple[dict[int, TextLine], tuple[Unusable, ...]]:
    """Lines by number from 1, without blank ones, and bad lines.

    If any line has a label, a group, answers, or a second text, those without one are bad.
    """
    lines: dict[int, TextLine] = {}
    bad: dict[int, str] = {}
    for number, value in read_objects(source):
        try:
            if isinstance(value, Exception):
                raise value
            lines[number] = _parse_line(value)
        except (ValueError, TypeError, RecursionError) as error:
            bad[number] = _format_reason(error)
    for what, states in _COMMON.items():
        without = [number for number, line in lines.items() if not states(line)]
        if len(without) < len(lines):
            bad |= dict.fromkeys(without, f"no {what}, although other lines have one")
            for number in without:
                del lines[number]
    return lines, tuple((Path(f"line {number}"), bad[number]) for number in sorted(bad))


def read_objects(source: Path) -> Iterator[tuple[int, Any]]:
    """The values of a file's lines that are not blank, by number from 1, or of SQuAD's JSON its questions in order.

    An error stands in place of a value that is none. Raises BadInputError if the file cannot be read.
    """
    try:
        with open_user_file(source, MAX_LIST_BYTES) as file:
            if source.suffix.lower() == ".json" and is_squad(value := _load(file.read())):
                yield from enumerate(iterate_squad(value), 1)
                return
            file.seek(0)
            yield from ((number, _load(raw)) for number, raw in enumerate(file, 1) if raw.strip())
    except OSError as error:
        raise BadInputError(f"cannot read {source}: {error.strerror}") from error


def _load(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        return error


def _parse_line(value: Any) -> TextLine:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    text = (
        _read_words(value["tokens"])
        if "tokens" in value and "text" not in value
        else _read_text(value)
    )
    pair, group = value.get("pair"), read_group(value.get("group"))
    asks = not isinstance(text, str) and text == (value.get(QUESTION), value.get(CONTEXT))
    return TextLine(
        text,
        _read_label(value),
        None if pair is None else str(pair),
        name_passage(text[1]) if asks and group is None else group,
        asks,
        read_answers(value) if asks else None,
    )


def _read_words(words: Any) -> str:
    if not isinstance(words, list) or not all(
        isinstance(word, str) and word.split() == [word] for word in words
    ):
        raise TypeError('its "tokens" are not a list of words without spaces')
    if not words:
        raise ValueError("its text is empty")
    return " ".join(words)


def _read_text(value: Mapping[str, Any]) -> Text:
    for first, seconds in PAIRS.items():
        given = [name for name in (first, *seconds) if value.get(name) is not None]
        if len(given) > 1 and given[0] == first:
            return _require_text(value, first), _require_text(value, given[1])
        if alone := [name for name in given if name in SINGLE]:
            return _require_text(value, alone[0])
        if given:
            missing = '" or "'.join(seconds) if given == [first] else first
            raise TypeError(f'it has a "{given[0]}", but no "{missing}"')
    raise TypeError('not an object with a "text"')


def _require_text(value: Mapping[str, Any], name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise TypeError(f'its "{name}" is not a string')
    if not text.strip():
        raise ValueError(f"its {name} is empty")
    return text


def _read_label(value: Mapping[str, Any]) -> str | None:
    label = next((value[name] for name in LABELS if value.get(name) is not None), None)
    if label is None:
        return None
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise TypeError(f"its label is neither a string nor a number: {json.dumps(label)[:40]}")
    if label == NO_GOLD_LABEL or ("premise" in value and label == -1):
        raise ValueError(f"its label is {label}: its annotators did not agree")
    return str(label)


def _format_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return f"invalid JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
