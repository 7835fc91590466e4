"""Questions about a passage, as SQuAD has them: its JSON file, the answers of one question, and the windows of a long passage.

SQuAD (Rajpurkar et al., 2016, and 2018 for unanswerable questions) keeps the questions below their passages; as JSON lines a
question has its passage beside it: `{"question": "...", "context": "...", "answers": {"text": ["..."], "answer_start": [0]}}`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optpipe.core import LazyModule
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_text
from optpipe.models.sources.text_tokenizer import Tokens

tokenizers = LazyModule("tokenizers")

QUESTION, CONTEXT, ANSWERS, IMPOSSIBLE = "question", "context", "answers", "is_impossible"
STRIDE = 128
"""Tokens that adjacent windows share, as in Hugging Face's examples; at most a third of the model's input."""
Pair = tuple[str, str]


def is_squad(value: Any) -> bool:
    """Whether the value of a whole JSON file has SQuAD's form."""
    return isinstance(value, dict) and isinstance(value.get("data"), list)


def iterate_squad(value: Mapping[str, Any]) -> Iterator[Any]:
    """Each question of SQuAD's JSON as a line of JSON lines would have it; an error in place of what is no question."""
    for article in value["data"]:
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            yield TypeError('its article has no list "paragraphs"')
            continue
        for paragraph in paragraphs:
            asked = paragraph.get("qas") if isinstance(paragraph, dict) else None
            if not isinstance(asked, list):
                yield TypeError('its paragraph has no list "qas"')
                continue
            context = {CONTEXT: paragraph.get(CONTEXT)}
            yield from (
                {**question, **context} if isinstance(question, dict) else question
                for question in asked
            )


def read_answers(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The texts that answer a question, none of them if the passage has no answer; None if the line does not tell.

    Raises TypeError or ValueError if the answers have another form, or if one is not at its stated place in the passage.
    """
    impossible = value.get(IMPOSSIBLE)
    if impossible is not None and not isinstance(impossible, bool):
        raise TypeError(f'its "{IMPOSSIBLE}" is neither true nor false')
    if value.get(ANSWERS) is None:
        return () if impossible else None
    texts = tuple(
        _require_inside(text, start, value[CONTEXT])
        for text, start in _list_answers(value[ANSWERS])
    )
    if impossible and texts:
        raise ValueError("it is impossible to answer, but has an answer")
    if impossible is False and not texts:
        raise ValueError("it can be answered, but has no answer")
    return texts


def _list_answers(answers: Any) -> list[tuple[Any, Any]]:
    """(text, start) of each answer; the start is None where it is not given."""
    if isinstance(answers, dict) and isinstance(answers.get("text"), list):
        texts, starts = answers["text"], answers.get("answer_start")
        starts = [None] * len(texts) if starts is None else starts
        if isinstance(starts, list) and len(starts) == len(texts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(answers, list) and all(isinstance(answer, dict | str) for answer in answers):
        return [
            (answer, None)
            if isinstance(answer, str)
            else (answer.get("text"), answer.get("answer_start"))
            for answer in answers
        ]
    raise TypeError(
        'its "answers" are neither {"text": ["Ada"], "answer_start": [0]} nor a list of such'
    )


def _require_inside(text: Any, start: Any, context: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise TypeError("an answer is not a string; a question without an answer has an empty list")
    if start is None:
        if text not in context:
            raise ValueError(f"its answer {_shorten(text)} is not in its context")
        return text
    if isinstance(start, bool) or not isinstance(start, int):
        raise TypeError('its "answer_start" is not an integer')
    if start < 0 or context[start : start + len(text)] != text:
        raise ValueError(f"its answer {_shorten(text)} is not at {start} in its context")
    return text


def _shorten(text: str) -> str:
    return json.dumps(text if len(text) <= 40 else text[:39] + "…", ensure_ascii=False)


def name_passage(context: str) -> str:
    """The group of the questions about one passage: they stand or fall together."""
    return hash_text(context)[:12]


@dataclass(frozen=True, slots=True)
class Window:
    """A question with a part of its passage that fits the model's input."""

    tokens: Tokens
    spans: tuple[tuple[int, int], ...]
    """(begin, end) in characters of the passage for each token; (-1, -1) for the question's and special tokens."""


def cut_windows(
    pairs: Mapping[str, Pair], tokenizer: str, longest: int, stride: int | None, place: str
) -> dict[str, tuple[Window, ...]]:
    """The windows of each question, by its name, as the tokenizer's own truncation of the second text gives them.

    `tokenizer` is the content of a `tokenizer.json`; a window has at most `longest` tokens and shares `stride` of them with
    the next. Raises BadInputError, which names `place` and the question, if it leaves no room for the passage to move on.
    """
    loaded = tokenizers.Tokenizer.from_str(tokenizer)
    if loaded.truncation is not None:
        longest = min(longest, loaded.truncation["max_length"])
    shared = min(STRIDE, longest // 3) if stride is None else stride
    loaded.no_padding()
    loaded.no_truncation()
    whole = dict(zip(pairs, loaded.encode_batch(list(pairs.values())), strict=True))
    long = [name for name, encoding in whole.items() if len(encoding.ids) > longest]
    alone = loaded.encode_batch([(pairs[name][0], "") for name in long])
    for name, question in zip(long, alone, strict=True):
        room = longest - len(question.ids)
        if room <= shared:
            problem = f"{place}, line {name}: its question leaves {max(room, 0)} of {longest} tokens to a window of its context"
            way = "shorten the question, or give the model's card a smaller stride: [head] stride = 16"
            raise BadInputError(f"{problem}, of which {shared} are shared with the next\n{way}")
    if long:
        loaded.enable_truncation(longest, stride=shared, strategy="only_second")
        whole |= zip(long, loaded.encode_batch([pairs[name] for name in long]), strict=True)
    return {
        name: tuple(map(_window_from_encoding, (first, *first.overflowing)))
        for name, first in whole.items()
    }


def _window_from_encoding(encoded: Any) -> Window:
    pairs = zip(encoded.sequence_ids, encoded.offsets, strict=True)
    return Window(
        Tokens(tuple(encoded.ids), tuple(encoded.type_ids)),
        tuple(span if sequence == 1 else (-1, -1) for sequence, span in pairs),
    )
