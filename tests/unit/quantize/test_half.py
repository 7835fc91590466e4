"""What ModelOpt cannot convert is said with a way out."""

import numpy as np
import onnx
import onnxruntime
import pytest

from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.quantize.half import _convert_in
from optpipe.quantize.precision_graph import _convert_to_half
from optpipe.workspace.file_names import MODELOPT_LOG


def test_a_conversion_that_fails_names_its_reason_and_a_way_out(tmp_path) -> None:
    (tmp_path / MODELOPT_LOG).write_text("[modelopt] - ERROR - Graph must be in SSA form\n")
    said = r"net to fp16: Graph must be in SSA form\nleave fp16 out of --precision"
    with pytest.raises(StageError, match=said), _convert_in("net", Precision.FP16, tmp_path):
        raise RuntimeError("1")


CLASS_TOKEN = """
<ir_version: 9, opset_import: ["": 19]>
net (float[batch, 4, 2] x) => (float[batch, 5, 2] y)
<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {99}, float[1, 1, 2] token = {5.0, 6.0}> {
    count = Shape<end = 1>(x)
    size = Concat<axis = 0>(count, one, two)
    tokens = Expand(token, size)
    all = Concat<axis = 1>(tokens, x)
    head = Slice(all, zero, one, one)
    gated = Relu(head)
    rest = Slice(all, one, end, one)
    turned = Neg(rest)
    joined = Concat<axis = 1>(gated, turned)
    y = Abs(joined)
}
"""
"""Sizes that follow from a tensor's values, as a class token's do: plain shape inference does not know them."""


@pytest.mark.slow
def test_sizes_that_cannot_be_inferred_do_not_share_memory(tmp_path) -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CLASS_TOKEN), data_prop=True)
    half = _convert_to_half(graph, tmp_path)
    session = onnxruntime.InferenceSession(half.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
    (found,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(found, np.concatenate([np.full((2, 1, 2), [5, 6]), x], axis=1))
