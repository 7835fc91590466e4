"""A quantized graph that computes something else than its source is refused, however small the difference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.backends.onnx_graph import name_nodes
from optpipe.core.errors import StageError
from optpipe.quantize.faithful import require_faithful, require_half_step
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange

RANDOM = np.random.default_rng(0)
FEEDS = [{"x": RANDOM.standard_normal((2, 32, 9, 9)).astype(np.float32)}]


def make_source():
    """Two convolutions and a shortcut: x (n, 32, 9, 9)."""
    nodes = [
        ("Conv", "x w b", "a", {"pads": [1, 1, 1, 1]}),
        ("Relu", "a", "r"),
        ("Conv", "r v", "c", {"pads": [1, 1, 1, 1]}),
        ("Add", "c x", "y"),
    ]
    weights = {
        "w": (RANDOM.standard_normal((32, 32, 3, 3)) / 17).astype(np.float32),
        "b": RANDOM.standard_normal(32).astype(np.float32),
        "v": (RANDOM.standard_normal((32, 32, 3, 3)) / 17).astype(np.float32),
    }
    model = onnx_model(nodes, {"x": ["n", 32, 9, 9]}, {"y": ["n", 32, 9, 9]}, **weights)
    return name_nodes(model)


def quantize(source, target):
    placed = place_qdq(source, target)
    ranges = {name: TensorRange(3.0, -3.0, 3.0) for name in placed.tensors}
    return qdq_from_onnx(source, placed, ranges), placed, ranges


@pytest.mark.parametrize("target", ["tensorrt", "cpu", "cpu-7bit", "fp8"])
def test_what_optpipe_writes_is_faithful(target) -> None:
    source = make_source()
    quantized, placed, ranges = quantize(source, target)
    require_faithful(source, quantized, placed, ranges, FEEDS, "net")


def find(model, name):
    return next(each for each in model.graph.initializer if each.name == name)


def change_constant(model, node_type, position, change):
    """Changes the constant that the first node of a type with a constant there reads."""
    stored = {each.name for each in model.graph.initializer}
    node = next(
        each
        for each in model.graph.node
        if each.op_type == node_type and each.input[position] in stored
    )
    held = find(model, node.input[position])
    values = np.array(onnx.numpy_helper.to_array(held))
    held.CopyFrom(onnx.numpy_helper.from_array(np.asarray(change(values), values.dtype), held.name))


def rewire(model):
    nodes = {each.name: each for each in model.graph.node}
    add = next(each for each in nodes.values() if each.op_type == "Add")
    add.input[1] = add.input[0]


def drop_relu(model):
    relu = next(each for each in model.graph.node if each.op_type == "Relu")
    relu.op_type = "Identity"


def move_one_weight(values):
    values[0, 0, 0, 0] += 2
    return values


WRONG: dict[str, Callable[[Any], Any]] = {
    "an edge": rewire,
    "an operator": drop_relu,
    "one weight": lambda model: change_constant(model, "DequantizeLinear", 0, move_one_weight),
    "weights in another order": lambda model: change_constant(
        model, "DequantizeLinear", 0, lambda v: v[::-1]
    ),
    "the scale of an activation": lambda model: change_constant(
        model, "QuantizeLinear", 1, lambda v: v * 1.5
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_planted_wrong_rewrite_is_refused(case) -> None:
    source = make_source()
    quantized, placed, ranges = quantize(source, "tensorrt")
    WRONG[case](quantized)
    with pytest.raises(
        StageError, match=r"differs from its source by more than rounding: .*\nbuild it"
    ):
        require_faithful(source, quantized, placed, ranges, FEEDS, "net")


def test_fp16_around_int8_layers_may_change_no_more_than_a_step() -> None:
    source = make_source()
    quantized, *_ = quantize(source, "tensorrt")
    assert require_half_step(quantized, source, lambda model: model, FEEDS, "net") == quantized

    def break_it(model):
        rewire(model)
        return model

    with pytest.raises(StageError, match=r"changes more than rounding does: tensor"):
        require_half_step(quantized, source, break_it, FEEDS, "net")
