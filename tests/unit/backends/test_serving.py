"""What servers are told of an artifact, and which artifacts they cannot serve."""

import pytest
from tests.fakes.entries import artifact_info

from optpipe.backends.registry import BACKENDS
from optpipe.backends.tensorrt_builder import BuilderOptions
from optpipe.core.errors import BadInputError
from optpipe.core.records import plain_from_record


def serve(backend="tensorrt", options=(), version="1.31.1", **built_with):
    details = {"builder": plain_from_record(BuilderOptions(**built_with))}
    info = artifact_info(backend=backend, device="cuda", details=details)
    return BACKENDS[backend].serving(info, dict(options), version)


def test_every_profile_of_an_engine_is_named() -> None:
    assert serve(profiles="1:1:1,1:32:64").profiles == ("0", "1")
    assert serve().profiles == serve("onnxruntime").profiles == ()


def test_an_engine_that_needs_more_than_its_file_is_refused() -> None:
    assert serve("tensorrt-rtx", plugins="a.so").own_session, "it loads the plugins"
    with pytest.raises(BadInputError, match="build without strip_weights"):
        serve(strip_weights=True)
    with pytest.raises(BadInputError, match="build without plugins"):
        serve(plugins="a.so")


def test_options_that_a_server_does_not_take_over_are_named() -> None:
    found = serve("onnxruntime", {"threads": 2, "nhwc": True})
    assert (dict(found.parameters), found.not_carried) == ({"intra_op_thread_count": "2"}, ("nhwc",))
    assert serve("tensorrt", {"cuda_graph": True}).cuda_graph
    assert serve("inductor", {"cuda_graph": True}).not_carried == ("cuda_graph",)
    assert serve("torch", {"cuda_graph": True}).not_carried == ()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.23.2", "Triton 25.08 to 26.01 carries ONNX Runtime 1.23"),
        ("1.31.1", "no Triton release up to 26.07 carries ONNX Runtime 1.31.1 (26.07 has 1.27)"),
        ("1.2.0", "no Triton release up to 26.07 carries ONNX Runtime 1.2.0"),
    ],
)
def test_the_releases_of_an_onnxruntime_are_named(version: str, expected: str) -> None:
    assert serve("onnxruntime", version=version).requirement.startswith(expected)
