"""Extractive question answering: a span of a passage answers a question about it, scored as SQuAD's script does."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard, TensorSpec
from optpipe.core.errors import BadInputError
from optpipe.core.metrics.scores import EM, F1
from optpipe.evaluate.tasks.contract import TaskContract, Values
from optpipe.models.inputs.rows import Arrays
from optpipe.models.inputs.sample_set import SampleSet, SetFile
from optpipe.models.inputs.task_data import read_head_count
from optpipe.models.inputs.text_set import TextSet

LONGEST_ANSWER = 30
"""Tokens, as in Hugging Face's examples."""
START, END = "start_logits", "end_logits"
NO_ANSWER = ""


class QuestionAnswering(TaskContract):
    """A prediction is the answer's text, empty for no answer; a truth is a list of right answers, empty if there is none.

    The answer is the span with the largest sum of the scores of its first and its last token, over all windows of the passage. In
    a set with unanswerable questions it is NO_ANSWER where the least score of the first token over the windows is larger, as in
    Hugging Face's examples (Devlin et al., 2018, 4.3).
    """

    scores: ClassVar[tuple[str, ...]] = (F1.name, EM.name)
    names_classes: ClassVar[bool] = False

    def require_model(self, card: ModelCard) -> None:
        """Needs two outputs of (n, tokens): the scores of an answer's first and last token."""
        shapes = [spec.shape for spec in _find_outputs(card)]
        if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
            outputs = ", ".join(
                f"{spec.name} {'×'.join(map(str, spec.shape))}" for spec in card.outputs
            )
            problem = f"{card.name}: {card.task} needs two outputs of (n, tokens), the scores of an answer's first and last token"
            raise BadInputError(
                f"{problem}, but the model has {outputs}\nset another task in a model card (models/README.md)"
            )
        _read_longest(card)

    def require_rows(self, samples: SampleSet) -> None:
        """A question may have several windows."""

    def describe_scoring(self, card: ModelCard) -> str:
        return f"the best span of at most {_read_longest(card)} tokens answers"

    def read_truths(
        self, samples: SampleSet, card: ModelCard, classes: int | None
    ) -> Values | None:
        if not isinstance(samples, TextSet) or not samples.answers:
            return None
        return [list(samples.answers[file.path]) for file in samples.files]

    def decode(
        self, outputs: Arrays, files: Sequence[SetFile], samples: SampleSet, card: ModelCard
    ) -> Values:
        """The best answer in each window, its score, and the score of "no answer"."""
        assert isinstance(samples, TextSet)
        longest, rows = _read_longest(card), []
        first, last = (np.asarray(outputs[spec.name], np.float64) for spec in _find_outputs(card))
        for begins, ends, file in zip(first, last, files, strict=True):
            path, _, number = file.path.rpartition(".")
            spans, text = samples.windows[path][int(number)].spans, samples.texts[path]
            best, score = find_best_span(begins, ends, [begin >= 0 for begin, _ in spans], longest)
            answer = NO_ANSWER if best is None else text[1][spans[best[0]][0] : spans[best[1]][1]]
            rows.append((answer, score, float(begins[0] + ends[0])))
        return rows

    def join_rows(self, decoded: Values, samples: SampleSet) -> Values:
        assert isinstance(samples, TextSet)
        answers, place = [], 0
        for file in samples.files:
            windows = decoded[place : place + len(samples.windows[file.path])]
            answers.append(choose_answer(windows, may_have_none=samples.may_have_none))
            place += len(windows)
        return answers

    def take_as_truths(self, predictions: Values) -> Values:
        return [[answer] if answer else [] for answer in predictions]

    def gather(self, truths: Values, predictions: Values) -> NDArray[np.float64]:
        """F1 and exact match of each question, (questions, 2)."""
        pairs = zip(predictions, truths, strict=True)
        return np.array([score_answer(answer, known) for answer, known in pairs], np.float64)

    def shows_something(self, source: Values, truths: Values | None = None) -> bool:
        """False if the source model gives the same answer to all questions, such as none."""
        return len(set(source)) > 1


def _find_outputs(card: ModelCard) -> Sequence[TensorSpec]:
    """The scores of first and last tokens: by transformers' names, or the first two outputs."""
    named = {spec.name: spec for spec in card.outputs}
    return [named[START], named[END]] if {START, END} <= named.keys() else card.outputs[:2]


def _read_longest(card: ModelCard) -> int:
    return read_head_count(card, "longest_answer", least=1) or LONGEST_ANSWER


def find_best_span(
    first: NDArray[np.float64], last: NDArray[np.float64], inside: Sequence[bool], longest: int
) -> tuple[tuple[int, int] | None, float]:
    """(first, last) token of the best span and its score; None without a token inside of the passage.

    `first` and `last` are scores, (tokens,), which may go on with padding. A span has at most `longest` tokens; of equal ones the first
    counts.
    """
    places = np.flatnonzero(inside)
    if not len(places):
        return None, -np.inf
    sums = first[places][:, None] + last[places][None, :]
    distance = places[None, :] - places[:, None]
    sums = np.where((distance < 0) | (distance >= longest) | np.isnan(sums), -np.inf, sums)
    begin, end = np.unravel_index(int(np.argmax(sums)), sums.shape)
    if sums[begin, end] == -np.inf:
        return None, -np.inf
    return (int(places[begin]), int(places[end])), float(sums[begin, end])


def choose_answer(windows: Sequence[tuple[str, float, float]], *, may_have_none: bool) -> str:
    """The answer of a question from (answer, score, score of no answer) of its windows; the first of equally good ones."""
    answer, score, _ = max(windows, key=lambda window: window[1])
    return NO_ANSWER if may_have_none and min(window[2] for window in windows) > score else answer


def score_answer(answer: str, truths: Sequence[str]) -> tuple[float, float]:
    """F1 over words and exact match, the best over `truths`, as in SQuAD 2.0's script; without truths only no answer is right."""
    answered, scores = normalize_answer(answer).split(), []
    counted = Counter(answered)
    for known in [words for truth in truths if (words := normalize_answer(truth).split())] or [[]]:
        same = sum(min(number, counted[word]) for word, number in Counter(known).items())
        f1 = (
            2 * same / (len(answered) + len(known))
            if answered and known
            else float(answered == known)
        )
        scores.append((f1, float(answered == known)))
    return max(f1 for f1, _ in scores), max(exact for _, exact in scores)


_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, articles, and extra white space, as in SQuAD's script."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
