"""Which decoder a file goes to, asked of the graph itself; on a GPU tests/gpu holds the pixels against Pillow's."""

from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def, types

from optpipe.models.inputs.synthetic import make_edge_case_files
from optpipe.preprocess.dali_pipeline import SHARE_PARTS, _is_for_gpu, is_edge_case

FILES = dict(make_edge_case_files())


def for_gpu(files, cpu_share=None, edge_cases=True):
    def graph():
        encoded = fn.external_source(name="X", dtype=types.UINT8, ndim=1, device="cpu")
        index = fn.external_source(name="I", dtype=types.INT32, ndim=1, device="cpu")
        share = None if cpu_share is None else (index, cpu_share)
        return _is_for_gpu(encoded, edge_cases=edge_cases, cpu_share=share), index, encoded

    pipeline = pipeline_def(graph, batch_size=len(files), num_threads=1, device_id=None, prefetch_queue_depth=1)()
    pipeline.feed_input("X", [np.frombuffer(data, np.uint8) for data in files])
    pipeline.feed_input("I", [np.array([row], np.int32) for row in range(len(files))])
    where, _, _ = pipeline.run()
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
def test_the_cpu_takes_the_same_share_of_every_batch(share):
    files = [b"\xff\xd8\xff" + bytes(size) + b"\xff\xd9" for size in range(4 * SHARE_PARTS)]
    for odd in (True, False):
        found = for_gpu(files, share, odd)
        for start in range(0, len(files), SHARE_PARTS):
            assert sum(found[start : start + SHARE_PARTS]) == SHARE_PARTS - share * SHARE_PARTS


def test_files_that_are_known_are_looked_at_before(tmp_path):
    odd: dict[Any, set[str]] = {"mixed": set(), "cpu": set()}
    for name, data in FILES.items():
        path = tmp_path / name
        path.write_bytes(data)
        for decode, found in odd.items():
            if is_edge_case(path, decode):
                found.add(name)
    assert odd["mixed"] == {name for name in FILES if not name.endswith(".jpg") or name == "truncated.jpg"}
    assert odd["cpu"] == {"grayscale 16 bit.png"}
    (tmp_path / "empty").write_bytes(b"")
    assert is_edge_case(tmp_path / "empty", "mixed")
