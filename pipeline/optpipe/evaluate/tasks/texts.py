"""Tasks of texts.

Tags of words, such as names: F1, precision, and recall of whole entities. Embeddings: cosine similarity of pairs, and Spearman's
correlation with human ratings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import SPEARMAN
from optpipe.core.records import group_pairs
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.evaluate.tasks.counted import CountedScores
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.text_set import TextSet

OUTSIDE = "O"
BEGINS, ENDS = ("B", "S", "U"), ("E", "L", "S", "U")
"""Prefixes of the first and the last word of an entity."""
Entity = tuple[str, int, int]
"""Type, first word, and last word."""


class TokenClassification(CountedScores):
    """Predictions and truths are the tags of a text's words, `["B-PER", "I-PER", "O"]`.

    A word has the tag of its first token, as in Hugging Face's examples; a word beyond the longest input is outside. An entity is
    right if its type and both ends are; scores are micro-averages.
    """

    form: ClassVar[str] = "(n, tokens, tags)"
    class_axis: ClassVar[int | None] = 2

    def require_model(self, card: ModelCard) -> None:
        super().require_model(card)
        if not card.labels:
            raise BadInputError(
                f"{card.name} has no labels; token classification requires one for each tag"
            )

    def describe_scoring(self, card: ModelCard) -> str:
        return "the first token of a word decides"

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        """The lines' `tags`; None if no line has tags."""
        if not isinstance(samples, TextSet):
            return None
        said = samples.read_objects()
        if not any("tags" in value for value in said):
            return None
        places = (f"{samples.name}, line {file.path}" for file in samples.files)
        return [_read_tags(value, card, where) for value, where in zip(said, places, strict=True)]

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        assert isinstance(samples, TextSet)
        best = np.argmax(np.asarray(outputs[card.outputs[0].name], np.float32), axis=2)
        words = zip(best, (samples.first_tokens[file.path] for file in files), strict=True)
        return [
            [card.labels[row[token]] if token >= 0 else OUTSIDE for token in tokens]
            for row, tokens in words
        ]

    def name_classes(self, truths: Values, labels: Sequence[str]) -> Sequence[str]:
        return _list_types(truths)

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        """Correct, predicted, and true entities (texts, types, 3); the last type holds all types that no truth has."""
        types = {name: place for place, name in enumerate(_list_types(truths))}
        counts = np.zeros((len(truths), len(types) + 1, 3))
        for row, true, predicted in zip(counts, truths, predictions, strict=True):
            known, guessed = find_entities(true), find_entities(predicted)
            for column, entities in enumerate((known & guessed, guessed, known)):
                for name, _, _ in entities:
                    row[types.get(name, len(types)), column] += 1
        return counts

    def select_named(self, gathered: Any) -> NDArray[np.float64]:
        return np.asarray(gathered[:, :-1])

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """Share of words with the same tag; 1 for a text without words."""
        texts = (zip(*pair, strict=True) for pair in zip(source, build, strict=True))
        return np.array(
            [np.mean([left == right for left, right in words] or [1]) for words in texts],
            np.float64,
        )


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of BIO tags, as in CoNLL-2000's `conlleval`: B-, or an I- of another type than before, begins one.

    E- and L- end an entity of IOBES and BILOU tags, S- and U- are a whole one. A tag without a prefix continues the same type.
    """
    entities: set[Entity] = set()
    begin, open_type, before = 0, None, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, dash, rest = tag.partition("-")
        kind = None if tag == OUTSIDE else rest if dash else tag
        if open_type is not None and (kind != open_type or prefix in BEGINS or before in ENDS):
            entities.add((open_type, begin, place - 1))
            open_type = None
        if kind is not None and open_type is None:
            begin, open_type = place, kind
        before = prefix
    return entities


def _list_types(tags: Values) -> list[str]:
    return sorted({name for text in tags for name, _, _ in find_entities(text)})


def _read_tags(value: Mapping[str, object], card: ModelCard, where: str) -> list[str]:
    tags, words = value.get("tags"), value.get("tokens")
    if not isinstance(tags, list) or not isinstance(words, list) or len(tags) != len(words):
        example = '{"tokens": ["Ada"], "tags": ["B-PER"]}'
        raise BadInputError(f'{where}: needs "tokens" and as many "tags", such as {example}')
    unknown = next((tag for tag in tags if tag not in card.labels), None)
    if unknown is not None:
        raise BadInputError(
            f"{where}: tag {unknown!r} is not a label of {card.name}: {', '.join(card.labels[:12])}"
        )
    return list(tags)


FEWEST_PAIRS = 3
ROUNDING = 1e-6
"""Cosines of FP32 embeddings within this distance are equal: it is about eight units of rounding."""
ALONE = [-1.0, 0.0]
"""The truth of a text without a pair."""


class Embedding(TaskContract):
    """A prediction is a text's embedding; a truth is (number of its pair, rating of the pair), or ALONE.

    Two lines of a set with the same `pair` belong together: `{"text": "...", "pair": "7", "score": 3.5}`. Pairs are independent.
    """

    form: ClassVar[str] = "(n, values)"
    scores: ClassVar[tuple[str, ...]] = (SPEARMAN.name,)
    score_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    names_classes: ClassVar[bool] = False
    needs_finite: ClassVar[bool] = True
    unit_kind: ClassVar[str | None] = "pairs"

    def describe_scoring(self, card: ModelCard) -> str:
        pooling = card.head.get("pooling")
        return f"{pooling} pooling over tokens inside the engine" if pooling else ""

    def describe_left_out(self, truths: Values) -> str:
        alone = sum(truth == ALONE for truth in truths)
        return (
            f"{alone} of {len(truths)} texts belong to no pair; only their agreement is judged"
            if alone
            else ""
        )

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        """Pairs and their ratings; None with fewer than FEWEST_PAIRS."""
        if not isinstance(samples, TextSet):
            return None
        said = samples.read_objects()
        paired = (
            (at, value["pair"]) for at, value in enumerate(said) if value.get("pair") is not None
        )
        members = group_pairs((str(name), place) for place, name in paired)
        pairs = {name: places for name, places in members.items() if len(places) == 2}
        if crowded := next((name for name, places in members.items() if len(places) > 2), None):
            raise BadInputError(
                f"{samples.name}: pair '{crowded}' has {len(members[crowded])} texts; a pair has two"
            )
        if len(pairs) < FEWEST_PAIRS:  # such as a small sample of the set
            return None
        truths = [list(ALONE) for _ in said]
        for number, (name, places) in enumerate(pairs.items()):
            for place in places:
                truths[place] = [
                    float(number),
                    self._read_similarity(said[place], said[places[0]], name, samples),
                ]
        return truths

    def _read_similarity(
        self, value: dict[str, Any], first: dict[str, Any], name: str, samples: SampleSet
    ) -> float:
        similarity = value.get("score")
        if (
            isinstance(similarity, bool)
            or not isinstance(similarity, int | float)
            or not np.isfinite(similarity)
        ):
            raise BadInputError(
                f"{samples.name}: pair '{name}' has no number as its score ({similarity!r})"
            )
        if similarity != first["score"]:
            raise BadInputError(
                f"{samples.name}: pair '{name}' has two scores, {first['score']} and {similarity}"
            )
        return float(similarity)

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        rows: list[list[float]] = np.asarray(outputs[card.outputs[0].name], np.float64).tolist()
        return rows

    def take_as_truths(self, predictions: Values) -> Values:
        """Pairs neighbors in the set; their rating is the source model's similarity."""
        truths = [list(ALONE) for _ in predictions]
        for first in range(0, len(predictions) - 1, 2):
            similarity = _compute_cosine(
                np.array(predictions[first]), np.array(predictions[first + 1])
            )
            truths[first] = truths[first + 1] = [float(first // 2), float(similarity)]
        return truths

    def count_units(self, truths: Values) -> int:
        return 1 + int(max(truth[0] for truth in truths))

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        return truths is None or self.count_units(truths) >= FEWEST_PAIRS

    def gather(
        self, truths: Values, predictions: Values
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Cosines and ratings of all pairs, (pairs,) each; cosines within ROUNDING of each other become their least."""
        numbers, rows = np.array([truth[0] for truth in truths]), np.array(predictions, np.float64)
        order = np.argsort(numbers, kind="stable")
        order = order[numbers[order] >= 0]
        stated = np.array([truths[place][1] for place in order[::2]], np.float64)
        return _join_equal(_compute_cosine(rows[order[::2]], rows[order[1::2]])), stated

    def compute_scores(self, gathered: Any, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Spearman's correlation with weights and mean ranks for ties; 0 if all cosines, or all ratings, are equal."""
        cosines, ratings = (_rank(values, weights) for values in gathered)
        total = weights.sum(axis=1, keepdims=True)
        cosines, ratings = (
            ranks - (weights * ranks).sum(1, keepdims=True) / total for ranks in (cosines, ratings)
        )
        both, first, second = (
            (weights * product).sum(1) for product in (cosines * ratings, cosines**2, ratings**2)
        )
        spread = np.sqrt(first * second)
        return np.asarray(
            np.divide(both, spread, out=np.zeros_like(both), where=spread > 0)[:, None]
        )

    def compute_sample_parity(self, source: Values, build: Values) -> NDArray[np.float64]:
        """The cosine of both models' embeddings of each text, at least 0."""
        return np.maximum(
            _compute_cosine(np.array(source, np.float64), np.array(build, np.float64)), 0.0
        )


def _compute_cosine(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosines of rows (…, values); 0 if either is zero."""
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return np.asarray((left * right).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny))


def _join_equal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replaces each of `values` (pairs,) by the least of its group; a group spans at most ROUNDING."""
    order, joined, start = np.argsort(values), np.empty_like(values), 0
    ordered = values[order]
    while start < len(values):
        end = int(np.searchsorted(ordered, ordered[start] + ROUNDING, "right"))
        joined[order[start:end]] = ordered[start]
        start = end
    return joined


def _rank(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of each value in each row (rows, pairs), where value j counts weights[i, j] times."""
    known, place = np.unique(values, return_inverse=True)
    counts = np.zeros((len(weights), len(known)))
    np.add.at(counts.T, place, weights.T)
    middle = np.cumsum(counts, axis=1) - counts + (counts + 1) / 2
    return np.asarray(middle[:, place])
