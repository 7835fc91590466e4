"""A tokenizer is a user's file, and its rules may fail on a text."""

import json

import pytest

from optpipe.core.errors import BadInputError
from optpipe.models.inputs.tokens import find_long_texts, tokenize

BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}


@pytest.fixture
def content():
    """A tokenizer of one word whose normalizer is a regular expression that gives up on a long run of one letter."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": BACKTRACKING,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
        }
    )


def test_a_rule_that_gives_up_is_refused_in_two_lines(content, tmp_path):
    text = "a" * 28 + "!"
    (tmp_path / "tokenizer.json").write_text(content)
    for read in (
        lambda: tokenize([text], tmp_path / "tokenizer.json", 8),
        lambda: find_long_texts({"first": text}, content, 8),
    ):
        with pytest.raises(BadInputError, match="the tokenizer fails on a text"):
            read()
