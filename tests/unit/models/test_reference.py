"""The CPU reference is the model's own transform, to the last bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification

from optpipe.models.inputs.images import apply_transform
from optpipe.models.inputs.synthetic import make_synthetic_image
from optpipe.models.sources.transform import transform_from_torchvision

sides = st.integers(1, 90)
interpolations = st.sampled_from([InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.NEAREST])


@st.composite
def pictures(draw):
    return make_synthetic_image(draw(sides), draw(sides), seed=draw(st.integers(0, 9)))


@given(pictures(), st.integers(8, 70), st.integers(1, 70), interpolations)
def test_equal_to_torchvisions_preset_on_a_pillow_picture(picture, size, crop, interpolation):
    preset = ImageClassification(crop_size=crop, resize_size=size, interpolation=interpolation)
    expected = preset(Image.fromarray(picture)).numpy()
    assert np.array_equal(apply_transform(transform_from_torchvision(preset), picture), expected)


@given(pictures(), st.data())
def test_equal_to_any_compose_of_the_supported_steps(picture, data):
    draw = data.draw
    resize = st.one_of(
        st.builds(lambda size, how: v2.Resize(size, how), st.integers(4, 60), interpolations),
        st.builds(lambda h, w, how: v2.Resize((h, w), how), st.integers(4, 60), st.integers(4, 60), interpolations),
        st.builds(lambda size, how: v2.Resize(size, how, max_size=size + 9), st.integers(4, 60), interpolations),
    )
    crop = st.builds(lambda h, w: v2.CenterCrop((h, w)), st.integers(1, 70), st.integers(1, 70))
    geometry = draw(st.lists(st.one_of(resize, crop), max_size=3))
    tensor_first = draw(st.booleans())
    to_float = [v2.ToDtype(torch.float32, scale=True)]
    levels = draw(st.sampled_from([[], to_float, [*to_float, v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])]]))
    stages = [v2.PILToTensor(), *geometry, *levels] if tensor_first else [*geometry, v2.PILToTensor(), *levels]
    compose = v2.Compose(stages)
    try:
        expected = compose(Image.fromarray(picture)).numpy()
    except (ValueError, RuntimeError):
        reject()  # a side that max_size rounds to nothing, which torchvision refuses; `resized` is tested with those
    result = apply_transform(transform_from_torchvision(compose), picture)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    # ToDtype multiplies by 1/255 where the preset divides by 255: one unit in the last place.
    assert np.allclose(result, expected, rtol=0, atol=1e-6 if levels else 0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (700, 2), (427, 640)])
def test_equal_to_the_preset_at_the_edges(shape):
    preset = ImageClassification(crop_size=224, resize_size=232)
    picture = make_synthetic_image(*shape)
    expected = preset(Image.fromarray(picture)).numpy()
    assert np.array_equal(apply_transform(transform_from_torchvision(preset), picture), expected)
