"""Divergence by layer: faults planted in real networks are found where they were planted."""

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tests.fakes.emulation import register_emulation
from tests.fakes.entries import artifact_info
from tests.fakes.fp8_models import draw, export_quickly, measure_ranges
from tests.fakes.graphs import onnx_model
from tests.tiers import leave_to_slow_tier

from optpipe.backends.base import BuildRequest
from optpipe.backends.onnxruntime_session import OnnxRuntimeSession
from optpipe.backends.plain_session import mark_source
from optpipe.backends.registry import BACKENDS
from optpipe.backends.tensorrt import TensorRTRTX
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_marked import MarkedProgram, run_as_it_is
from optpipe.backends.torch_marked import mark_source as mark_module
from optpipe.core.card import InputSpec
from optpipe.core.errors import BadInputError
from optpipe.core.precision import Precision
from optpipe.evaluate.document import page_from_layers
from optpipe.evaluate.layers import (
    BuildDivergence,
    LayerComparison,
    choose_tensors,
    compare_tensors,
    find_compiler_fault,
    group_tensors,
)
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx
from optpipe.report.html import render_html

SPEC = InputSpec("x", "float32", (1, 3, 16, 16), (2, 3, 16, 16), (4, 3, 16, 16))
SATURATED = "/Relu_1_output_0"


class Network(torch.nn.Module):
    """Convolutions of square maps, a cast that truncates, and a linear layer."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.stem, self.one, self.two = (
            torch.nn.Conv2d(size, 16, 3, padding=1) for size in (3, 16, 16)
        )
        self.head = torch.nn.Linear(16, 16)
        self.shift = torch.nn.Parameter(
            torch.full((16, 1, 1), -2.0 if fault == "constant" else 1.0)
        )
        if fault == "weight":
            self.one.weight, self.two.weight = self.two.weight, self.one.weight

    def forward(self, x):
        value = self.stem(x).relu()
        value = (value.transpose(2, 3) if self.fault == "transposed" else value) * self.shift
        value = self.two(self.one(value).relu()).sigmoid()
        eighths = value * 8
        rough = eighths if self.fault == "cast" else eighths.to(torch.int32).to(value.dtype)
        return self.head((rough / 8).abs().mean((2, 3)))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The network without a fault: its graph, its card, and the module marked."""
    path = tmp_path_factory.mktemp("good") / "good.onnx"
    card = export_quickly(Network(), SPEC, path)
    return (
        path,
        card,
        mark_module(BuildRequest(card, Precision.FP32, path, Network, "cpu", {}, path.parent)),
    )


def write_int8(path: Path, bad: Path, backend: str, fault: str = "") -> None:
    graph = onnx.load(path)
    placed = place_qdq(graph, "cpu" if backend == "onnxruntime" else "tensorrt")
    ranges = measure_ranges(graph, placed.tensors, draw(SPEC))
    ranges[SATURATED] = replace(
        ranges[SATURATED], amax=ranges[SATURATED].amax / (32 if fault else 1)
    )
    onnx.save(qdq_from_onnx(graph, placed, ranges), bad)


def compare(backend: str, precision: str, fault: str, folder, good) -> BuildDivergence:
    (path, card, source), bad = good, folder / "bad.onnx"
    if precision == "int8":
        write_int8(path, bad, backend, fault)
    elif backend in ("onnxruntime", "tensorrt-rtx"):
        export_quickly(Network(fault), SPEC, bad)
    request = BuildRequest(
        card, Precision(precision), bad, partial(Network, fault), "cpu", {}, folder
    )
    build: Any
    if backend == "emulation":
        register_emulation()
        build = MarkedProgram(lower_program(request)[0], request, run_as_it_is, source)
        plain = build.cut(build.outputs)[1]
    else:
        made = BACKENDS[backend].build(request)
        info = artifact_info(
            precision=precision, options=made.options, details=made.details, device="cpu"
        )
        opened, build = BACKENDS[backend].open_marked(info, request, path)
        source = source if backend in ("torch", "inductor") else opened
        plain = BACKENDS[backend].load(folder, info, {}).run
    samples = [{"x": draw(SPEC, seed)[:1].numpy()} for seed in range(2)]
    tensors, marked = compare_tensors(source, build, samples, choose_tensors(source, build), plain)
    return BuildDivergence(
        "", "", {"fp32": 60, "fp16": 34, "int8": 10}[precision], tensors, 0, "", marked
    )


def run_without_gpu(folder: Path, _info: Any, _options: Any) -> OnnxRuntimeSession:
    """Not real: ONNX Runtime runs the graph that TensorRT-RTX has built, since no machine of ours runs its engines."""
    assert (folder / "model.engine").stat().st_size > 1000
    graph = folder / "model.onnx"
    return OnnxRuntimeSession(graph if graph.is_file() else folder / "bad.onnx", "cpu", {})


ONNX = {"constant": "/Mul_", "weight": SATURATED, "transposed": SATURATED, "cast": "/Div_output_0"}
TORCH = {"constant": "mul", "weight": "one conv2d", "transposed": "one conv2d", "cast": "div"}


@pytest.mark.parametrize(
    ("backend", "precision", "fault", "expected"),
    [
        *leave_to_slow_tier(
            (
                *(("onnxruntime", "fp32", *each) for each in ONNX.items()),
                ("onnxruntime", "int8", "range", SATURATED),
                ("emulation", "int8", "range", "relu_1"),
            ),
            but=[("onnxruntime", "int8", "range", SATURATED)],
        ),
        ("tensorrt-rtx", "fp32", "weight", "/one/Conv"),
        pytest.param("tensorrt-rtx", "int8", "range", SATURATED, marks=pytest.mark.slow),
        *(
            pytest.param("torch", "fp16", fault, layer, marks=pytest.mark.slow)
            for fault, layer in TORCH.items()
        ),
        pytest.param("inductor", "fp16", "cast", TORCH["cast"], marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_named(
    backend, precision, fault, expected, tmp_path, good, monkeypatch
) -> None:
    monkeypatch.setattr(TensorRTRTX, "load", staticmethod(run_without_gpu))
    found = compare(backend, precision, fault, tmp_path, good)
    assert expected in f"{found.first.tensor} {found.first.layer}"
    assert found.first in found.worst[:2], "its layer alone has the error too"
    assert (found.marked.snr_db or 100) > 55
    assert fault != "range" or found.first.clipped > 0.1
    html = render_html(
        page_from_layers(
            LayerComparison("small", "noise", 2, (found,), {"torch fp16": "no GPU"}), {}
        )
    )
    assert html.count("its layer alone") > 0 < html.count("<svg")
    assert all(
        each in html
        for each in ("torch fp16: no GPU", f"{found.first.tensor} ({found.first.layer}): ")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "precision"), [("onnxruntime", "int8"), ("emulation", "int8"), ("torch", "fp16")]
)
def test_without_a_fault_no_tensor_is_named(backend, precision, tmp_path, good) -> None:
    assert compare(backend, precision, "", tmp_path, good).first is None


@pytest.mark.slow
def test_a_fault_of_the_compiler_is_cut_out_of_the_network(tmp_path, monkeypatch, capsys) -> None:
    def break_sigmoids(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.sigmoid.default:
                node.target = torch.ops.aten.tanh.default

    card = export_quickly(Network(), SPEC, tmp_path / "m.onnx")
    request = BuildRequest(card, Precision.FP16, tmp_path / "m.onnx", Network, "cpu", {}, tmp_path)
    source, build = BACKENDS["inductor"].open_marked(
        artifact_info(precision="fp16", device="cpu"), request, Path()
    )
    tensor = next(name for name, layer in source.layers.items() if "sigmoid" in layer)
    inputs = {"x": draw(SPEC)[:1].numpy()}
    assert find_compiler_fault(source, *build.open_apart(), inputs, tensor, 34, tmp_path) is None

    monkeypatch.setattr(torch._inductor.config, "post_grad_custom_post_pass", break_sigmoids)
    compiled, uncompiled = find_compiler_fault(
        source, *build.open_apart(), inputs, tensor, 34, tmp_path
    )
    assert compiled.snr_db < 10 < 50 < uncompiled.snr_db
    cut = torch.export.load(tmp_path / "subgraph.pt2").graph
    assert len([node for node in cut.nodes if node.op == "call_function"]) == 1, "the sigmoid alone"
    runpy.run_path(str(tmp_path / "reproduce.py"))
    assert float(capsys.readouterr().out.split("SNR ")[1].split(" dB")[0]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt-rtx"])
def test_a_fault_of_a_graph_compiler_is_cut_out_as_onnx(
    backend, tmp_path, good, monkeypatch, capsys
) -> None:
    """The layer `two` loses its INT8 weights wherever a graph is optimized."""
    (path, card, _), bad, create = good, tmp_path / "bad.onnx", onnxruntime.InferenceSession

    def lose_weights(graph, options, *more, **named):
        model = onnx.load_from_string(graph) if isinstance(graph, bytes) else onnx.load(graph)
        optimizes = (
            options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        )
        for each in (
            each
            for each in model.graph.initializer
            if optimizes and each.name.startswith("two.weight_q")
        ):
            each.CopyFrom(numpy_helper.from_array(np.zeros(each.dims, np.int8), each.name))
        return create(model.SerializeToString(), options, *more, **named)

    monkeypatch.setattr(TensorRTRTX, "load", staticmethod(run_without_gpu))
    write_int8(path, bad, backend)
    request = BuildRequest(card, Precision.INT8, bad, None, "cpu", {}, tmp_path)
    made = BACKENDS[backend].build(request)
    info = artifact_info(precision="int8", options=made.options, details=made.details, device="cpu")
    source, build = BACKENDS[backend].open_marked(info, request, path)
    inputs, folder = {"x": draw(SPEC)[:1].numpy()}, tmp_path / "reproducer"
    assert (
        find_compiler_fault(source, *build.open_apart(), inputs, "/two/Conv_output_0", 10, folder)
        is None
    )

    monkeypatch.setattr(onnxruntime, "InferenceSession", lose_weights)
    compiled, uncompiled = find_compiler_fault(
        source, *build.open_apart(), inputs, "/two/Conv_output_0", 10, folder
    )
    assert compiled.snr_db < 10 < 20 < uncompiled.snr_db
    cut = onnx.load(folder / "subgraph.onnx")
    onnx.checker.check_model(cut, full_check=True)
    assert [node.op_type for node in cut.graph.node].count("Conv") == 1, "the layer alone"
    if (
        backend == "onnxruntime"
    ):  # TensorRT-RTX compiles only on a GPU without the pipeline's own settings
        runpy.run_path(str(folder / "reproduce.py"))
        assert float(capsys.readouterr().out.split("SNR ")[1].split(" dB")[0]) < 10


def test_an_unknown_tensor_has_a_nearest_one_and_an_if_is_reported(tmp_path) -> None:
    inner = onnx_model([("Neg", "a", "b")], {}, {"b": [1, 4]}).graph
    nodes = [("Exp", "x", "a"), ("If", "yes", "y", {"then_branch": inner, "else_branch": inner})]
    onnx_model(nodes, {"x": [1, 4]}, {"y": [1, 4]}, path=tmp_path / "m.onnx", yes=np.array(True))
    found = mark_source(tmp_path / "m.onnx", [InputSpec("x", "float32", *[(1, 4)] * 3)])
    assert "2 operators inside If" in found.hidden
    with pytest.raises(BadInputError, match="no such tensor; did you mean a"):
        choose_tensors(found, found, ["aa"])
    assert group_tensors(["a", "b", "c"], dict.fromkeys("abc", 1 << 25)) == [["a", "b"], ["c"]]
