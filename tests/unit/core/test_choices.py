"""Lists of known words: what is read, what is refused, what the shell completes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.errors import BadInputError
from optpipe.core.plan import choices_from_text, complete_choice

CHOICES = ("fp32", "fp16", "int8")


@given(st.lists(st.sampled_from(CHOICES), min_size=1))
def test_a_list_reads_back_in_order_without_repetitions(words):
    assert choices_from_text(" , ".join(words).upper(), CHOICES, "--precision") == tuple(dict.fromkeys(words))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp61", r"--precision fp61: did you mean fp16\? choose from fp32, fp16, int8"),
        ("float", "--precision float: choose from fp32"),
        (" ,", "--precision is empty; choose from fp32"),
    ],
)
def test_another_word_is_refused_with_the_nearest_and_the_list(text, message):
    with pytest.raises(BadInputError, match=message):
        choices_from_text(text, CHOICES, "--precision")


def test_the_shell_completes_the_last_word():
    assert complete_choice("", CHOICES) == list(CHOICES)
    assert complete_choice("fp16,f", CHOICES) == ["fp16,fp32"]
    assert complete_choice("fp16,x", CHOICES) == []
