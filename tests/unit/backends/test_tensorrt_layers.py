"""What TensorRT-RTX's own parser makes of a graph: its layers, attributed to the ONNX nodes that they came from; or a refusal."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optpipe.backends.base import BuildRequest
from optpipe.backends.tensorrt import TENSORRT_RTX, layers_from_network
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.precision import Precision, prove_precision

SPEC = InputSpec("x", "float32", (5, 1, 6), (5, 2, 6), (5, 4, 6), batch=1)


def save_recurrent(folder, op, gates, directions):
    """x (5 steps, batch, 6) through one recurrent node of 4 hidden values, and a product behind it."""
    direction = "bidirectional" if directions == 2 else "forward"
    nodes = [
        helper.make_node(op, ["x", "w", "r"], ["all", "last"], name="recurrent", hidden_size=4, direction=direction),
        helper.make_node("MatMul", ["last", "m"], ["y"], name="product"),
    ]
    values = {"w": (directions, gates * 4, 6), "r": (directions, gates * 4, 4), "m": (4, 3)}
    weights = [numpy_helper.from_array(np.ones(shape, np.float32) / 9, name) for name, shape in values.items()]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, "batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [directions, "batch", 3])],
        weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_products_of_a_recurrent_node_are_its_own(tmp_path, op, gates, directions) -> None:
    library = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX")
    graph = save_recurrent(tmp_path, op, gates, directions)
    card = ModelCard("net", "net.onnx", Task.OTHER, (SPEC,))
    request = BuildRequest(card, Precision.FP32, graph, None, "cuda", {}, tmp_path)
    logger = library.Logger(library.Logger.ERROR)
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    assert parser.parse_from_file(str(graph))
    layers = layers_from_network(library, network, request)
    proof = prove_precision(Precision.FP32, layers)
    assert proof.proven
    products = directions * 2 * 4 * 3
    assert sum(each.macs for each in layers) == 5 * 2 * directions * gates * 4 * (6 + 4) + products


def test_an_asymmetric_graph_is_refused_with_a_way_out_in_two_lines(tmp_path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy")
    quantized = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequantize"),
    ]
    numbers = [numpy_helper.from_array(np.float32(0.1), "scale"), numpy_helper.from_array(np.int8(3), "zero")]
    graph = helper.make_graph(quantized, "g", [x], [y], numbers)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "net.onnx"
    )
    card = ModelCard("net", "net.onnx", Task.OTHER, (InputSpec("x", "float32", (4, 8), (4, 8), (4, 8)),))
    request = BuildRequest(card, Precision.INT8, tmp_path / "net.onnx", None, "cuda", {}, tmp_path)
    (refused,) = TENSORRT_RTX.find_unsupported(request)
    assert refused.splitlines() == [
        "QuantizeLinear (quantize): its zero point is not 0",
        "quantize the model symmetrically, or build it with --backend onnxruntime",
    ]
