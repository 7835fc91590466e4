"""Texts that are longer than a model's input: refused, or truncated on request."""

import json
import re

import pytest

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.task_data import fit_texts, resolve_texts
from optpipe.models.inputs.text_set import text_set_from_path


def make_card(task=Task.TEXT_CLASSIFICATION, longest=16):
    inputs = tuple(InputSpec(name, "int64", (1, 2), (8, 4), (64, 8)) for name in ("input_ids", "attention_mask"))
    return ModelCard("reviews", "hf:reviews", task, inputs, tokenization=Tokenization("0" * 64, longest))


@pytest.fixture
def source(tmp_path):
    """Texts of 3, 9, 12 and 8 words; a word is a token."""
    lines = [json.dumps({"text": " ".join(["word"] * count)}) + "\n" for count in (3, 9, 12, 8)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    return tmp_path / "texts.jsonl"


def make_tokenizer(own=None):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if own is not None:
        made.enable_truncation(own)
    return made.to_str()


def test_long_texts_are_refused_with_the_longest_line_and_both_ways_out(source):
    pytest.importorskip("tokenizers")
    found = text_set_from_path(source)[0]
    message = (
        "texts.jsonl, line 3: 12 tokens exceed the maximum input length of 8 (2 of 4 texts are too long)\n"
        "use --truncate to cut them, or build with --shape input_ids=1x2:8x4:64x12 --shape attention_mask=1x2:8x4:64x12"
    )
    with pytest.raises(BadInputError, match=re.escape(message)):
        fit_texts(found, make_tokenizer(), make_card(), truncate=False)
    with pytest.raises(BadInputError, match=r"use --truncate to cut them$"):  # the model itself takes no more
        fit_texts(found, make_tokenizer(), make_card(longest=8), truncate=False)


def test_texts_that_the_tokenizer_cuts_itself_are_not_too_long(source):
    pytest.importorskip("tokenizers")
    found = fit_texts(text_set_from_path(source)[0], make_tokenizer(own=8), make_card(), truncate=False)
    assert not found.truncated


def test_truncation_is_kept_in_the_set_that_a_build_calibrates_on(source, tmp_path):
    pytest.importorskip("tokenizers")
    place = resolve_texts(source, make_card(), make_tokenizer(), tmp_path / "sets", truncate=True)
    assert json.loads(place.read_text())["truncate"] is True
    again, _ = text_set_from_path(place)
    assert fit_texts(again, make_tokenizer(), make_card(), truncate=False).truncated == 2
    assert again.texts == text_set_from_path(source)[0].texts


def test_a_file_without_long_texts_and_questions_are_taken_as_they_are(source, tmp_path):
    pytest.importorskip("tokenizers")
    card, reader = make_card(), make_card(Task.QUESTION_ANSWERING)
    source.write_text('{"text": "word word"}\n')
    assert resolve_texts(source, card, make_tokenizer(), tmp_path / "sets", truncate=True) == source
    assert resolve_texts(source, reader, make_tokenizer(), tmp_path / "sets", truncate=False) == source
    assert not (tmp_path / "sets").exists()
