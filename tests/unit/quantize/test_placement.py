import pytest
from onnx import helper

from optpipe.quantize.placement import place_qdq


def test_layers_are_kept_as_asked(residual_model) -> None:
    found = place_qdq(residual_model, "tensorrt", keep=lambda name: name == "conv2")
    assert "conv2" not in found.layers
    assert [(each.layer, each.reason) for each in found.skipped] == [("conv2", "kept in floating point by request")]
    assert ("add", 0) in found.edges  # now `down` takes the addition in


@pytest.mark.parametrize("target", ["tensorrt", "cpu"])
def test_what_was_zero_in_all_calibration_data_has_no_range(residual_model, target) -> None:
    found = place_qdq(residual_model, target, unseen={"r1", "d"})
    assert [(each.layer, each.reason) for each in found.skipped] == [
        ("conv2", "its input was zero in all calibration data")
    ]
    assert not {"r1", "d"} & {*found.tensors, *found.after}
    assert ("conv3", 0) in found.edges


def test_layers_that_do_not_pay_are_named(onnx_model, random_weight) -> None:
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w3"], ["a"], name="stem"),
        node("Conv", ["a", "wd"], ["b"], name="depthwise", group=32),
        node("Conv", ["b", "wg"], ["c"], name="grouped", group=8),
        node("Conv", ["c", "v"], ["d"], name="dynamic"),
        node("MatMul", ["d", "m"], ["y"], name="product"),
    ]
    weights = {
        "w3": random_weight(32, 3, 1, 1),
        "wd": random_weight(32, 1, 1, 1),
        "wg": random_weight(32, 4, 1, 1),
        "m": random_weight(8, 8),
    }
    graph = onnx_model(nodes, weights, inputs=(("x", ["n", 3, 8, 8]), ("v", [32, 32, 1, 1])))
    found = place_qdq(graph, "tensorrt")
    assert found.layers == ("product",)
    reasons = {each.layer: each.reason for each in found.skipped}
    assert reasons["stem"].startswith("3 input channels")
    assert reasons["depthwise"].startswith("depthwise")
    assert reasons["grouped"].startswith("grouped, 4 channels per group")
    assert reasons["dynamic"] == "its weights are not constant"
    on_cpu = place_qdq(graph, "cpu")  # whose kernels need no 16 channels
    assert on_cpu.layers == ("stem", "depthwise", "grouped", "product")
