import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from optpipe.backends.onnx_graph import find_index_bounds, layers_from_onnx
from optpipe.core.card import InputSpec

IMAGE = InputSpec("x", "float32", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))


def model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], output: list[object]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_a_convolution_by_hand() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", kernel_shape=[3, 3])
    layers = layers_from_onnx(model([conv], {"w": np.zeros((5, 3, 3, 3), np.float32)}, ["n", 5, 6, 6]), [IMAGE])
    assert [(each.name, each.type, each.macs) for each in layers] == [("conv", "fp32", 2 * 5 * 6 * 6 * 3 * 3 * 3)]


def test_a_grouped_convolution_by_hand() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", kernel_shape=[1, 1], group=3)
    layers = layers_from_onnx(model([conv], {"w": np.zeros((3, 1, 1, 1), np.float32)}, ["n", 3, 8, 8]), [IMAGE])
    assert layers[0].macs == 2 * 3 * 8 * 8


def test_a_transposed_gemm_by_hand() -> None:
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "w", "b"], ["y"], name="gemm", transB=1),
    ]
    weights = {"w": np.zeros((10, 192), np.float32), "b": np.zeros(10, np.float32)}
    layers = layers_from_onnx(model(nodes, weights, ["n", 10]), [IMAGE])
    assert [(each.name, each.macs) for each in layers] == [("gemm", 2 * 192 * 10)]


def test_a_product_behind_dequantize_is_computed_as_it_stands() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="d"),
        helper.make_node("Conv", ["d", "w"], ["y"], name="conv", kernel_shape=[3, 3]),
    ]
    weights: dict[str, np.ndarray]
    weights = {"w": np.zeros((5, 3, 3, 3), np.float32), "s": np.array(0.1, np.float32), "z": np.array(0, np.int8)}
    layers = layers_from_onnx(model(nodes, weights, ["n", 5, 6, 6]), [IMAGE])
    assert [(each.op, each.type) for each in layers if each.macs] == [("Conv", "fp32")]


@pytest.mark.slow
def test_the_macs_of_resnet18_agree_with_torch() -> None:
    """torch's own FLOP counter is the independent count: two operations per multiply-add."""
    import io

    import torch
    import torchvision
    from torch.utils.flop_counter import FlopCounterMode

    module = torchvision.models.resnet18(weights=None).eval()
    image = torch.zeros(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(image)
    file = io.BytesIO()
    torch.onnx.export(module, (image,), dynamo=True, input_names=["x"], verbose=False).save(file)
    spec = InputSpec("x", "float32", *[(2, 3, 64, 64)] * 3)
    layers = layers_from_onnx(onnx.load_from_string(file.getvalue()), [spec])
    assert sum(each.macs for each in layers) * 2 == counter.get_total_flops()


def test_how_far_an_index_may_go_is_that_of_the_smallest_table() -> None:
    from onnx import numpy_helper

    tables = [numpy_helper.from_array(np.zeros((rows, 4), np.float32), name) for name, rows in (("a", 10), ("b", 7))]
    ids, other = (helper.make_tensor_value_info(name, TensorProto.INT64, ["n", 5]) for name in ("ids", "other"))
    nodes = [
        helper.make_node("Cast", ["ids"], ["cast"], to=TensorProto.INT32),
        helper.make_node("Gather", ["a", "ids"], ["x"]),
        helper.make_node("Gather", ["b", "cast"], ["y"]),
        helper.make_node("Add", ["x", "y"], ["z"]),
    ]
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 5, 4])
    assert find_index_bounds(helper.make_model(helper.make_graph(nodes, "g", [ids, other], [out], tables))) == {
        "ids": 7
    }
