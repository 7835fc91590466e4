"""Text sets with provenance from JSON lines.

`{"text": "...", "label": "..."}`, or two texts that the model reads together, `{"premise": "...", "hypothesis": "...", "label": "..."}`;
also with `"group": "..."` if texts share a source; or words with tags: `{"tokens": ["Ada", "wrote"], "tags": ["B-PER", "O"]}`;
or questions about passages, also as SQuAD's own JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from optpipe.core.errors import BadInputError
from optpipe.core.files import MAX_LIST_BYTES, open_user_file
from optpipe.models.inputs.questions import Window
from optpipe.models.inputs.sample_set import (
    MAX_UNREADABLE_SHARE,
    SampleSet,
    SetFile,
    Unusable,
    draw_indices,
    draw_subset,
    format_unreadable,
)
from optpipe.models.inputs.text_lines import (
    FORMS,
    Text,
    TextLine,
    hash_sample,
    read_objects,
    read_text_lines,
)


@dataclass(frozen=True)
class TextSet(SampleSet):
    format: ClassVar[str] = "optpipe.text-set/1"
    kind: ClassVar[str] = "texts"

    texts: Mapping[str, Text] = field(default_factory=dict)
    """A text, or two that the model reads together, by `files[].path`."""
    first_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The first token of each word, whose tag is the word's, by `files[].path`; -1 for a truncated word."""
    truncated: int = 0
    asks: bool = False
    """Whether every sample is a question and its passage."""
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The texts that answer each question, by `files[].path`; empty if the set does not tell."""
    may_have_none: bool = False
    """Whether the passage of any question in the file has no answer."""
    windows: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """What a model reads of each question and its passage, by `files[].path`; empty for other texts."""

    @property
    def rows(self) -> tuple[SetFile, ...]:
        """A question is a row for each of its windows, whose path ends with the number of the window: `7.0`."""
        if not self.windows:
            return self.files
        return tuple(
            replace(file, path=f"{file.path}.{number}")
            for file in self.files
            for number in range(len(self.windows[file.path]))
        )

    def read_objects(self) -> list[dict[str, Any]]:
        """The JSON object of each sample's line, in the order of `files`."""
        lines = dict(read_objects(self.root))
        return [lines[int(file.path)] for file in self.files]

    @property
    def has_pairs(self) -> bool:
        """Whether a sample is two texts."""
        return any(not isinstance(text, str) for text in self.texts.values())


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
        whole = _text_set_from_manifest(source)
        return (whole if count is None else draw_subset(whole, count, seed)), ()

    lines, bad = read_text_lines(source)
    allowed = max(1, MAX_UNREADABLE_SHARE * (len(lines) + len(bad)))
    if not lines or len(bad) > allowed:
        problem = (
            f"{len(bad)} of {len(lines) + len(bad)} lines cannot be used; at most 5% allowed"
            if bad
            else "is empty"
        )
        raise BadInputError(
            f"{source}: {problem}\n{FORMS}" + (f"; {format_unreadable(bad, 3)}" if bad else "")
        )
    numbers = list(lines)
    wanted = len(lines) if count is None else min(count, len(lines))
    labels = [line.label for line in lines.values()]
    chosen = draw_indices(labels, [line.pair for line in lines.values()], wanted, seed)
    drawn = {str(numbers[index]): lines[numbers[index]] for index in chosen}
    files = tuple(
        SetFile(path, hash_sample(line.text), line.label, line.group)
        for path, line in drawn.items()
    )
    known = tuple(sorted({label for label in labels if label is not None}))
    return _add_lines(TextSet(source.name, source, seed, files, known), drawn, lines), bad


def _text_set_from_manifest(source: Path) -> TextSet:
    """Raises BadInputError if a line is not the one that was drawn."""
    whole = TextSet.from_manifest(source)
    lines, drawn = read_text_lines(whole.root)[0], dict[str, TextLine]()
    for file in whole.files:
        line = lines.get(int(file.path)) if file.path.isdecimal() else None
        if line is None or hash_sample(line.text) != file.sha256:
            problem = f"text set {whole.name}: line {file.path} of {whole.root} has changed"
            raise BadInputError(f"{problem}; draw the set again")
        drawn[file.path] = line
    return _add_lines(whole, drawn, lines)


def _add_lines(
    samples: TextSet, drawn: Mapping[str, TextLine], lines: Mapping[int, TextLine]
) -> TextSet:
    """`samples` with what its lines say: `drawn` by path, and all `lines` of the file by number."""
    return replace(
        samples,
        texts={path: line.text for path, line in drawn.items()},
        pairs={str(number): line.pair for number, line in lines.items() if line.pair is not None},
        asks=all(line.asks for line in drawn.values()),
        answers={path: line.answers for path, line in drawn.items() if line.answers is not None},
        may_have_none=any(line.answers == () for line in lines.values()),
    )


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


def make_shipped_set(*, paired: bool) -> TextSet:
    """SENTENCES as a set; if `paired`, every second one with the next, so that token types are exercised."""
    texts: dict[str, Text] = {
        str(number): (text, SENTENCES[number % len(SENTENCES)]) if paired and number % 2 else text
        for number, text in enumerate(SENTENCES, 1)
    }
    files = tuple(SetFile(number, hash_sample(text)) for number, text in texts.items())
    return TextSet("sentences", Path(), 0, files, texts=texts)
