"""Which decoder a file goes to, asked of the graph itself; on a GPU tests/gpu holds the pixels against Pillow's."""

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types

from optpipe.inputs.odd import odd_files
from optpipe.stages.preprocess.dali_decode import SHARES, _is_for_gpu

FILES = dict(odd_files())


def for_gpu(files, cpu_share=0.0, odd_files=True):
    def graph():
        encoded = fn.external_source(name="X", dtype=types.UINT8, ndim=1, device="cpu")
        return _is_for_gpu(encoded, odd_files=odd_files, cpu_share=cpu_share)

    pipeline = pipeline_def(graph, batch_size=len(files), num_threads=1, device_id=None, prefetch_queue_depth=1)()
    pipeline.feed_input("X", [np.frombuffer(data, np.uint8) for data in files])
    (where,) = pipeline.run()
    return [bool(np.asarray(where[row])) for row in range(len(files))]


def test_whole_jpeg_files_go_to_the_gpu_and_everything_odd_to_the_cpu():
    found = dict(zip(FILES, for_gpu(list(FILES.values())), strict=True))
    assert found == {name: name.endswith(".jpg") and name != "truncated.jpg" for name in FILES}


@pytest.mark.parametrize("tail", [b"\0", b"\xff", b"thumbnail"])
def test_a_jpeg_with_something_behind_its_end_goes_to_the_cpu(tail):
    assert for_gpu([FILES["progressive.jpg"] + tail]) == [False]


@pytest.mark.parametrize("data", [b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd9"])
def test_a_file_of_a_few_bytes_is_no_whole_jpeg(data):
    assert for_gpu([data]) == [False]


@pytest.mark.parametrize("share", [0.125, 0.25, 1.0])
def test_the_share_of_the_cpu_is_counted_by_the_files_sizes(share):
    files = [b"\xff\xd8\xff" + bytes(size) + b"\xff\xd9" for size in range(SHARES)]
    for odd in (True, False):
        assert sum(for_gpu(files, share, odd)) == SHARES - share * SHARES
