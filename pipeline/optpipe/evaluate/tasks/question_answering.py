"""Question answering by spans of a context: F1 and exact match as in SQuAD's script."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.contract import TaskContract, Values, suggest_task
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.text_set import TextSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_ANSWER = 30
"""Maximum tokens of an answer, as in Hugging Face's examples."""


class QuestionAnswering(TaskContract):
    """A prediction is of one window of a context: `{"question", "answer", "score", "none"}`; a truth is `{"question", "answers"}`.

    The answer is the best span of all windows. In a set with unanswerable questions it is empty if `none`, the lowest score of
    the first token over the windows, is higher; in other sets `none` is null. Questions are independent.
    """

    scores: ClassVar[tuple[str, ...]] = ("F1", "exact match")
    sample_kind: ClassVar[str | None] = "questions"

    def require_model(self, card: ModelCard) -> None:
        """Needs two outputs of (n, tokens): scores of the answer's first and last token."""
        shapes = [each.shape for each in card.outputs[:2]]
        if len(shapes) < 2 or any(len(shape) != 2 for shape in shapes):
            said = ", ".join(f"{each.name} {'×'.join(map(str, each.shape))}" for each in card.outputs)
            raise BadInputError(
                f"{card.name}: question answering needs two outputs of (n, tokens), the scores of an answer's first and last token,"
                f" but the model has {said}{suggest_task(card)}"
            )

    def describe_scoring(self, card: ModelCard) -> str:  # noqa: ARG002
        return (
            f"the best span of at most {LONGEST_ANSWER} tokens answers; long contexts are read in overlapping windows"
        )

    def count_samples(self, predictions: Values) -> int:
        return len({each["question"] for each in predictions})

    def read_truths(self, samples: SampleSet, card: ModelCard, classes: int | None) -> Values | None:  # noqa: ARG002
        """The lines' `answers`, an empty list for an unanswerable question; None if no line has answers."""
        if not isinstance(samples, TextSet):
            return None
        said = samples.read_objects()
        if not any("answers" in value for value in said):
            return None
        return [
            {"question": _number(each), "answers": _read_answers(value, f"{samples.name}, line {_number(each)}")}
            for value, each in zip(said, samples.files, strict=True)
        ]

    def decode(self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard) -> Values:
        """The best span of each window, with its score and the score of no answer."""
        assert isinstance(samples, TextSet)
        first, last = (np.asarray(outputs[each.name], np.float64) for each in card.outputs[:2])
        found = []
        for begin, end, each in zip(first, last, files, strict=True):
            window = samples.windows[each.path]
            answer, score = find_best_span(begin, end, window.spans, window.context)
            none = float(begin[0] + end[0]) if samples.some_unanswerable else None
            found.append({"question": _number(each), "answer": answer, "score": score, "none": none})
        return found

    def take_as_truths(self, predictions: Values) -> Values:
        answers = choose_answers(predictions)
        return [
            {"question": each["question"], "answers": [answers[each["question"]]] if answers[each["question"]] else []}
            for each in predictions
        ]

    def name_classes(self, truths: Values, labels: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        return ("with an answer", "without an answer")  # as in SQuAD 2.0's script

    def gather(self, truths: Values, predictions: Values) -> "NDArray[np.float64]":
        """F1 and exact match of each question (questions, 2)."""
        answers, known = choose_answers(predictions), _list_known(truths)
        return np.array([score_answer(answers[each], known[each]) for each in known], np.float64).reshape(-1, 2)

    def compute_class_scores(self, truths: Values, gathered: Any) -> "NDArray[np.float64]":
        answerable = np.array([bool(each) for each in _list_known(truths).values()])
        parts = (gathered[answerable == has, 0] for has in (True, False))
        return np.array([part.mean() if len(part) else np.nan for part in parts])

    def compute_sample_parity(self, source: Values, found: Values) -> "NDArray[np.float64]":
        one, other = choose_answers(source), choose_answers(found)
        return np.array([float(one[question] == other[question]) for question in one])


def _list_known(truths: Values) -> dict[int, list[str]]:
    return {each["question"]: each["answers"] for each in truths}


def find_best_span(
    first: "NDArray[np.float64]", last: "NDArray[np.float64]", spans: Sequence[tuple[int, int]], context: str
) -> tuple[str, float]:
    """The context's span with the highest sum of both scores, and that sum; `first` and `last` are (tokens,)."""
    inside = np.array([begin >= 0 for begin, _ in spans])
    places = np.flatnonzero(inside)
    if not len(places):
        return "", float("-inf")
    scores = first[places][:, None] + last[places][None, :]
    distance = places[None, :] - places[:, None]
    scores[(distance < 0) | (distance >= LONGEST_ANSWER)] = -np.inf
    begin, end = np.unravel_index(int(np.argmax(scores)), scores.shape)
    text = context[spans[places[begin]][0] : spans[places[end]][1]]
    return text, float(scores[begin, end])


def choose_answers(predictions: Values) -> dict[int, str]:
    """The answer to each question over all its windows; empty for no answer."""
    best: dict[int, tuple[float, str]] = {}
    none: dict[int, float] = {}
    for each in predictions:
        question = each["question"]
        best[question] = max(best.get(question, (float("-inf"), "")), (each["score"], each["answer"]))
        if each["none"] is not None:
            none[question] = min(none.get(question, float("inf")), each["none"])
    return {
        question: "" if none.get(question, float("-inf")) > score else answer
        for question, (score, answer) in best.items()
    }


def score_answer(answer: str, truths: Sequence[str]) -> tuple[float, float]:
    """F1 over words and exact match, the best over `truths`, as in SQuAD 2.0's script; only "" matches without truths."""
    found, scores = normalize_answer(answer).split(), []
    for known in [words for each in truths if (words := normalize_answer(each).split())] or [[]]:
        same = sum((Counter(found) & Counter(known)).values())
        f1 = 2 * same / (len(found) + len(known)) if found and known else float(found == known)
        scores.append((f1, float(found == known)))
    return max(f1 for f1, _ in scores), max(exact for _, exact in scores)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles, and extra white space, as in SQuAD's script."""
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _number(file: SetFile) -> int:
    return int(file.path.partition(".")[0])


def _read_answers(value: Mapping[str, object], where: str) -> list[str]:
    answers = value.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else answers
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise BadInputError(
            f'{where}: needs "answers", such as {{"text": ["Ada"]}}, or {{"text": []}} for a question without one'
        )
    return list(texts)
