"""Tags of words, such as names: F1, precision, and recall of whole entities."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.text_set import TextSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

OUTSIDE = "O"
BEGINS, ENDS = ("B", "S", "U"), ("E", "L", "S", "U")
"""Prefixes of the first and the last word of an entity."""
Entity = tuple[str, int, int]
"""Type, first word, and last word."""


class TokenClassification(TaskContract):
    """Predictions and truths are the tags of a text's words, `["B-PER", "I-PER", "O"]`.

    A word has the tag of its first token, as in Hugging Face's examples; a word beyond the longest input is outside. An entity is
    right if its type and both ends are; scores are micro-averages.
    """

    form: ClassVar[str] = "(n, tokens, tags)"
    class_axis: ClassVar[int | None] = 2
    scores: ClassVar[tuple[str, ...]] = ("F1", "precision", "recall")

    def require_model(self, card: ModelCard) -> None:
        super().require_model(card)
        if not card.labels:
            raise BadInputError(f"{card.name} has no labels; token classification requires one for each tag")

    def describe_scoring(self, card: ModelCard) -> str:  # noqa: ARG002
        return "the first token of a word decides"

    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:  # noqa: ARG002
        """The lines' `tags`; None if no line has tags."""
        if not isinstance(samples, TextSet):
            return None
        said = samples.read_objects()
        if not any("tags" in value for value in said):
            return None
        return [
            _read_tags(value, card, f"{samples.name}, line {each.path}")
            for value, each in zip(said, samples.files, strict=True)
        ]

    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:
        assert isinstance(samples, TextSet)
        best = np.argmax(np.asarray(outputs[card.outputs[0].name], np.float32), axis=2)
        return [
            [card.labels[row[token]] if token >= 0 else OUTSIDE for token in samples.first_tokens[each.path]]
            for row, each in zip(best, files, strict=True)
        ]

    def name_classes(self, truths: Values, labels: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        return _list_types(truths)

    def gather(self, truths: Values, predictions: Values) -> "NDArray[np.float64]":
        """Correct, predicted, and true entities (texts, types, 3); the last type holds all types that no truth has."""
        types = {name: place for place, name in enumerate(_list_types(truths))}
        counts = np.zeros((len(truths), len(types) + 1, 3))
        for row, true, predicted in zip(counts, truths, predictions, strict=True):
            known, found = find_entities(true), find_entities(predicted)
            for column, entities in enumerate((known & found, found, known)):
                for name, _, _ in entities:
                    row[types.get(name, len(types)), column] += 1
        return counts

    def compute_scores(self, gathered: Any, weights: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """F1, precision, and recall over all types; NaN without an entity."""
        right, found, true = (weights @ gathered.sum(axis=1)).T
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([2 * right / (found + true), right / found, right / true], axis=1)

    def compute_class_scores(self, truths: Values, gathered: Any) -> "NDArray[np.float64]":  # noqa: ARG002
        right, found, true = gathered[:, :-1].sum(axis=0).T
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(2 * right / (found + true))

    def compute_sample_parity(self, source: Values, found: Values) -> "NDArray[np.float64]":
        """Share of words with the same tag; 1 for a text without words."""
        shares = [
            np.mean([one == other for one, other in zip(*pair, strict=True)] or [1])
            for pair in zip(source, found, strict=True)
        ]
        return np.array(shares, np.float64)


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of BIO tags, as in CoNLL-2000's `conlleval`: B-, or an I- of another type than before, begins one.

    E- and L- end an entity of IOBES and BILOU tags, S- and U- are a whole one. A tag without a prefix continues the same type.
    """
    found: set[Entity] = set()
    begin, open_type, before = 0, None, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, dash, rest = tag.partition("-")
        kind = None if tag == OUTSIDE else rest if dash else tag
        if open_type is not None and (kind != open_type or prefix in BEGINS or before in ENDS):
            found.add((open_type, begin, place - 1))
            open_type = None
        if kind is not None and open_type is None:
            begin, open_type = place, kind
        before = prefix
    return found


def _list_types(tags: Values) -> list[str]:
    return sorted({name for each in tags for name, _, _ in find_entities(each)})


def _read_tags(value: Mapping[str, object], card: ModelCard, where: str) -> list[str]:
    tags, words = value.get("tags"), value.get("tokens")
    if not isinstance(tags, list) or not isinstance(words, list) or len(tags) != len(words):
        raise BadInputError(
            f'{where}: needs "tokens" and as many "tags", such as {{"tokens": ["Ada"], "tags": ["B-PER"]}}'
        )
    unknown = next((each for each in tags if each not in card.labels), None)
    if unknown is not None:
        raise BadInputError(f"{where}: tag {unknown!r} is not a label of {card.name}: {', '.join(card.labels[:12])}")
    return list(tags)
