"""What goes into a pipe, or into memory that two processes share, comes out of it."""

import io
import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from optpipe.deploy.frames import SharedMemory, read_frame, write_frame

TENSORS = st.lists(
    arrays.arrays(
        st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    max_size=3,
)


@given(st.lists(TENSORS, min_size=1, max_size=4), st.booleans())
def test_frames_round_trip(batches, shared):
    """A batch of frames is read after all of it was written; the next one comes to the same memory."""
    descriptor = os.memfd_create("test")
    sent, received = (SharedMemory(descriptor) if shared else None for _ in range(2))
    try:
        for _ in range(2):
            pipe = io.BytesIO()
            if sent is not None:
                sent.rewind()
            for number, found in enumerate(batches):
                write_frame(pipe, {"number": number}, {f"name{at}": each for at, each in enumerate(found)}, sent)
            pipe.seek(0)
            back = [read_frame(pipe, received) for _ in batches]
            assert read_frame(pipe, received) is None
            for number, (found, (header, arrived)) in enumerate(zip(batches, back, strict=True)):
                assert header["number"] == number
                for one, other in zip(found, arrived.values(), strict=True):
                    assert one.dtype == other.dtype
                    np.testing.assert_array_equal(one, other)
    finally:
        os.close(descriptor)
