"""Which options are in force for a stored artifact."""

import pytest
from tests.fakes.entries import artifact_info

from optpipe.backends.registry import BACKENDS, resolve_effective_options
from optpipe.core.errors import BadInputError, StageError

INFO = artifact_info(device="cuda", options={"nhwc": False})


def test_text_from_the_command_line_is_read_as_the_type_of_its_option():
    found = resolve_effective_options(INFO, {"cuda_graph": "false", "cudnn_search": "HEURISTIC"})
    assert found == {"nhwc": False, "cuda_graph": False, "cudnn_search": "HEURISTIC", "fuse_conv_bias": False}


@pytest.mark.parametrize("given", [{"nhwc": "maybe"}, {"layout": "nhwc"}])
def test_what_cannot_be_meant_is_refused(given):
    with pytest.raises(BadInputError, match=next(iter(given))):
        resolve_effective_options(INFO, given)


@pytest.mark.parametrize(
    "given", [{"optimization_level": "99"}, {"optimization_level": "-2"}, {"workspace_bytes": "-1"}]
)
def test_a_number_that_no_builder_takes_is_refused_before_it_builds(given):
    with pytest.raises(BadInputError, match=next(iter(given))):
        BACKENDS["tensorrt-rtx"].recipe("cuda", given)


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx", "torch-tensorrt", "inductor"])
def test_what_only_a_build_takes_is_not_in_force_at_run_time(name):
    built = artifact_info(backend=name, device="cuda", options=BACKENDS[name].recipe("cuda", {})["options"])
    assert resolve_effective_options(built, {}).keys() <= {"cuda_graph", "runtime_cache"}
    given = next(key for key in built.options if key != "cuda_graph")
    with pytest.raises(BadInputError, match=rf"is a build option of {name}: optpipe build --option {name}\.{given}=7"):
        resolve_effective_options(built, {given: "7"})


def test_an_engine_takes_the_options_that_are_in_force(tmp_path):
    """Without a GPU an engine is refused, but after its options were read."""
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx-cu13")
    (tmp_path / "model.engine").write_bytes(b"no engine")
    info = artifact_info(backend="tensorrt-rtx", device="cuda")
    given = {"cuda_graph": "false", "runtime_cache": str(tmp_path / "kernels")}
    with pytest.raises(StageError, match=r"cannot load model\.engine: .*bufferSize"):
        BACKENDS["tensorrt-rtx"].load(tmp_path, info, resolve_effective_options(info, given))
    with pytest.raises(BadInputError, match=r"runtime_cache=.*its folder does not exist"):
        BACKENDS["tensorrt-rtx"].load(tmp_path, info, {"runtime_cache": str(tmp_path / "no/such/kernels")})
