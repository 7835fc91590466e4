"""Plans as command lines, and lists of choices."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core import params, wording
from optpipe.core.errors import BadInputError
from optpipe.core.params import (
    Param,
    choices_from_text,
    list_fields,
    list_words,
    make_call,
    settings_from_texts,
)
from optpipe.core.quantity import Dimension, drop_from_text, read_quantity, share_from_text
from optpipe.core.wording import for_workspace


@dataclass(frozen=True)
class Record:
    sizes: Annotated[tuple[int, ...], Param("Sizes.", parse=params.sizes_from_text)] = (1,)
    names: Annotated[tuple[str, ...], Param("Names.", flag="name")] = ()
    fast: Annotated[bool, Param("Fast.")] = True
    seed: Annotated[int, Param("Seed.", minimum=0, setting=True)] = 0
    deep: Annotated[bool, Param("Deep.", setting=True)] = False
    untyped: int = 3


def test_only_what_differs_from_the_defaults_is_on_a_command_line():
    assert list(list_words(Record())) == []
    words = ["--sizes", "1,8", "--name", "a", "--name", "b c", "--no-fast", "--set", "seed=2"]
    assert list(list_words(Record((1, 8), ("a", "b c"), fast=False, seed=2))) == words
    assert shlex.split(make_call("store show", Record(seed=2), json=True)) == [
        "optpipe",
        "store",
        "show",
        "--set",
        "seed=2",
        "--json",
    ]


SAYS = {
    "seed": "seed",
    "seed=x": "a whole number",
    "seed=-1": "at least 0",
    "fast=true": "seed",
    "deep=x": "true or",
}


@pytest.mark.parametrize(("text", "says"), SAYS.items())
def test_a_setting_that_cannot_be_meant_is_refused(text, says):
    fields = [each for each in list_fields(Record) if each.param.setting]
    assert settings_from_texts(["seed=7"], fields) == {"seed": 7}
    with pytest.raises(BadInputError, match=says):
        settings_from_texts([text], fields)


def test_a_suggested_command_names_the_workspace_at_hand(monkeypatch):
    monkeypatch.setenv("OPTPIPE_WORKSPACE", "usual")
    recorded = "optpipe build 'a b' --workspace /old --json"
    try:
        wording.use_workspace(Path("usual"))
        assert for_workspace(recorded) == "optpipe build 'a b' --json"
        wording.use_workspace(Path("my work"))
        assert for_workspace(recorded) == "optpipe build 'a b' --json --workspace 'my work'"
    finally:
        wording.use_workspace(None)


def test_a_number_without_a_unit_is_refused_with_what_it_may_mean():
    assert share_from_text("2.5 %", "--max-cv") == 0.025
    assert drop_from_text("1%", "--drop") == drop_from_text("1 pt", "--drop") == 1.0
    assert read_quantity("2GiB", "--size", Dimension.SIZE) == (2.0**31, Dimension.SIZE)
    with pytest.raises(BadInputError, match="or 50%"):
        share_from_text("0.5", "--max-cv")
    with pytest.raises(BadInputError, match="or 50pt"):
        drop_from_text("0.5", "--drop")
    with pytest.raises(BadInputError, match="0 to 100 percentage points"):
        drop_from_text("1 AP", "--drop")


CHOICES = ("fp32", "fp16", "int8")


@given(st.lists(st.sampled_from(CHOICES), min_size=1))
def test_a_list_reads_back_in_order_without_repetitions(words):
    assert choices_from_text(" , ".join(words).upper(), CHOICES, "--precision") == tuple(
        dict.fromkeys(words)
    )


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
