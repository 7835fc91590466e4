"""Transforms as tables, and where their steps put a picture."""

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torchvision.transforms.functional import _compute_resized_output_size

from optpipe.core.errors import BadInputError
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
    compute_crop_start,
    compute_geometry,
    compute_resized_sides,
)
from optpipe.models.inputs.images import apply_transform

NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PRESET = Transform((Decode(), Resize((232,)), CenterCrop(224, 224), Rescale(), NORMALIZE, Pack()))

sides = st.integers(1, 5000)
resizes = st.one_of(
    st.builds(Resize, st.tuples(st.integers(1, 600)), st.sampled_from(["short", "long"])),
    st.builds(Resize, st.tuples(st.integers(1, 600), st.integers(1, 600)), st.just("exact")),
)


@given(
    st.builds(
        lambda geometry, rescale, pack: Transform((Decode(), *geometry, *rescale, pack)),
        st.lists(
            st.one_of(resizes, st.builds(CenterCrop, st.integers(1, 600), st.integers(1, 600))),
            max_size=4,
        ),
        st.lists(st.builds(Rescale, st.floats(0.1, 300)), max_size=1),
        st.builds(Pack, st.sampled_from(["CHW", "HWC"]), st.sampled_from(["float32", "float16"])),
    )
)
def test_a_transform_survives_plain_tables(transform):
    read = Transform.from_dict(json.loads(json.dumps(transform.to_dict())))
    assert read == transform
    assert read.hash == transform.hash


def test_the_hash_is_that_of_the_values():
    assert PRESET.hash == "9489f40509b7e6a6f541e9f9a0c03bff15474c866c0a6b39a9088caf0c46a3cc"
    assert Transform((Decode(exif=True), *PRESET.steps[1:])).hash != PRESET.hash


def test_fields_left_out_are_torchvisions_defaults():
    written = {
        "steps": [
            {"step": "decode"},
            {"step": "resize", "size": [232]},
            {"step": "center_crop", "height": 224, "width": 224},
            {"step": "rescale"},
            {"step": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
            {"step": "pack"},
        ]
    }
    assert Transform.from_dict(written) == PRESET
    assert (PRESET.size, PRESET.channels) == ((224, 224), 3)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            [{"step": "decode"}, {"step": "warp"}],
            r"steps: invalid value 'warp' - at `\$\[1\].step`",
        ),
        (
            [{"step": "decode"}, {"step": "resize"}, {"step": "pack"}],
            "missing required field `size`",
        ),
        (
            [{"step": "decode"}, {"step": "resize", "size": [0]}, {"step": "pack"}],
            "1 positive size",
        ),
        (
            [{"step": "decode"}, {"step": "resize", "size": [2, 3]}, {"step": "pack"}],
            "requires 1 positive size",
        ),
        (
            [{"step": "decode"}, {"step": "rescale", "divisor": 0}, {"step": "pack"}],
            "must be positive",
        ),
        (
            [
                {"step": "decode"},
                {"step": "normalize", "mean": [0.5], "std": [0]},
                {"step": "pack"},
            ],
            "positive stds",
        ),
        (
            [
                {"step": "decode"},
                {"step": "normalize", "mean": [0.5, 0.5], "std": [1, 1]},
                {"step": "pack"},
            ],
            "1 or 3",
        ),
        ([{"step": "decode"}], "in this order; got decode"),
        ([{"step": "pack"}, {"step": "decode"}], "in this order"),
        (
            [{"step": "decode"}, {"step": "rescale"}, {"step": "pack", "dtype": "uint8"}],
            "uint8 cannot hold",
        ),
        ([], "got no step"),
        (None, "single key 'steps'"),
    ],
)
def test_what_is_wrong_is_named_with_its_step(steps, said):
    with pytest.raises(BadInputError, match=said):
        Transform.from_dict({"stages": []} if steps is None else {"steps": steps})


@given(resizes, sides, sides)
def test_resizing_keeps_the_wanted_side_and_the_orientation(resize, height, width):
    short, long = sorted((height, width))
    if resize.fit == "long" and resize.size[0] * short < long:
        assert (
            min(compute_resized_sides(resize, height, width)) == 1
        )  # a long strip stays one pixel high
    new_height, new_width = compute_resized_sides(resize, height, width)
    if resize.fit == "exact":
        assert (new_height, new_width) == resize.size
    else:
        assert resize.size[0] == (min if resize.fit == "short" else max)(new_height, new_width)
        assert compute_resized_sides(resize, width, height) == (new_width, new_height)


@given(resizes.filter(lambda resize: resize.fit == "short"), sides, sides)
def test_sides_are_torchvisions(resize, height, width):
    expected = _compute_resized_output_size((height, width), [resize.size[0]])
    assert compute_resized_sides(resize, height, width) == tuple(expected)


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_crop_lies_in_the_middle(length, wanted):
    for rounding in ("half-even", "floor"):
        start = compute_crop_start(length, wanted, rounding)
        assert abs((length - wanted) - 2 * start) <= 1


def test_odd_margins_follow_the_models_own_rounding():
    assert [compute_crop_start(length, 224, "half-even") for length in (225, 227, 229)] == [0, 2, 2]
    assert [compute_crop_start(length, 224, "floor") for length in (225, 227, 229)] == [0, 1, 2]


LETTERBOX = (Resize((64,), fit="long"), CenterCrop(64, 64, rounding="floor", fill=0))
EXACT = (Resize((64, 64), fit="exact"),)
PRESET_GEOMETRY = (Resize((72,)), CenterCrop(64, 64))


def make_transform(geometry) -> Transform:
    return Transform((Decode(), *geometry, Pack(order="HWC", dtype="uint8")))


@given(
    height=st.integers(40, 160),
    width=st.integers(40, 160),
    steps=st.sampled_from([LETTERBOX, EXACT, PRESET_GEOMETRY]),
    data=st.data(),
)
def test_a_bright_square_is_where_the_geometry_says(height: int, width: int, steps, data) -> None:
    side = 16
    top, left = data.draw(st.integers(12, height - 28)), data.draw(st.integers(12, width - 28))
    image = np.zeros((height, width, 3), np.uint8)
    image[top : top + side, left : left + side] = 255
    transform = make_transform(steps)
    found = apply_transform(transform, image)[..., 0].astype(float)
    down, across = compute_geometry(transform, height, width)
    axes = ((down, top), (across, left))
    ends = [
        (start + reach) * axis.scale + axis.offset for axis, start in axes for reach in (0, side)
    ]
    assume(min(ends) >= 2 and max(ends) <= 62)  # else the crop cuts it
    for axis, start, sums in ((down, top, found.sum(1)), (across, left, found.sum(0))):
        low, high = start * axis.scale + axis.offset, (start + side) * axis.scale + axis.offset
        center = (sums * (np.arange(64) + 0.5)).sum() / sums.sum()
        assert center == pytest.approx((low + high) / 2, abs=0.3)
