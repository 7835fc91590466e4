"""Which options are in force for a stored artifact."""

import pytest

from optpipe.backends.registry import BACKENDS, options_in_force
from optpipe.errors import BadInputError

INFO = {"backend": "onnxruntime", "device": "cuda", "options": {"nhwc": False}}


def test_text_from_the_command_line_is_read_as_the_type_of_its_option():
    found = options_in_force(INFO, {"cuda_graph": "false", "cudnn_search": "HEURISTIC"})
    assert found == {"nhwc": False, "cuda_graph": False, "cudnn_search": "HEURISTIC", "fuse_conv_bias": False}


@pytest.mark.parametrize("given", [{"nhwc": "maybe"}, {"layout": "nhwc"}])
def test_what_cannot_be_meant_is_refused(given):
    with pytest.raises(BadInputError, match=next(iter(given))):
        options_in_force(INFO, given)


@pytest.mark.parametrize(
    "given", [{"optimization_level": "99"}, {"optimization_level": "-2"}, {"workspace_bytes": "-1"}]
)
def test_a_number_that_no_builder_takes_is_refused_before_it_builds(given):
    with pytest.raises(BadInputError, match=next(iter(given))):
        BACKENDS["tensorrt-rtx"].recipe("cuda", given)
