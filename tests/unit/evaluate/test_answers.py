"""Answers to questions against SQuAD 2.0's script by hand, the best span, and the windows of a long passage."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.answers import (
    QuestionAnswering,
    choose_answer,
    find_best_span,
    score_answer,
)
from optpipe.models.inputs.task_data import fit_texts
from optpipe.models.inputs.text_set import text_set_from_path

TASK = QuestionAnswering()
WORDS = [f"w{number}" for number in range(60)] + ["who", "?"]


@pytest.mark.parametrize(
    ("answer", "truths", "f1", "exact"),
    [
        ("The Eiffel Tower!", ["Eiffel tower", "the tower"], 1.0, 1.0),
        ("Denver Broncos in 2016", ["Denver Broncos"], 2 * 2 / (4 + 2), 0.0),
        ("the Broncos", ["Denver Broncos", "Panthers"], 2 / 3, 0.0),
        ("a cat cat", ["cat dog"], 0.5, 0.0),
        ("1,000", ["1000"], 1.0, 1.0),
        ("dog cat", ["cat dog"], 1.0, 0.0),
        ("", ["Paris"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("", ["the"], 1.0, 1.0),
    ],
)
def test_scores_are_those_of_squads_script(answer, truths, f1, exact):
    """Worked by hand from the script of SQuAD 2.0: words in common over the words of both, the best over the truths."""
    assert score_answer(answer, truths) == pytest.approx((f1, exact))


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_best_span_is_the_best_of_all_that_are_allowed(tokens, longest, seed):
    rng = np.random.default_rng(seed)
    inside = rng.random(tokens) > 0.3
    first, last = rng.normal(size=(2, tokens + 3))  # padded as a batch is
    allowed = [
        (first[begin] + last[end], (begin, end))
        for begin in range(tokens)
        for end in range(begin, min(begin + longest, tokens))
        if inside[begin] and inside[end]
    ]
    span, score = find_best_span(first, last, inside, longest)
    if allowed:
        assert (score, span) == max(allowed)
    else:
        assert (score, span) == (-np.inf, None)


def test_logits_that_are_nan_answer_nothing():
    nothing = np.full(4, np.nan)
    assert find_best_span(nothing, nothing, [True] * 4, 30) == (None, -np.inf)


def test_the_best_window_answers_unless_no_answer_is_better_in_all_of_them():
    windows = [("a", 2.0, 3.0), ("b", 4.0, 9.0)]
    assert choose_answer(windows, may_have_none=True) == "b"
    assert choose_answer(windows[:1], may_have_none=True) == ""
    assert choose_answer(windows[:1], may_have_none=False) == "a"


def write_tokenizer(folder):
    pytest.importorskip("tokenizers", reason="needs tokenizers: uv sync --extra hf")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*marks, *WORDS])}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return found.to_str()


def make_reader(**head):
    shapes = (1, 8), (8, 16), (64, 32)
    card = (
        "reader",
        "hf:reader",
        Task.QUESTION_ANSWERING,
        (InputSpec("input_ids", "int64", *shapes),),
    )
    return ModelCard(*card, tokenization=Tokenization("0" * 64, 32), head=head)


def read_questions(folder, *lines):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return text_set_from_path(path)[0]


def test_a_long_passage_is_read_in_windows_that_cover_it(tmp_path):
    context = " ".join(WORDS[:50])
    lines = [
        {"question": "who ?", "context": context, "answers": {"text": [text]}}
        for text in ("w40", "w3")
    ]
    lines.append({"question": "who ?", "context": "w1 w2", "answers": []})
    samples = fit_texts(
        read_questions(tmp_path, *lines), write_tokenizer(tmp_path), make_reader(), truncate=False
    )
    assert [each.path for each in samples.rows] == ["1.0", "1.1", "1.2", "2.0", "2.1", "2.2", "3.0"]
    parts = samples.windows["1"]
    assert all(len(part.tokens.ids) <= 32 for part in parts)
    read = [[context[begin:end] for begin, end in part.spans if begin >= 0] for part in parts]
    assert sorted({word for words in read for word in words}, key=WORDS.index) == WORDS[:50]
    assert read[0][-10:] == read[1][:10]  # a third of 32 tokens
    assert parts[0].tokens.types[:5] == (0, 0, 0, 0, 1)
    assert TASK.read_truths(samples, make_reader(), None) == [["w40"], ["w3"], []]
    assert samples.may_have_none
    assert samples.files[0].group == samples.files[1].group != samples.files[2].group


def test_a_question_that_leaves_no_room_for_its_stride_is_refused(tmp_path):
    long = {"question": " ".join(WORDS[:20]), "context": " ".join(WORDS[:40])}
    samples, tokenizer = read_questions(tmp_path, long), write_tokenizer(tmp_path)
    with pytest.raises(BadInputError, match="line 1: its question leaves 9 of 32 tokens"):
        fit_texts(samples, tokenizer, make_reader(), truncate=False)
    assert len(fit_texts(samples, tokenizer, make_reader(stride=4), truncate=False).rows) > 1
    short = read_questions(tmp_path, {**long, "context": "w1"})
    assert len(fit_texts(short, tokenizer, make_reader(), truncate=False).rows) == 1


@pytest.mark.parametrize("stride", [-1, 2.5, "many", True])
def test_a_stride_that_is_none_is_refused(tmp_path, stride):
    samples = read_questions(tmp_path, {"question": "who ?", "context": "w1"})
    with pytest.raises(BadInputError, match="stride"):
        fit_texts(samples, write_tokenizer(tmp_path), make_reader(stride=stride), truncate=False)


def test_pairs_that_ask_nothing_are_refused(tmp_path):
    samples = read_questions(tmp_path, {"premise": "w1", "hypothesis": "w2"})
    with pytest.raises(BadInputError, match="no question with a context"):
        fit_texts(samples, write_tokenizer(tmp_path), make_reader(), truncate=False)
