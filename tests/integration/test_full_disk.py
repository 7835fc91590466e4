"""A build whose files may not grow: an error in one or two lines, no half-written entry, and the next build succeeds."""

import resource

import numpy as np
import onnx
import pytest

from tests.fakes.graphs import onnx_model

BUILD = ("build", "net.onnx", "--precision", "fp32", "--backend", "onnxruntime")


@pytest.fixture
def folder(tmp_path):
    weights = np.random.default_rng(0).standard_normal((40, 3 * 16 * 16)).astype(np.float32)
    steps = (("Flatten", "x", "f"), ("Gemm", "f v", "y", {"transB": 1}))
    network = onnx_model(steps, {"x": ["n", 3, 16, 16]}, {"y": ["n", 40]}, v=weights)
    onnx.save(network, tmp_path / "net.onnx")
    return tmp_path


def test_a_limit_on_the_size_of_files_leaves_nothing_half_written(inside, folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit_bytes in (512, 2**12, 2**15, 2**17):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        try:
            ran = inside(*BUILD, "--workspace", "ws", cwd=folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if limit_bytes < 120_000:
            assert ran.status == 4, ran.stderr
            assert "File too large" in ran.stderr
            errors = ran.stderr[ran.stderr.index("optpipe: ") :]
            assert len(errors.strip().splitlines()) <= 3, errors
        assert not list((folder / "ws" / "tmp").glob("*"))
    assert inside(*BUILD, "--workspace", "ws", cwd=folder).status == 0
    listed = inside("store", "ls", "--workspace", "ws", cwd=folder)
    assert "damaged" not in listed.stdout
