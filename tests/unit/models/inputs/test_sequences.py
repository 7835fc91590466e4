"""Sequences of a stated length."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.models.inputs.rows import compute_padding, fill_sequences, read_length

IDS = InputSpec("input_ids", "int64", (1, 8), (8, 128), (64, 512))
MASK = replace(IDS, name="attention_mask")
CARD = ModelCard("bert", "hf:bert", Task.TEXT_CLASSIFICATION, (IDS, MASK), tokenization=Tokenization("0" * 64, 512))


def make_rows(lengths: list[int]) -> dict[str, np.ndarray]:
    """Padded rows whose tokens are all different, so that a token says where it comes from."""
    width = max(lengths)
    ids = np.arange(1, 1 + len(lengths) * width).reshape(len(lengths), width)
    mask = (np.arange(width)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 100), st.integers(1, 80))
def test_filled_sequences_are_real_tokens_in_their_order_without_padding(lengths, length, most):
    rows = make_rows(lengths)
    filled = fill_sequences(CARD, rows, length, most)
    assert filled["input_ids"].shape == filled["attention_mask"].shape == (min(most, max(8, 4096 // length)), length)
    assert read_length(CARD, filled) == length
    assert compute_padding(filled) == 0
    order = rows["input_ids"][rows["attention_mask"] == 1]
    place = {token: at for at, token in enumerate(order)}
    for row in filled["input_ids"]:
        at = [place[token] for token in row]
        assert at == [(at[0] + step) % len(order) for step in range(length)]


def test_padding_is_what_the_mask_leaves_out():
    assert compute_padding(make_rows([2, 4])) == 0.25
    assert compute_padding({"input_ids": np.ones((2, 4))}) == 0


def test_the_length_is_the_one_open_axis_or_a_text_models_own():
    assert CARD.length_axes == {"input_ids": 1, "attention_mask": 1}
    assert CARD.length_range == (8, 512)
    fixed = [replace(each, min=(1, 128), opt=(8, 128), max=(64, 128)) for each in (IDS, MASK)]
    assert replace(CARD, inputs=tuple(fixed)).length_range == (128, 128)
    table = InputSpec("features", "float32", (1, 30), (8, 30), (64, 30))
    image = InputSpec("image", "float32", (1, 3, 32, 32), (8, 3, 64, 64), (64, 3, 128, 128))
    speech = InputSpec("frames", "float32", (1, 80, 100), (8, 80, 500), (64, 80, 3000))
    known = {"features": {}, "image": {}, "frames": {"frames": 2}}
    for spec in (table, image, speech):
        assert ModelCard("m", "m", Task.OTHER, (spec,)).length_axes == known[spec.name]


def test_inputs_of_two_lengths_have_none():
    other = replace(IDS, name="question_ids", max=(64, 64), opt=(8, 32))
    assert ModelCard("m", "m", Task.OTHER, (IDS, other)).length_range is None


def test_the_tokens_axis_is_found_where_the_batch_is_not_first():
    spec = InputSpec("input_ids", "int64", (8, 1), (128, 8), (512, 64), batch=1)
    card = ModelCard("m", "m", Task.OTHER, (spec,))
    filled = fill_sequences(card, {"input_ids": np.arange(20).reshape(2, 10)}, 4, 3)
    assert filled["input_ids"].tolist()[:2] == [[0, 1, 2, 3], [10, 11, 12, 13]]
