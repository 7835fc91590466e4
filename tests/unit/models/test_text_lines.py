"""Lines of JSON as data sets have them: one text or two, labels, and what is refused by its reason."""

import json

import pytest

from optpipe.core.errors import BadInputError
from optpipe.models.inputs.text_lines import read_text_lines
from optpipe.models.inputs.text_set import TextSet, text_set_from_path
from optpipe.workspace.files import write_json


def write(folder, *lines):
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("text", "text_pair"),
        ("premise", "hypothesis"),
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("question", "sentence"),
    ],
)
def test_pairs_have_the_names_of_their_data_set(tmp_path, first, second):
    path = write(tmp_path, {first: "All was fine.", second: "Some was.", "label": 0})
    lines, bad = read_text_lines(path)
    assert not bad
    assert (lines[1].text, lines[1].label) == (("All was fine.", "Some was."), "0")

    lines, bad = read_text_lines(write(tmp_path, {first: "All.", second: None}))
    if first == "text":
        assert lines[1].text == "All."
    else:
        problem, _, missing = bad[0][1].partition(", but no ")
        assert (problem, f'"{second}"' in missing) == (f'it has a "{first}"', True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"hypothesis": "Some."}, 'it has a "hypothesis", but no "premise"'),
        ({"text_pair": "Some."}, 'it has a "text_pair", but no "text"'),
        ({"premise": "All.", "hypothesis": " "}, "its hypothesis is empty"),
        ({"premise": "All.", "hypothesis": 3}, 'its "hypothesis" is not a string'),
        ({"text": ["a", "b"]}, 'its "text" is not a string'),
        ({"tokens": []}, "its text is empty"),
        ({"premise": "A.", "hypothesis": "B.", "gold_label": "-"}, "annotators did not agree"),
        ({"premise": "A.", "hypothesis": "B.", "label": -1}, "annotators did not agree"),
        ({"label": 1}, 'not an object with a "text"'),
        (["a", "b"], "not an object"),
    ],
)
def test_what_is_no_sample_is_named(tmp_path, line, reason):
    _, bad = read_text_lines(write(tmp_path, line))
    assert reason in bad[0][1]


def test_other_field_names_and_labels(tmp_path):
    lines, bad = read_text_lines(
        write(
            tmp_path,
            {"sentence": "Fine.", "label": 1},
            {"sentence": "Dull.", "label": -1.5},
            {"text": "Loud.", "gold_label": "negative", "sentence": "ignored"},
        )
    )
    assert not bad
    assert [(line.text, line.label) for line in lines.values()] == [
        ("Fine.", "1"),
        ("Dull.", "-1.5"),
        ("Loud.", "negative"),
    ]


def test_a_single_text_among_pairs_is_refused(tmp_path):
    lines = [{"text": "a", "text_pair": "b"}] * 30
    _, bad = text_set_from_path(write(tmp_path, *lines, {"text": "c"}))
    assert bad[0][1] == "no second text, although other lines have one"


def test_a_drawn_set_knows_its_pairs_again_and_notices_a_change_of_either(tmp_path):
    path = write(tmp_path, *({"premise": f"All {n}.", "hypothesis": "Some."} for n in range(30)))
    drawn, _ = text_set_from_path(path, 5, seed=1)
    assert drawn.has_pairs
    manifest = tmp_path / "set.json"
    write_json(manifest, drawn.to_dict(tmp_path))
    again, _ = text_set_from_path(manifest)
    assert isinstance(again, TextSet)
    assert again.texts == drawn.texts
    assert len({each.sha256 for each in drawn.files}) == 5

    path.write_text(path.read_text().replace("Some.", "None."))
    with pytest.raises(BadInputError, match="has changed"):
        text_set_from_path(manifest)


def test_a_text_stands_alone_whatever_else_its_line_has(tmp_path):
    """A review with a field that is the second half of another data set's pair is one text."""
    path = write(tmp_path, {"text": "Fine.", "hypothesis": "none", "question2": "?"})
    lines, bad = read_text_lines(path)
    assert (lines[1].text, bad) == ("Fine.", ())


ASKED = {"question": "Who met Ada?", "context": "Ada met Alan. Grace met Emmy."}


def write_squad(folder, *asked, **head):
    """SQuAD's JSON of one article with one passage."""
    passage = {
        "context": ASKED["context"],
        "qas": [{"id": "1", "question": "Who?", **one} for one in asked],
    }
    path = folder / "squad.json"
    value = {**head, "data": [{"title": "People", "paragraphs": [passage]}]}
    path.write_text(json.dumps(value, indent=1))
    return path


def test_squad_of_both_versions_is_read(tmp_path):
    first = write_squad(
        tmp_path,
        {"answers": [{"text": "Alan", "answer_start": 8}, {"text": "Alan.", "answer_start": 8}]},
        {"answers": [{"text": "Grace", "answer_start": 14}]},
        version="1.1",
    )
    samples, bad = text_set_from_path(first)
    assert not bad
    assert samples.texts["2"] == ("Who?", ASKED["context"])
    assert samples.answers == {"1": ("Alan", "Alan."), "2": ("Grace",)}
    assert samples.asks
    assert not samples.may_have_none
    assert samples.files[0].group == samples.files[1].group

    second = write_squad(
        tmp_path,
        {"answers": [{"text": "Emmy", "answer_start": 24}], "is_impossible": False},
        {"answers": [], "plausible_answers": [{"text": "Alan"}], "is_impossible": True},
        version="v2.0",
    )
    samples, bad = text_set_from_path(second)
    assert not bad
    assert samples.answers == {"1": ("Emmy",), "2": ()}
    assert samples.may_have_none

    write_json(tmp_path / "set.json", samples.to_dict(tmp_path))
    assert text_set_from_path(tmp_path / "set.json")[0] == samples


def test_questions_of_json_lines_are_those_of_squad(tmp_path):
    answers = {"text": ["Alan"], "answer_start": [8]}
    path = write(
        tmp_path, {**ASKED, "answers": answers}, {**ASKED, "answers": {"text": []}, "group": "a"}
    )
    samples, bad = text_set_from_path(path)
    assert not bad
    assert samples.answers == {"1": ("Alan",), "2": ()}
    assert samples.files[1].group == "a"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"question": " "}, "its question is empty"),
        ({"question": None}, 'it has a "context", but no "question"'),
        ({"context": None}, 'it has a "question", but no "context" or "sentence"'),
        ({"context": 3}, 'its "context" is not a string'),
        ({"answers": ["Emma"]}, 'its answer "Emma" is not in its context'),
        ({"answers": {"text": ["Alan"], "answer_start": [9]}}, "is not at 9 in its context"),
        ({"answers": {"text": ["Alan"], "answer_start": [-6]}}, "is not at -6 in its context"),
        ({"answers": {"text": ["Alan"], "answer_start": [800]}}, "is not at 800 in its context"),
        (
            {"answers": {"text": ["Alan"], "answer_start": ["8"]}},
            '"answer_start" is not an integer',
        ),
        ({"answers": {"text": ["Alan"], "answer_start": []}}, '"answers" are neither'),
        ({"answers": "Alan"}, '"answers" are neither'),
        ({"answers": [3]}, '"answers" are neither'),
        ({"answers": [{"text": ""}]}, "an answer is not a string"),
        ({"answers": ["Alan"], "is_impossible": True}, "impossible to answer, but has an answer"),
        ({"answers": [], "is_impossible": False}, "can be answered, but has no answer"),
        ({"answers": [], "is_impossible": "no"}, "neither true nor false"),
    ],
)
def test_questions_that_cannot_be_judged_are_named(tmp_path, changed, reason):
    _, bad = read_text_lines(write(tmp_path, {**ASKED, **changed}))
    assert reason in bad[0][1]


@pytest.mark.parametrize(
    "data",
    [
        [3],
        [{"title": "A"}],
        [{"paragraphs": [4]}],
        [{"paragraphs": [{"context": "A.", "qas": [5]}]}],
    ],
)
def test_broken_articles_of_squad_are_refused(tmp_path, data):
    (tmp_path / "squad.json").write_text(json.dumps({"data": data}))
    with pytest.raises(BadInputError, match="cannot be used"):
        text_set_from_path(tmp_path / "squad.json")


def test_a_question_without_answers_among_others_is_bad(tmp_path):
    _, bad = read_text_lines(write(tmp_path, {**ASKED, "answers": ["Alan"]}, ASKED))
    assert bad[0][1] == "no answers, although other lines have one"
