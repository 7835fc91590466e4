"""Distillation: the learned network is nearer to the FP32 network in INT8, in the form in which it is built."""

import numpy as np
import onnx
import pytest
from tests.fakes.graphs import onnx_model
from tests.unit.quantize.test_recovery import (
    WIDTH,
    make_convolutions,
    make_transformer,
    run,
    snr,
)

from optpipe.backends.onnx_graph import name_nodes
from optpipe.core import torch
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange
from optpipe.quantize.recovery import distillation
from optpipe.quantize.recovery.distillation import NotLearnedError, distill_graph
from optpipe.quantize.recovery.torch_graph import TorchGraph
from optpipe.quantize.recovery.torch_operators import UnknownOperatorError


def draw(random, make, count):
    shape = (count, WIDTH, 6, 6) if make is make_convolutions else (count, 5, WIDTH)
    return random.standard_normal(shape).astype(np.float32)


def find_ranges(model, placed, data):
    values = run(model, {"x": data}, placed.tensors) | {"x": data}
    ends = {name: (float(values[name].min()), float(values[name].max())) for name in placed.tensors}
    return {name: TensorRange(max(-low, high), low, high) for name, (low, high) in ends.items()}


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (make_convolutions, "cpu"),
        (make_convolutions, "cpu-7bit"),
        (make_convolutions, "tensorrt"),
        (make_transformer, "cpu"),
        (make_transformer, "tensorrt"),
    ],
)
def test_the_learned_network_is_nearer_to_the_teacher_on_other_data(
    make, target, monkeypatch
) -> None:
    monkeypatch.setattr(distillation, "STEPS", 60)
    random = np.random.default_rng(0)
    model = make(random)
    learn, judge = draw(random, make, 128), draw(random, make, 64)
    placed = place_qdq(model, target)
    ranges = find_ranges(model, placed, learn)
    made = distill_graph(
        model, model, placed, ranges, [{"x": each} for each in np.split(learn, 4)], "cpu"
    )
    onnx.checker.check_model(made.graph, full_check=True)
    assert made.ranges.keys() == {*placed.tensors}

    expected = run(model, {"x": judge})["y"]
    before = run(qdq_from_onnx(model, placed, ranges), {"x": judge})["y"]
    built = qdq_from_onnx(made.graph, place_qdq(made.graph, target), made.ranges)
    assert snr(expected, run(built, {"x": judge})["y"]) > snr(expected, before) + 0.5


def test_what_is_trained_is_what_is_built() -> None:
    """The student computes what the graph with its Q/DQ pairs computes, before a step is made."""
    random = np.random.default_rng(1)
    for make in (make_convolutions, make_transformer):
        model = make(random)
        data = draw(random, make, 16)
        for target in ("cpu", "tensorrt"):
            placed = place_qdq(model, target)
            ranges = find_ranges(model, placed, data)
            student = distillation._Student(model, placed, ranges, "cpu")
            held = {"x": torch.from_numpy(data)}
            found = TorchGraph(model, "cpu").run(held, ["y"], student.read)["y"]
            expected = run(qdq_from_onnx(model, placed, ranges), {"x": data})["y"]
            assert snr(expected, found.detach().numpy()) > 60


def test_a_network_without_gradient_or_time_is_named(monkeypatch) -> None:
    model = name_nodes(
        onnx_model(
            [("MatMul", "x w", "a"), ("CastLike", "a w", "y")],
            {"x": ["n", 16]},
            {"y": ["n", 16]},
            opset=19,
            w=np.eye(16, dtype=np.float32),
        )
    )
    placed = place_qdq(model, "cpu")
    data = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    ranges = find_ranges(model, placed, data)
    with pytest.raises(UnknownOperatorError, match="CastLike"):
        distill_graph(model, model, placed, ranges, [{"x": data}], "cpu")

    model = make_convolutions(np.random.default_rng(0))
    placed = place_qdq(model, "cpu")
    data = draw(np.random.default_rng(0), make_convolutions, 8)
    ranges = find_ranges(model, placed, data)
    with pytest.raises(NotLearnedError, match="not finite"):
        distill_graph(model, model, placed, ranges, [{"x": data * np.float32(1e30)}], "cpu")

    monkeypatch.setattr(distillation, "LONGEST_S", 0.0)
    with pytest.raises(NotLearnedError, match="a step takes"):
        distill_graph(model, model, placed, find_ranges(model, placed, data), [{"x": data}], "cpu")
