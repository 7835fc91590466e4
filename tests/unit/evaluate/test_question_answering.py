"""Question answering: SQuAD's scores, the choice of a span, and windows of long contexts."""

import json

import numpy as np
import pytest

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks.question_answering import (
    QuestionAnswering,
    choose_answers,
    find_best_span,
    score_answer,
)
from optpipe.models.inputs.text_set import cut_windows, text_set_from_path

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: uv sync --extra hf")
WORDS = [f"w{number}" for number in range(60)] + ["who", "?"]


@pytest.mark.parametrize(
    ("answer", "truths", "f1", "exact"),
    [
        ("The Eiffel Tower!", ["Eiffel tower", "the tower"], 1.0, 1.0),
        ("Denver Broncos in 2016", ["Denver Broncos"], 2 * 2 / (4 + 2), 0.0),
        ("the Broncos", ["Denver Broncos", "Panthers"], 2 / 3, 0.0),
        ("a cat cat", ["cat dog"], 0.5, 0.0),
        ("1,000", ["1000"], 1.0, 1.0),
        ("", ["Paris"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("Paris", [], 0.0, 0.0),
        ("", ["the"], 1.0, 1.0),
    ],
)
def test_scores_are_those_of_squads_script(answer, truths, f1, exact):
    """Worked by hand from the script of SQuAD 2.0: words in common over the words of both, the best over the truths."""
    assert score_answer(answer, truths) == pytest.approx((f1, exact))


def test_the_best_span_is_inside_the_context_in_order_and_short():
    spans = [(-1, -1), (-1, -1), *((3 * at, 3 * at + 2) for at in range(40)), (-1, -1)]
    context = " ".join(f"{at:02}" for at in range(40))
    first, last = np.zeros(43), np.zeros(43)
    first[0] = last[42] = first[41] = last[2] = 9.0
    first[2], last[41] = 4.0, 5.0
    text, score = find_best_span(first, last, spans, context)
    assert (text, score) == ("39", 14.0)
    first[41], last[41] = 0.0, 1.0
    assert find_best_span(first, last, spans, context) == ("00", 13.0)
    assert find_best_span(first[:2], last[:2], spans[:2], context) == ("", float("-inf"))


def test_the_best_window_answers_unless_no_answer_is_better_in_all_of_them():
    rows = [
        {"question": 1, "answer": "a", "score": 2.0, "none": 3.0},
        {"question": 1, "answer": "b", "score": 4.0, "none": 9.0},
        {"question": 2, "answer": "c", "score": 2.0, "none": 3.0},
        {"question": 3, "answer": "d", "score": 2.0, "none": None},
    ]
    assert choose_answers(rows) == {1: "b", 2: "", 3: "d"}


def test_scores_are_means_over_questions_by_kind():
    task = QuestionAnswering()
    truths = [{"question": 1, "answers": ["b"]}] * 2 + [
        {"question": 2, "answers": []},
        {"question": 3, "answers": ["x d"]},
    ]
    rows = [
        {"question": 1, "answer": "a", "score": 2.0, "none": 3.0},
        {"question": 1, "answer": "b", "score": 4.0, "none": 9.0},
        {"question": 2, "answer": "c", "score": 2.0, "none": 3.0},
        {"question": 3, "answer": "d", "score": 2.0, "none": 0.0},
    ]
    found = task.gather(truths, rows)
    assert task.count_units(truths) == task.count_samples(rows) == 3
    assert task.compute_scores(found, np.ones((1, 3)))[0] == pytest.approx([(1 + 1 + 2 / 3) / 3, 2 / 3])
    assert task.compute_scores(found, np.array([[0.0, 0.0, 3.0]]))[0] == pytest.approx([2 / 3, 0])
    assert task.compute_class_scores(truths, found) == pytest.approx([5 / 6, 1])
    assert task.compute_sample_parity(rows, rows).tolist() == [1, 1, 1]
    assert task.take_as_truths(rows)[2:] == [{"question": 2, "answers": []}, {"question": 3, "answers": ["d"]}]


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    found.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


CARD = ModelCard(
    "answers", "hf:answers", Task.QUESTION_ANSWERING, (InputSpec("input_ids", "int64", (1, 8), (8, 16), (64, 32)),),
    tokenization=Tokenization("0" * 64, 32),
)  # fmt: skip


def test_squads_json_and_lines_are_one_set_and_long_contexts_are_windows(tmp_path, tokenizer):
    context = " ".join(WORDS[:50])
    question = {"id": "q1", "question": "who ?", "answers": [{"text": "w40", "answer_start": 0}]}
    other = {"id": "q2", "question": "who ?", "answers": [], "is_impossible": True}
    document = {"version": "2.0", "data": [{"paragraphs": [{"context": context, "qas": [question, other]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(document, indent=1))
    lines = [
        {"question": "who ?", "context": context, "answers": {"text": ["w40"], "answer_start": [0]}},
        {"question": "who ?", "context": context, "answers": {"text": [], "answer_start": []}},
    ]
    (tmp_path / "squad.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = [text_set_from_path(tmp_path / name)[0] for name in ("squad.json", "squad.jsonl")]
    assert sets[0].texts == sets[1].texts
    assert sets[0].sha256 == sets[1].sha256
    for found in sets:
        cut = cut_windows(found, tokenizer, CARD, 32)
        assert cut.some_unanswerable
        assert [each.path for each in cut.files] == ["1", "1.1", "1.2", "2", "2.1", "2.2"]
        assert all(len(each.ids) <= 32 for each in cut.windows.values())
        seen = {context[begin:end] for each in cut.windows.values() for begin, end in each.spans if begin >= 0}
        assert seen == set(WORDS[:50])
        assert cut.windows["1"].types[:5] == (0, 0, 0, 0, 1)
        truths = QuestionAnswering().read_truths(cut, CARD, None)
        assert truths[0] == truths[2] == {"question": 1, "answers": ["w40"]}
        assert truths[5] == {"question": 2, "answers": []}


def test_a_question_that_leaves_no_room_is_refused(tmp_path, tokenizer):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": " ".join(WORDS[:20]), "context": "w1"}) + "\n")
    with pytest.raises(BadInputError, match="line 1: the question has 23 tokens; the maximum is 16, half of answers"):
        cut_windows(text_set_from_path(tmp_path / "long.jsonl")[0], tokenizer, CARD, 32)


def test_answers_of_another_form_are_refused(tmp_path, tokenizer):
    (tmp_path / "odd.jsonl").write_text(json.dumps({"question": "who ?", "context": "w1", "answers": "w1"}) + "\n")
    found = cut_windows(text_set_from_path(tmp_path / "odd.jsonl")[0], tokenizer, CARD, 32)
    with pytest.raises(BadInputError, match=r'odd\.jsonl, line 1: needs "answers"'):
        QuestionAnswering().read_truths(found, CARD, None)
