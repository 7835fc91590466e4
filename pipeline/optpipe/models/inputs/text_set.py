"""Text sets with provenance, out of JSON lines, one object per line.

`{"text": "...", "label": "..."}`; words with their tags: `{"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}`; or a question:
`{"question": "...", "context": "...", "answers": {"text": ["..."]}}`, also in SQuAD's own JSON, where a question counts as a line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from optpipe.core.errors import BadInputError
from optpipe.core.hashing import hash_text
from optpipe.models.inputs.images import UnreadableFile, format_unreadable
from optpipe.models.inputs.sample_set import (
    MAX_UNREADABLE_SHARE,
    SampleSet,
    SetFile,
    draw_indices,
    draw_subset,
)

if TYPE_CHECKING:
    from optpipe.models.inputs.questions import Window

Line = tuple[str, str | None, str | None]
"""A line's text, label and pair."""


@dataclass(frozen=True)
class TextSet(SampleSet):
    """Lines of the file `root`; `files[].path` is the line number and `texts` has its text."""

    format: ClassVar[str] = "optpipe.text-set/1"
    kind: ClassVar[str] = "texts"

    texts: Mapping[str, str] = field(default_factory=dict)
    first_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The first token of each word, whose tag is the word's, by `files[].path`; -1 for a word that was truncated away."""
    windows: Mapping[str, "Window"] = field(default_factory=dict)
    """Of questions, by `files[].path`: `7` is the first window of line 7, `7.1` the next."""
    truncated: int = 0
    """How many of the texts are cut."""
    some_unanswerable: bool = False
    """Whether some questions are marked as unanswerable."""

    def read_objects(self) -> list[dict[str, Any]]:
        """The JSON object of each sample's line, in the order of `files`: with all that it has beside text and label."""
        lines = dict(_read_raw_lines(self.root))
        return [json.loads(lines[int(each.path.partition(".")[0])]) for each in self.files]


def text_set_from_path(
    source: Path, count: int | None = None, seed: int = 0
) -> tuple[TextSet, tuple[UnreadableFile, ...]]:
    """The set that `source` names: a manifest, or `count` lines drawn out of a file of JSON lines; and the bad lines.

    A sample has the labels in their own proportions. Raises BadInputError for a file without a usable line, or with more
    than MAX_UNREADABLE_SHARE bad ones.
    """
    if _is_manifest(source):
        whole = TextSet.from_manifest(source)  # a question's further windows are cut again
        whole = _read_texts(replace(whole, files=tuple(each for each in whole.files if "." not in each.path)))
        return (whole if count is None else draw_subset(whole, count, seed)), ()
    lines, bad = _parse_lines(source)
    allowed = max(1, MAX_UNREADABLE_SHARE * (len(lines) + len(bad)))
    if not lines or len(bad) > allowed:
        found = (
            f"{len(bad)} of {len(lines) + len(bad)} lines cannot be used; at most 5 % allowed" if bad else "is empty"
        )
        form = 'each line must be {"text": "...", "label": "..."}; the label may be omitted from all lines'
        raise BadInputError(f"{source}: {found}\n{form}" + (f"; {format_unreadable(bad, 3)}" if bad else ""))
    wanted = len(lines) if count is None else min(count, len(lines))
    numbers = list(lines)
    _, marked, pairs = zip(*lines.values(), strict=True)
    chosen = [numbers[index] for index in draw_indices(marked, pairs, wanted, seed)]
    files = tuple(SetFile(str(number), hash_text(lines[number][0]), lines[number][1]) for number in chosen)
    labels = tuple(sorted({label for label in marked if label is not None}))
    texts = {str(number): lines[number][0] for number in chosen}
    return TextSet(source.name, source, seed, files, labels, texts=texts, pairs=_name_pairs(lines)), bad


def _is_manifest(source: Path) -> bool:
    if source.is_dir() or not source.exists():
        what = "is a folder" if source.is_dir() else "no such file"
        raise BadInputError(f"{source}: {what}; a text model needs a JSON Lines file")
    with source.open("rb") as file:
        return TextSet.format.partition("/")[0].encode() in file.read(200)


def _read_texts(found: TextSet) -> TextSet:
    """`found` with its lines read again and checked against their hashes."""
    lines, _ = _parse_lines(found.root)
    texts = {}
    for each in found.files:
        text = lines[int(each.path)][0] if each.path.isdecimal() and int(each.path) in lines else None
        if text is None or hash_text(text) != each.sha256:
            raise BadInputError(
                f"text set {found.name}: line {each.path} of {found.root} has changed; draw the set again"
            )
        texts[each.path] = text
    return replace(found, texts=texts, pairs=_name_pairs(lines))


def _name_pairs(lines: Mapping[int, Line]) -> dict[str, str]:
    return {str(number): pair for number, (_, _, pair) in lines.items() if pair is not None}


def _parse_lines(source: Path) -> tuple[dict[int, Line], tuple[UnreadableFile, ...]]:
    """The lines by number from 1, and those that hold no text. Blank lines do not count.

    Where any line has a label, those without one are bad.
    """
    lines: dict[int, Line] = {}
    bad: dict[int, str] = {}
    for number, raw in _read_raw_lines(source):
        try:
            lines[number] = _parse_line(json.loads(raw))
        except (ValueError, TypeError) as error:
            bad[number] = _format_reason(error)
    if any(label is not None for _, label, _ in lines.values()):
        unlabelled = [number for number, (_, label, _) in lines.items() if label is None]
        bad |= dict.fromkeys(unlabelled, "no label, although other lines have one")
        for number in unlabelled:
            del lines[number]
    return lines, tuple(UnreadableFile(Path(f"line {number}"), bad[number]) for number in sorted(bad))


def _read_raw_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with source.open("rb") as file:
            begin = file.read(200).lstrip()
            file.seek(0)
            lines = _list_squad_lines(file.read()) if begin.startswith(b"{") else None
            file.seek(0)
            yield from ((number, raw) for number, raw in enumerate(lines or file, 1) if raw.strip())
    except OSError as error:
        raise BadInputError(f"cannot read {source}: {error.strerror}") from error


def _list_squad_lines(content: bytes) -> list[bytes] | None:
    """The questions of SQuAD's JSON (1.1 and 2.0), each as a JSON line; None for another form."""
    try:
        articles = json.loads(content)["data"]
        questions = [
            (each, part["context"]) for article in articles for part in article["paragraphs"] for each in part["qas"]
        ]
        lines = []
        for each, context in questions:
            answers = {"answers": {"text": [one["text"] for one in each["answers"]]}} if "answers" in each else {}
            lines.append(
                json.dumps({"id": each.get("id"), "question": each["question"], "context": context, **answers})
            )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return [line.encode() for line in lines]


def join_question(question: str, context: str) -> str:
    """A question as one text: the question in the first line, its context after it."""
    return " ".join(question.split()) + "\n" + context


def split_question(text: str) -> tuple[str, str]:
    """The inverse of `join_question`."""
    question, _, context = text.partition("\n")
    return question, context


def _parse_line(value: Any) -> Line:
    if isinstance(value, dict) and "tokens" in value and "text" not in value:
        value = {**value, "text": _join_words(value["tokens"])}
    if isinstance(value, dict) and "question" in value and "text" not in value:
        question, context = value["question"], value.get("context")
        if not (isinstance(question, str) and isinstance(context, str) and question.strip() and context.strip()):
            raise TypeError('its "question" or "context" is missing or empty')
        value = {"text": join_question(question, context)}
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise TypeError('not an object with a "text"')
    if not value["text"].strip():
        raise ValueError("its text is empty")
    label = value.get("label")
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int)):
        raise TypeError(f"its label is neither a string nor an integer: {json.dumps(label)[:40]}")
    label, pair = (None if each is None else str(each) for each in (label, value.get("pair")))
    return value["text"], label, pair


def _join_words(words: Any) -> str:
    if not isinstance(words, list) or not all(isinstance(each, str) and each.split() == [each] for each in words):
        raise TypeError('its "tokens" are not a list of words without spaces')
    return " ".join(words)


def _format_reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return f"invalid JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
