"""A model card under other shapes."""

import pytest

from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.errors import BadInputError

NAMES = ("input_ids", "attention_mask")
TEXTS = ModelCard(
    "texts", "hf:texts", Task.EMBEDDING, tuple(InputSpec(name, "int64", (1, 8), (8, 32), (64, 32)) for name in NAMES),
    tokenization=Tokenization("0" * 64, 64),
)  # fmt: skip
WIDER, OTHER = ((1, 8), (8, 64), (64, 64)), ((1, 8), (8, 16), (64, 16))


def test_images_are_told_by_their_shape_where_no_preprocessing_says_so():
    shapes = [(4, 3, 32, 32), (4, 32, 32, 3), (4, 1, 8, 8), (4, 40), (4, 8, 8), (4, 8, 16, 16)]
    cards = [ModelCard("m", "m.onnx", Task.OTHER, (InputSpec("x", "float32", *[each] * 3),)) for each in shapes]
    assert [each.takes_images for each in cards] == [True, True, True, False, False, False]
    assert not TEXTS.takes_images


@pytest.mark.parametrize("given", [NAMES[:1], NAMES[1:], NAMES])
def test_the_shape_of_one_input_is_that_of_all_inputs_of_a_text_model(given):
    made = TEXTS.with_profile(None, dict.fromkeys(given, WIDER))
    assert {(each.min, each.opt, each.max) for each in made.inputs} == {WIDER}
    assert made.length_range == (8, 64)


def test_two_shapes_of_a_text_model_are_refused():
    with pytest.raises(
        BadInputError, match="attention_mask has 1x8:8x16:64x16\nall inputs of a text model have one shape"
    ):
        TEXTS.with_profile(None, dict(zip(NAMES, (WIDER, OTHER), strict=True)))
