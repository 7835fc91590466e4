"""What goes into a pipe comes out of it."""

import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from optpipe.deploy.frames import read_frame, write_frame


@given(
    st.lists(
        arrays.arrays(
            st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
            arrays.array_shapes(min_dims=0, min_side=0),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_frames_round_trip(found, more):
    pipe = io.BytesIO()
    given_arrays = {f"name{index}": array for index, array in enumerate(found)}
    for _ in range(2):
        write_frame(pipe, {"more": more}, given_arrays)
    pipe.seek(0)
    for _ in range(2):
        header, back = read_frame(pipe)
        assert header["more"] is more
        for name, array in given_arrays.items():
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)
    assert read_frame(pipe) is None
