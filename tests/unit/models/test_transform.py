"""Transforms of torchvision, timm and transformers are translated to the last bit or refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from PIL import Image
from tests.fakes.odd_images import make_synthetic_image
from torchvision import models
from torchvision import transforms as v1
from torchvision.models import get_model_weights, list_models
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification

from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Resize
from optpipe.models.inputs.images import apply_transform
from optpipe.models.sources.libraries import _letterbox
from optpipe.models.sources.transform import (
    transform_from_processor,
    transform_from_timm,
    transform_from_torchvision,
)

PICTURE = make_synthetic_image(211, 300)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_every_classification_preset_of_torchvision_is_translated():
    import torchvision

    names = list_models(module=torchvision.models)
    presets = {
        repr(preset): preset
        for name in names
        for weights in get_model_weights(name)
        for preset in [weights.transforms()]
    }
    assert len(presets) > 20
    for preset in presets.values():
        transform = transform_from_torchvision(preset)
        assert transform.size == (preset.crop_size[0], preset.crop_size[0])


def test_version_one_compose_with_to_tensor_before_the_resize_is_exact_within_float_rounding():
    compose = v1.Compose(
        [v1.ToTensor(), v1.Resize(64, antialias=True), v1.CenterCrop(48), v1.Normalize(*IMAGENET)]
    )
    transform = transform_from_torchvision(compose)
    assert transform.geometry[0] == Resize((64,), kernel="float")
    assert np.allclose(
        apply_transform(transform, PICTURE), compose(Image.fromarray(PICTURE)).numpy(), atol=2e-6
    )


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([v2.RandomHorizontalFlip(), v2.ToImage()], "step 1, RandomHorizontalFlip"),
        ([v2.Resize(64), v2.CenterCrop(64)], "a result that is a Pillow image"),
        (
            [v1.ToTensor(), v1.Normalize(*IMAGENET), v1.CenterCrop(8)],
            "step 3, CenterCrop after Normalize",
        ),
        (
            [v2.Resize(64, interpolation=v2.InterpolationMode.NEAREST_EXACT), v2.ToImage()],
            "nearest-exact",
        ),
        ([v1.PILToTensor(), v1.Normalize(*IMAGENET)], "step 2, Normalize"),
        ([v1.ToTensor(), v2.ToDtype(torch.float16)], "to float16"),
        ([], "a result that is a Pillow image"),
    ],
)
def test_what_cannot_be_translated_is_named_with_its_step(stages, said):
    with pytest.raises(BadInputError, match=said):
        transform_from_torchvision(v2.Compose(stages) if stages else v1.Compose(stages))


def test_what_is_no_transform_is_refused():
    with pytest.raises(BadInputError, match="not an image transform"):
        transform_from_torchvision(3)
    with pytest.raises(BadInputError, match="OpticalFlow cannot be translated"):
        transform_from_torchvision(get_model_weights("raft_small").DEFAULT.transforms())
    with pytest.raises(BadInputError, match="not an image processor"):
        transform_from_processor(object())


@pytest.mark.parametrize(
    ("interpolation", "crop_mode"), [("bicubic", "center"), ("lanczos", "squash")]
)
def test_timms_configuration_gives_timms_picture(interpolation, crop_mode):
    data = pytest.importorskip("timm.data")
    config = {
        "input_size": (3, 96, 96),
        "interpolation": interpolation,
        "crop_pct": 0.9,
        "crop_mode": crop_mode,
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
    }
    expected = data.create_transform(**config)(Image.fromarray(PICTURE)).numpy()
    assert np.array_equal(apply_transform(transform_from_timm(config), PICTURE), expected)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"crop_mode": "border"}, "crop_mode 'border'"),
        ({"interpolation": "random"}, "interpolation 'random'"),
        ({"input_size": (3, 96, 64)}, "input_size 96×64"),
        ({"input_size": (4, 96, 96)}, "4 channels"),
        ({"crop_border_pixels": 3}, "crop_border_pixels"),
    ],
)
def test_timm_settings_without_equivalent_are_named(config, said):
    with pytest.raises(BadInputError, match=said):
        transform_from_timm(config)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "Pil"])
@pytest.mark.parametrize("family", ["ViT", "CLIP", "ConvNext", "Beit", "DeiT"])
def test_processors_of_transformers_give_the_same_picture(family, suffix):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{family}ImageProcessor{suffix}")()
    transform = transform_from_processor(processor)
    expected = processor(Image.fromarray(PICTURE), return_tensors="np")["pixel_values"][0]
    assert transform.decode.exif
    assert np.allclose(apply_transform(transform, PICTURE), expected, atol=2e-6)


def test_processor_settings_without_equivalent_are_named():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(BadInputError, match="do_pad"):
        transform_from_processor(transformers.DetrImageProcessor())
    with pytest.raises(BadInputError, match="size"):
        transform_from_processor(
            transformers.ViTImageProcessor(size={"shortest_edge": 64, "longest_edge": 99})
        )


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fcn_resnet50", "ssd300_vgg16"])
def test_a_preset_without_a_size_is_letterboxed_whole(name: str) -> None:
    preset = transform_from_torchvision(models.get_model_weights(name).DEFAULT.transforms())
    assert preset.size is None
    found = _letterbox(preset, 320, 320)
    assert found.size == (320, 320)
    resize, crop = found.geometry
    assert resize.fit == "long"  # type: ignore[union-attr]
    assert crop == CenterCrop(320, 320)
    assert [step for step in found.steps if step not in found.geometry] == [
        step for step in preset.steps if step not in preset.geometry
    ]


sides = st.integers(1, 90)
interpolations = st.sampled_from(
    [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.NEAREST]
)


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
        st.builds(
            lambda h, w, how: v2.Resize((h, w), how),
            st.integers(4, 60),
            st.integers(4, 60),
            interpolations,
        ),
        st.builds(
            lambda size, how: v2.Resize(size, how, max_size=size + 9),
            st.integers(4, 60),
            interpolations,
        ),
    )
    crop = st.builds(lambda h, w: v2.CenterCrop((h, w)), st.integers(1, 70), st.integers(1, 70))
    geometry = draw(st.lists(st.one_of(resize, crop), max_size=3))
    tensor_first = draw(st.booleans())
    to_float = [v2.ToDtype(torch.float32, scale=True)]
    levels = draw(
        st.sampled_from([[], to_float, [*to_float, v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])]])
    )
    stages = (
        [v2.PILToTensor(), *geometry, *levels]
        if tensor_first
        else [*geometry, v2.PILToTensor(), *levels]
    )
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
