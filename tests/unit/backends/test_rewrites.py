"""What ONNX Runtime's backend makes of a graph is compared with it, and what changes an output is left out."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.fakes.bare import measure_snr, run_bare
from tests.fakes.entries import artifact_info
from tests.fakes.graphs import onnx_model

from optpipe.backends import onnxruntime as backend
from optpipe.backends.base import BuildRequest
from optpipe.backends.onnxruntime import OnnxRuntime, rewrite_graph
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession, optimize_graph
from optpipe.backends.rewrites import RewriteGuard, nudge, nudge_weights
from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.errors import StageError
from optpipe.core.precision import Precision
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.quantize.ranges import TensorRange

SHAPE = (2, 16, 8, 8)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def request_of(model, folder, precision=Precision.FP32, device="cpu", **inputs):
    """A request to build `model` in `folder`, with a probe of `inputs` or of one noise input."""
    given = inputs or {"x": normal(*SHAPE, seed=1)}
    specs = [InputSpec(name, str(each.dtype), *[each.shape] * 3) for name, each in given.items()]
    card = ModelCard("small", "small.onnx", Task.OTHER, tuple(specs))
    onnx.save(model, folder / "graph.onnx")
    path, target = folder / "graph.onnx", folder / "built"
    target.mkdir()
    return BuildRequest(card, precision, path, None, device, {}, target, None, (given,))


def convolutions(dtype=np.float32):
    """Three convolutions with biases and a ReLU."""
    kind = "FLOAT16" if dtype is np.float16 else "FLOAT"
    weights = {f"w{index}": normal(16, 16, 3, 3, seed=index) / 12 for index in range(3)}
    weights |= {f"b{index}": normal(16, seed=index) for index in range(3)}
    nodes = [
        ("Conv", "x w0 b0", "c0", {"pads": [1] * 4}),
        ("Conv", "c0 w1 b1", "c1", {"pads": [1] * 4}),
        ("Conv", "c1 w2 b2", "c2", {"pads": [1] * 4}),
        ("Relu", "c2", "y"),
    ]
    constants = {name: value.astype(dtype) for name, value in weights.items()}
    sides = {"x": (kind, ["n", *SHAPE[1:]])}, {"y": (kind, ["n", *SHAPE[1:]])}
    return onnx_model(nodes, *sides, opset=20, **constants)


def quantized(kept=lambda _: False):
    """The same with Q/DQ pairs, without those of the layers that are `kept`."""
    model = convolutions()
    placed = place_qdq(model, "cpu", kept)
    return qdq_from_onnx(model, placed, dict.fromkeys(placed.tensors, TensorRange(6.0, -6.0, 6.0)))


def spoil(model, scale=1.5):
    """One channel of a weight, or of its scale, is wrong."""
    stored = {each.name: each for each in model.graph.initializer}
    found = [each for each in stored.values() if each.data_type in (1, 10) and len(each.dims)]
    largest = max(found, key=lambda each: np.prod(each.dims))
    values = onnx.numpy_helper.to_array(largest).copy()
    values[:4] *= scale
    largest.CopyFrom(onnx.numpy_helper.from_array(values, largest.name))
    return model


def plant_in_optimizer(monkeypatch, *levels):
    """The CPU's offline optimizer, also in place of a GPU's, writes a wrong weight at `levels`."""

    def optimize(graph, target, _device, **how):
        optimize_graph(graph, target, "cpu", **how)
        if how["optimization"] in levels:
            onnx.save(spoil(onnx.load(target)), target)

    monkeypatch.setattr(backend, "optimize_graph", optimize)


def assert_true_to_graph(request, built, least_db):
    given = request.probe[0]
    expected = run_bare(request.graph, given)["y"]
    info = backend._Loading(**built.details)
    with info.open(request.directory / built.file, "cpu", built.options) as session:
        assert measure_snr(expected, session.run(given)["y"]) > least_db


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_wrong_fusion_is_left_out_and_named(tmp_path, monkeypatch, kind) -> None:
    model = convolutions() if kind == "fp32" else quantized()
    request = request_of(model, tmp_path)
    plant_in_optimizer(monkeypatch, "all", "extended")
    built = OnnxRuntime().build(request)
    assert built.details["optimization"] == "basic"
    assert len(built.remarks) == 2
    assert all("tensor" in each and " dB" in each for each in built.remarks)
    assert_true_to_graph(request, built, 100 if kind == "fp32" else 40)


def test_a_wrong_layout_at_loading_is_left_out(tmp_path, monkeypatch) -> None:
    real = OnnxRuntimeSession.run

    def run(self, inputs):
        found = real(self, inputs)
        return {name: value[:, ::-1] for name, value in found.items()} if self.wrong else found

    def init(self, *given, optimization="all", **how):
        start(self, *given, optimization=optimization, **how)
        self.wrong = optimization == "all"

    start = OnnxRuntimeSession.__init__
    monkeypatch.setattr(OnnxRuntimeSession, "__init__", init)
    monkeypatch.setattr(OnnxRuntimeSession, "run", run)
    request = request_of(convolutions(), tmp_path)
    built = OnnxRuntime().build(request)
    assert built.details["optimization"] == "extended"
    assert len(built.remarks) == 1
    assert_true_to_graph(request, built, 100)


def test_a_graph_that_is_wrong_at_every_level_is_refused(tmp_path, monkeypatch) -> None:
    plant_in_optimizer(monkeypatch, "all", "extended", "basic", "disabled")
    with pytest.raises(StageError, match=r"\n.*another runtime"):
        OnnxRuntime().build(request_of(convolutions(), tmp_path))


def test_a_wrong_fusion_for_a_gpu_is_left_out(tmp_path, monkeypatch) -> None:
    """The CPU's fusions stand for those of a GPU."""
    request = replace(request_of(convolutions(), tmp_path), device="cuda")
    plant_in_optimizer(monkeypatch, "all")
    _, optimization, remarks = rewrite_graph(request, onnx.load(request.graph), tmp_path / "m", {})
    assert optimization == "extended"
    assert len(remarks) == 1


@pytest.mark.parametrize("wrong", [False, True])
def test_additions_that_are_not_the_biases_are_left_out(tmp_path, monkeypatch, wrong) -> None:
    given = normal(*SHAPE, seed=1).astype(np.float16)
    model = convolutions(np.float16)
    request = request_of(model, tmp_path, Precision.FP16, "cuda", x=given)
    real, target = backend.separate_biases, request.directory / "m.onnx"

    def separate(graph):
        count = real(graph)
        for each in graph.graph.initializer:
            if wrong and each.name == "b1_over_4d":
                values = onnx.numpy_helper.to_array(each)[:, ::-1]
                each.CopyFrom(onnx.numpy_helper.from_array(values.copy(), each.name))
        return count

    def optimize(graph, target, *_, **__):
        onnx.save(onnx.load(graph), target)

    monkeypatch.setattr(backend, "optimize_graph", optimize)
    monkeypatch.setattr(backend, "separate_biases", separate)
    found, _, remarks = rewrite_graph(request, model, target, {})
    additions = sum(node.op_type == "Add" for node in found.graph.node)
    assert (additions, len(remarks)) == ((0, 1) if wrong else (3, 0))
    assert onnx.load(target) == found


@pytest.mark.parametrize("wrong", [False, True])
def test_a_protection_that_changes_a_convolution_is_refused(tmp_path, monkeypatch, wrong) -> None:
    real = backend.protect_convolutions

    def protect(graph):
        count = real(graph)
        for node in graph.graph.node:
            if wrong and node.op_type == "FusedConv":
                node.attribute.append(onnx.helper.make_attribute("activation", "Relu"))
        return count

    monkeypatch.setattr(backend, "protect_convolutions", protect)
    request = request_of(quantized("c1".__eq__), tmp_path, Precision.INT8)
    if not wrong:
        built = OnnxRuntime().build(request)
        assert (built.remarks, built.details["optimization"]) == ((), "all")
        return
    with pytest.raises(StageError, match=r"FusedConv.*\n.*--budget"):
        OnnxRuntime().build(request)


def test_a_layer_that_is_quantized_behind_ones_back_is_found(tmp_path, monkeypatch) -> None:
    """What the graph leaves in FP32, a pass of the runtime quantizes with one scale for all channels."""
    model = quantized("c1".__eq__)
    weight = next(each for each in model.graph.initializer if each.name == "w1")
    values = onnx.numpy_helper.to_array(weight) * np.geomspace(1e-3, 1, 16).reshape(-1, 1, 1, 1)
    weight.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), "w1"))
    monkeypatch.setattr(backend, "needs_weight_pass", lambda _: True)
    built = OnnxRuntime().build(request_of(model, tmp_path, Precision.INT8))
    assert len(built.remarks) == 1
    assert "WeightBiasQuantization" in built.remarks[0]
    assert "FusedConv" in [each.op for each in built.layers]


HONEST: dict[str, list[tuple[Any, ...]]] = {
    "normalization": [
        ("ReduceMean", "x", "m", {"axes": [-1]}),
        ("Sub", "x m", "d"),
        ("Pow", "d two", "q"),
        ("ReduceMean", "q", "v", {"axes": [-1]}),
        ("Add", "v tiny", "e"),
        ("Sqrt", "e", "s"),
        ("Div", "d s", "n"),
        ("Mul", "n g", "a"),
        ("Add", "a h", "y"),
    ],
    "gelu": [
        ("Div", "x root", "d"),
        ("Erf", "d", "e"),
        ("Add", "e one", "a"),
        ("Mul", "x a", "b"),
        ("Mul", "b half", "y"),
    ],
    "sums that cancel": [
        ("Mul", "x large", "l"),
        ("Add", "l x", "s"),
        ("Sub", "s l", "d"),
        ("MatMul", "d w", "y"),
    ],
    "resized": [("Resize", "x  scales", "r"), ("Conv", "r k", "y", {"strides": [2, 2]})],
    "ties": [
        ("MatMul", "x w", "z"),
        ("Relu", "z", "r"),
        ("TopK", "r three", "y i", {"largest": 1}),
    ],
}


@pytest.mark.parametrize("case", HONEST)
def test_honest_fusions_stay(tmp_path, case) -> None:
    constants = {
        "two": np.float32(2),
        "tiny": np.float32(1e-5),
        "root": np.float32(2**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
        "large": np.float32(3e4),
        "g": normal(8),
        "h": normal(8),
        "w": normal(8, 8),
        "k": normal(16, 16, 3, 3),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "three": np.array([3]),
    }
    read = {name for each in HONEST[case] for name in each[1].split()}
    held = {name: value for name, value in constants.items() if name in read}
    nodes = [
        onnx.helper.make_node(each[0], each[1].split(" "), each[2].split(), **dict(*each[3:]))
        for each in HONEST[case]
    ]
    model = onnx_model(nodes, {"x": list(SHAPE)}, {"y": None}, **held)
    built = OnnxRuntime().build(request_of(model, tmp_path))
    assert (built.remarks, built.details["optimization"]) == ((), "all")


def test_rounding_moves_no_size_and_no_exponent() -> None:
    scales, two = np.array([1, 1, 2, 2], np.float32), np.float32(2)
    largest, weights = np.float32(3.4028235e38), normal(16, 16, 3, 3)
    nodes = [
        onnx.helper.make_node("Resize", ["x", "", "scales"], ["r"]),
        onnx.helper.make_node("Pow", ["r", "two"], ["p"]),
        onnx.helper.make_node("Clip", ["p", "", "largest"], ["c"]),
        onnx.helper.make_node("Conv", ["c", "w"], ["y"]),
    ]
    held = {"scales": scales, "two": two, "largest": largest, "w": weights}
    model = onnx_model(nodes, {"x": list(SHAPE)}, {"y": None}, **held)
    moved = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in nudge_weights(model, 1).graph.initializer
    }
    for name in ("scales", "two", "largest"):
        assert np.array_equal(moved[name], held[name])
    assert 100 < measure_snr(weights, moved["w"]) < 140
    assert np.isfinite(nudge(np.full(100, largest), 1)).all()


def test_rounding_that_makes_nan_excuses_nothing() -> None:
    """The root of a sum that cancels is NaN where rounding makes the sum negative."""
    nodes = [("Sub", "x w", "d"), ("Sqrt", "d", "s"), ("Add", "s b", "y")]
    held = {"w": normal(*SHAPE), "b": normal(*SHAPE, seed=3) + 5}
    model = onnx_model(nodes, {"x": list(SHAPE)}, {"y": None}, **held)
    wrong = spoil(onnx_model(nodes, {"x": list(SHAPE)}, {"y": None}, **held), 1)
    bias = next(each for each in wrong.graph.initializer if each.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(held["b"] * np.float32(1.1), "b"))
    assert RewriteGuard([{"x": held["w"]}]).find_difference(model, wrong) is not None


def test_an_ill_conditioned_output_excuses_no_other() -> None:
    """One output is what rounding leaves of a sum, the other is a plain product."""
    nodes = [("Mul", "x large", "l"), ("Add", "l x", "s"), ("Sub", "s l", "y")]
    nodes.append(("Mul", "x g", "z"))
    held = {"large": np.float32(1e7), "g": normal(*SHAPE)}
    sides = {"x": list(SHAPE)}, {"y": None, "z": None}
    model, other = (onnx_model(nodes, *sides, **held) for _ in range(2))
    bias = next(each for each in other.graph.initializer if each.name == "g")
    bias.CopyFrom(onnx.numpy_helper.from_array(held["g"] * np.float32(1.01), "g"))
    other.graph.node[0].CopyFrom(onnx.helper.make_node("Mul", ["large", "x"], ["l"]))
    found = RewriteGuard([{"x": normal(*SHAPE, seed=2)}]).find_difference(model, other)
    assert found is not None
    assert found.tensor == "z"


@pytest.mark.parametrize(
    ("details", "level", "value"),
    [
        ({}, 0, "ORT_ENABLE_ALL"),
        ({"tensor_cores": False, "optimization": "extended"}, 1, "ORT_ENABLE_EXTENDED"),
        ({"optimization": "basic"}, -1, "ORT_ENABLE_BASIC"),
        ({"optimization": "disabled"}, 2, "ORT_DISABLE_ALL"),
    ],
)
def test_a_server_optimizes_no_more_than_the_build(details, level, value) -> None:
    serving = OnnxRuntime().serving(artifact_info(details=details), {}, "1.31")
    assert (serving.graph_level, serving.loader_settings["optimization"]) == (level, value)
