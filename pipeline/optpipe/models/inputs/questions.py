"""Questions about a context, as in SQuAD, and the overlapping windows in which a long context is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.text_set import TextSet, split_question

STRIDE = 128
"""The most tokens that neighboring windows share, as in Hugging Face's examples; at most a quarter of the model's input length."""


@dataclass(frozen=True, slots=True)
class Window:
    """A question with as much of its context as fits: the tokens that the model reads, and where they lie in the context."""

    ids: tuple[int, ...]
    types: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Where each token begins and ends in the context, in characters; (-1, -1) for tokens of the question and special tokens."""
    context: str


def encode_questions(found: TextSet, tokenizer: Path, card: ModelCard, longest: int) -> Iterator[tuple[str, Window]]:
    """Each window with its name: `7` is the first of line 7, `7.1` the next. Raises BadInputError for a question that is too long."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.no_padding()
    for each in found.files:
        question, context = split_question(found.texts[each.path])
        loaded.no_truncation()
        taken = len(loaded.encode(question, "").ids)
        if taken > longest // 2:
            raise BadInputError(
                f"{found.name}, line {each.path}: the question has {taken} tokens; the maximum is {longest // 2}, "
                f"half of {card.name}'s input length"
            )
        loaded.enable_truncation(longest, stride=min(STRIDE, longest // 4), strategy="only_second")
        first = loaded.encode(question, context)
        for number, part in enumerate((first, *first.overflowing)):
            pairs = zip(part.sequence_ids, part.offsets, strict=True)
            spans = tuple(span if sequence == 1 else (-1, -1) for sequence, span in pairs)
            path = f"{each.path}.{number}" if number else each.path
            yield path, Window(tuple(part.ids), tuple(part.type_ids), spans, context)


def cut_windows(found: TextSet, tokenizer: Path, card: ModelCard, longest: int) -> TextSet:
    """The set with one sample for each window of each question."""
    files = {each.path: each for each in found.files}
    windows: Mapping[str, Window] = dict(encode_questions(found, tokenizer, card, longest))
    cut = tuple(replace(files[path.partition(".")[0]], path=path) for path in windows)
    answers = (_drop_places(value.get("answers")) for value in found.read_objects())
    empty = any(each in ([], {"text": []}) for each in answers)
    return replace(found, files=cut, windows=windows, some_unanswerable=empty)


def _drop_places(answers: object) -> object:
    """`answers` without `answer_start`."""
    return {"text": answers.get("text")} if isinstance(answers, dict) else answers
