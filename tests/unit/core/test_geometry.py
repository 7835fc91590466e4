import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optpipe.core.transform import CenterCrop, Decode, Pack, Resize, Transform, compute_geometry
from optpipe.models.inputs.images import apply_transform

LETTERBOX = (Resize((64,), fit="long"), CenterCrop(64, 64, rounding="floor", fill=0))
EXACT = (Resize((64, 64), fit="exact"),)
PRESET = (Resize((72,)), CenterCrop(64, 64))


def make_transform(geometry) -> Transform:
    return Transform((Decode(), *geometry, Pack(order="HWC", dtype="uint8")))


@given(
    height=st.integers(40, 160),
    width=st.integers(40, 160),
    steps=st.sampled_from([LETTERBOX, EXACT, PRESET]),
    data=st.data(),
)
def test_a_bright_square_is_where_the_geometry_says(height: int, width: int, steps, data) -> None:
    side = 16
    top, left = data.draw(st.integers(12, height - 28)), data.draw(st.integers(12, width - 28))
    image = np.zeros((height, width, 3), np.uint8)
    image[top : top + side, left : left + side] = 255
    transform = make_transform(steps)
    found = apply_transform(transform, image)[..., 0].astype(float)
    geometry = compute_geometry(transform, height, width)
    axes = ((geometry.rows, top), (geometry.columns, left))
    ends = [(start + reach) * axis.scale + axis.offset for axis, start in axes for reach in (0, side)]
    assume(min(ends) >= 2 and max(ends) <= 62)  # else the crop cuts it
    for axis, start, sums in ((geometry.rows, top, found.sum(1)), (geometry.columns, left, found.sum(0))):
        low, high = start * axis.scale + axis.offset, (start + side) * axis.scale + axis.offset
        center = (sums * (np.arange(64) + 0.5)).sum() / sums.sum()
        assert center == pytest.approx((low + high) / 2, abs=0.3)
