"""Model cards and the shapes of their inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.core.card import (
    InputSpec,
    ModelCard,
    Task,
    TensorSpec,
    Tokenization,
    batch_range_from_text,
    input_from_dict,
    shapes_from_text,
)
from optpipe.core.errors import BadInputError

NAMES = ("input_ids", "attention_mask")
TEXTS = ModelCard(
    "texts", "hf:texts", Task.EMBEDDING, tuple(InputSpec(name, "int64", (1, 8), (8, 32), (64, 32)) for name in NAMES),
    tokenization=Tokenization("0" * 64, 64),
)  # fmt: skip
WIDER, OTHER = ((1, 8), (8, 64), (64, 64)), ((1, 8), (8, 16), (64, 16))


def test_images_are_told_by_their_shape_where_no_preprocessing_says_so():
    shapes = [(4, 3, 32, 32), (4, 32, 32, 3), (4, 1, 8, 8), (4, 40), (4, 8, 8), (4, 8, 16, 16)]
    cards = [
        ModelCard("m", "m.onnx", Task.OTHER, (InputSpec("x", "float32", *[each] * 3),))
        for each in shapes
    ]
    assert [each.takes_images for each in cards] == [True, True, True, False, False, False]
    assert not TEXTS.takes_images


@pytest.mark.parametrize("given", [NAMES[:1], NAMES[1:], NAMES])
def test_the_shape_of_one_input_is_that_of_all_inputs_of_a_text_model(given):
    made = TEXTS.with_profile(None, dict.fromkeys(given, WIDER))
    assert {(each.min, each.opt, each.max) for each in made.inputs} == {WIDER}
    assert made.length_range == (8, 64)


def test_two_shapes_of_a_text_model_are_refused():
    with pytest.raises(
        BadInputError,
        match="attention_mask has 1x8:8x16:64x16\nall inputs of a text model have one shape",
    ):
        TEXTS.with_profile(None, dict(zip(NAMES, (WIDER, OTHER), strict=True)))


sizes = st.lists(st.integers(1, 1024), min_size=3, max_size=3).map(sorted)


@given(st.lists(sizes, min_size=1, max_size=5))
def test_profiles_survive_their_text_and_their_json(dimensions: list[list[int]]) -> None:
    low, usual, high = (tuple(each) for each in zip(*dimensions, strict=True))
    spec = InputSpec("x", "float32", low, usual, high)
    assert shapes_from_text(f"x={spec.format_profile()}") == ("x", (low, usual, high))
    assert input_from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("text", ["0", "0:1:2", "4:2:8", "1:8", "a", "", "-1:1:2", "1:2:3:4"])
def test_batches_that_cannot_be(text: str) -> None:
    with pytest.raises(BadInputError, match="--batch"):
        batch_range_from_text(text)


@pytest.mark.parametrize("text", ["x", "x=", "x=1xa", "=1x2", "x=1:2"])
def test_shapes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BadInputError, match="--shape"):
        shapes_from_text(text)


def test_profiles_that_cannot_be() -> None:
    with pytest.raises(BadInputError, match="min <= opt <= max"):
        InputSpec("x", "float32", (2, 3), (1, 3), (4, 3))
    with pytest.raises(BadInputError, match="different ranks"):
        InputSpec("x", "float32", (2, 3), (2, 3, 3), (4, 3))


def test_open_dimensions_have_names() -> None:
    assert InputSpec("x", "int64", (1, 8), (4, 128), (8, 512)).tensor.shape == ("batch", "dim1")
    assert InputSpec("x", "float32", (1, 3), (1, 3), (1, 3)).tensor.shape == (1, 3)


@pytest.mark.parametrize(
    ("said", "axis", "of"),
    [({}, 0, (1, 4, 9)), ({"batch": 1}, 1, (2, 3, 5)), ({"batch": "none"}, None, None)],
)
def test_the_batch_is_the_axis_that_it_is_said_to_be(said, axis, of) -> None:
    spec = input_from_dict(
        {"name": "h", "min": [1, 1, 8], "opt": [4, 4, 8], "max": [9, 9, 8], **said}
    )
    resized = spec.with_batch(*of) if of else spec.with_batch(2, 3, 4)
    assert spec.batch == axis
    assert resized.batch_range == of
    assert input_from_dict(spec.to_dict()) == spec
    assert [size for index, size in enumerate(resized.opt) if index != axis] == list(spec.sample)


def test_a_single_value_has_no_batch() -> None:
    spec = input_from_dict({"name": "rate", "dtype": "int64", "min": [], "opt": [], "max": []})
    assert (spec.batch, spec.batch_range, spec.sample, spec.tensor.shape) == (None, None, (), ())


def test_sizes_that_no_runtime_counts() -> None:
    with pytest.raises(BadInputError, match="no dimension may exceed 2147483647"):
        InputSpec("x", "float32", (2**40,), (2**40,), (2**40,))


@pytest.mark.parametrize(("shape", "batch", "classes"), [
    (("n", 10), 0, 10), ((1, 10, 1, 1), 0, 10), (("n", 1, 10), 0, 10), ((10, "n"), 1, 10), (("n",), 0, 1),
    (("n", "c"), 0, None), (("n", 10, 7, 7), 0, None),
])  # fmt: skip
def test_classes_lie_along_one_axis_wherever_it_is(shape, batch, classes) -> None:
    assert TensorSpec("scores", "float32", shape, batch=batch).classes == classes
