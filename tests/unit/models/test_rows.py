"""Rows, batches and sequences; texts that are too long; drawn inputs."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.fakes.odd_images import make_synthetic_image

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.errors import BadInputError
from optpipe.models.inputs.rows import (
    batch_from_rows,
    compute_padding,
    fill_sequences,
    lay_out,
    read_length,
    split_batches,
    to_rows,
)
from optpipe.models.inputs.sample_set import format_unreadable
from optpipe.models.inputs.samples import SMALLEST_VOCABULARY, make_synthetic_tensor
from optpipe.models.inputs.task_data import fit_texts, resolve_texts
from optpipe.models.inputs.text_set import text_set_from_path

CARD = ModelCard(
    "voice", "voice.onnx", Task.OTHER,
    (
        InputSpec("x", "float32", (1, 3), (2, 3), (4, 3)),
        InputSpec("state", "float32", (2, 1, 5), (2, 2, 5), (2, 4, 5), batch=1),
        InputSpec("rate", "int64", (), (), ()),
    ),
)  # fmt: skip


@given(hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=4)), st.data())
def test_there_and_back(rows, data) -> None:
    axis = data.draw(st.integers(0, rows.ndim - 1))
    batch = lay_out(rows, axis)
    assert batch.shape[axis] == len(rows)
    assert np.array_equal(to_rows(batch, axis), rows)


def test_a_batch_has_every_input_in_its_own_layout() -> None:
    rows = {
        "x": np.ones((5, 3)),
        "state": np.arange(50).reshape(5, 2, 5),
        "rate": np.full(5, 16000),
    }
    found = list(split_batches(CARD, rows))
    assert [count for _, count in found] == [4, 1]
    assert {name: value.shape for name, value in found[0][0].items()} == {
        "x": (4, 3),
        "state": (2, 4, 5),
        "rate": (),
    }
    assert np.array_equal(found[1][0]["state"][:, 0], rows["state"][4])
    assert batch_from_rows(CARD, rows)["rate"] == 16000


def test_without_a_batch_axis_every_call_is_one_sample() -> None:
    card = ModelCard(
        "tone", "tone.onnx", Task.OTHER, (InputSpec("x", "float32", (7,), (7,), (7,), batch=None),)
    )
    assert card.batch_range == (1, 1, 1)
    assert [batch["x"].shape for batch, _ in split_batches(card, {"x": np.ones((3, 7))})] == [
        (7,)
    ] * 3


IDS = InputSpec("input_ids", "int64", (1, 8), (8, 128), (64, 512))
MASK = replace(IDS, name="attention_mask")
CARD_SEQUENCES = ModelCard(
    "bert",
    "hf:bert",
    Task.TEXT_CLASSIFICATION,
    (IDS, MASK),
    tokenization=Tokenization("0" * 64, 512),
)


def make_rows(lengths: list[int]) -> dict[str, np.ndarray]:
    """Padded rows whose tokens are all different, so that a token says where it comes from."""
    width = max(lengths)
    ids = np.arange(1, 1 + len(lengths) * width).reshape(len(lengths), width)
    mask = (np.arange(width)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 100), st.integers(1, 80)
)
def test_filled_sequences_are_real_tokens_in_their_order_without_padding(lengths, length, most):
    rows = make_rows(lengths)
    filled = fill_sequences(CARD_SEQUENCES, rows, length, most)
    assert (
        filled["input_ids"].shape
        == filled["attention_mask"].shape
        == (min(most, max(8, 4096 // length)), length)
    )
    assert read_length(CARD_SEQUENCES, filled) == length
    assert compute_padding(filled) == 0
    order = rows["input_ids"][rows["attention_mask"] == 1]
    place = {token: at for at, token in enumerate(order)}
    for row in filled["input_ids"]:
        at = [place[token] for token in row]
        assert at == [(at[0] + step) % len(order) for step in range(length)]


def test_the_length_is_the_one_open_axis_or_a_text_models_own():
    assert CARD_SEQUENCES.length_axes == {"input_ids": 1, "attention_mask": 1}
    assert CARD_SEQUENCES.length_range == (8, 512)
    fixed = [replace(each, min=(1, 128), opt=(8, 128), max=(64, 128)) for each in (IDS, MASK)]
    assert replace(CARD_SEQUENCES, inputs=tuple(fixed)).length_range == (128, 128)
    table = InputSpec("features", "float32", (1, 30), (8, 30), (64, 30))
    image = InputSpec("image", "float32", (1, 3, 32, 32), (8, 3, 64, 64), (64, 3, 128, 128))
    speech = InputSpec("frames", "float32", (1, 80, 100), (8, 80, 500), (64, 80, 3000))
    known = {"features": {}, "image": {}, "frames": {"frames": 2}}
    for spec in (table, image, speech):
        assert ModelCard("m", "m", Task.OTHER, (spec,)).length_axes == known[spec.name]


def test_the_tokens_axis_is_found_where_the_batch_is_not_first():
    spec = InputSpec("input_ids", "int64", (8, 1), (128, 8), (512, 64), batch=1)
    card = ModelCard("m", "m", Task.OTHER, (spec,))
    filled = fill_sequences(card, {"input_ids": np.arange(20).reshape(2, 10)}, 4, 3)
    assert filled["input_ids"].tolist()[:2] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def make_card(task=Task.TEXT_CLASSIFICATION, longest=16):
    inputs = tuple(
        InputSpec(name, "int64", (1, 2), (8, 4), (64, 8))
        for name in ("input_ids", "attention_mask")
    )
    return ModelCard(
        "reviews", "hf:reviews", task, inputs, tokenization=Tokenization("0" * 64, longest)
    )


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
    with pytest.raises(
        BadInputError, match=r"use --truncate to cut them$"
    ):  # the model itself takes no more
        fit_texts(found, make_tokenizer(), make_card(longest=8), truncate=False)


def test_truncation_is_kept_in_the_set_that_a_build_calibrates_on(source, tmp_path):
    pytest.importorskip("tokenizers")
    place = resolve_texts(source, make_card(), make_tokenizer(), tmp_path / "sets", truncate=True)
    assert json.loads(place.read_text())["truncate"] is True
    again, _ = text_set_from_path(place)
    assert fit_texts(again, make_tokenizer(), make_card(), truncate=False).truncated == 2
    assert again.texts == text_set_from_path(source)[0].texts


def test_a_set_whose_lines_have_changed_is_refused(source, tmp_path):
    pytest.importorskip("tokenizers")
    place = resolve_texts(source, make_card(), make_tokenizer(), tmp_path / "sets", truncate=True)
    source.write_text(source.read_text().replace("word", "other"))
    with pytest.raises(BadInputError, match="has changed; draw the set again"):
        text_set_from_path(place)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xff\xfe{}", "1 of 1 lines cannot be used"),
        (b"text,label\nfine,positive\n", "2 of 2 lines cannot be used"),
        (
            b'{"text": "a", "label": [1]}\n{"text": " "}\n[]\n{"text": 3}\n'
            + b'{"text": "a"}\n' * 36,
            "4 of 40 lines",
        ),
    ],
)
def test_files_that_are_no_json_lines(source, content, said):
    source.write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        text_set_from_path(source)


def test_a_few_bad_lines_are_named(source):
    source.write_text(source.read_text() * 10 + '{"text": 3}\nno JSON\n')
    found, bad = text_set_from_path(source)
    assert (len(found.files), [str(path) for path, _ in bad]) == (40, ["line 41", "line 42"])
    assert 'line 41 (its "text" is not a string), line 42 (invalid JSON' in format_unreadable(
        bad, 3
    )


def test_a_seed_gives_the_same_tensor_and_another_seed_another():
    first, again, other = (make_synthetic_tensor((2, 3, 32, 32), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_drawn_tensors_are_like_real_ones():
    values = make_synthetic_tensor((200, 3, 64, 64))
    assert abs(values.mean()) < 0.1
    assert abs(values.std() - 1) < 0.05
    assert 0.4 < values.mean((1, 2, 3)).std() < 0.6  # images differ in brightness
    power = np.abs(np.fft.rfft2(values[0, 0])) ** 2
    assert power[1:5, 1:5].mean() > 20 * power[20:30, 20:30].mean()
    assert make_synthetic_tensor((2, 16), np.int64).max() < SMALLEST_VOCABULARY
    assert make_synthetic_tensor((2, 16), np.int8).min() >= 0
    assert (make_synthetic_tensor((0, 3, 8, 8)).shape, make_synthetic_image(1, 1).shape) == (
        (0, 3, 8, 8),
        (1, 1, 3),
    )
