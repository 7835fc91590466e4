"""FP8 programs of small transformers: which layers are in FP8, and their outputs against NumPy and against the Q/DQ graph."""

from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from tests.fakes.emulation import register_emulation
from tests.fakes.fp8_models import (
    BERT,
    VIT,
    draw,
    export_quickly,
    make_request,
    measure_ranges,
    run_onnx,
)
from tests.fakes.graphs import onnx_model

from optpipe.backends import inductor, torch_fp8
from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor import Inductor
from optpipe.backends.onnx_quantized import QuantizedLayer
from optpipe.backends.registry import backends_from_text
from optpipe.backends.torch_fp8 import lower_fp8
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import export_rewritten
from optpipe.build.build import build_model
from optpipe.build.plan import BuildPlan
from optpipe.core.card import InputSpec
from optpipe.core.entries import Gpu, SampleSetSummary
from optpipe.core.errors import MissingError
from optpipe.core.events import SilentListener
from optpipe.core.precision import Precision, prove_precision
from optpipe.quantize.qdq import (
    choose_scale,
    place_qdq,
    qdq_from_onnx,
    quantize_graph,
    round_to_e4m3,
)
from optpipe.quantize.ranges import CalibrationTable, open_model_session
from optpipe.workspace.store import Store


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=name, marks=pytest.mark.slow)
        for name, each in (("vit", VIT), ("bert", BERT))
    ],
)
def exported(request, tmp_path_factory):
    wanted = make_request(request.param, tmp_path_factory.mktemp("fp8"))
    program, missed = lower_fp8(wanted)
    return wanted, export_rewritten(program, wanted), missed


def test_linear_layers_are_in_fp8_and_outputs_are_those_of_the_qdq_graph_at_every_batch_size(
    exported,
):
    wanted, program, missed = exported
    assert missed == ()
    graph, batch = onnx.load(wanted.graph), draw(wanted.card.inputs[0])
    layers = layers_from_program(program, Precision.FP8)
    eight = [each for each in layers if each.type == "fp8"]
    assert {each.op for each in eight} == {"_scaled_mm"}
    held = (
        each for each in graph.graph.initializer if each.data_type == onnx.TensorProto.FLOAT8E4M3FN
    )
    count = sum(len(each.dims) == 2 for each in held)  # the weights, without zero points
    joined = (
        4 if wanted.card.inputs[0].dtype == "int64" else 0
    )  # queries, keys, and values are one layer
    assert len(eight) == count - joined > 7
    proof = prove_precision(Precision.FP8, layers)
    assert proof.proven
    assert 0.8 < proof.share.macs["fp8"] < 1  # attention is not in FP8
    assert all("scaled_mm" not in each.op for each in proof.others)
    expected, reference = (
        run_onnx(graph, batch)[0],
        run_onnx(onnx.load(wanted.directory / "model.onnx"), batch)[0],
    )
    exact, _ = lower_fp8(wanted, Precision.FP32)
    with torch.inference_mode():
        found, alone = (program.module()(each)[0].numpy() for each in (batch, batch[:1]))
        own = exact(batch)[0].numpy()
    noise = np.square(expected - reference).sum()
    assert noise > 0
    # sums in another order and the approximation of GELU move few values across the middle between two E4M3 numbers
    assert np.square(own - expected).sum() < noise / 4
    # FP16 moves more of them, but the outputs stay as near to FP32's
    assert np.square(found - reference).sum() < 2 * noise
    assert np.square(alone - reference[:1]).sum() < 2 * noise
    register_emulation()
    stepped, _ = lower_fp8(
        wanted, kernels=True
    )  # as on a GPU: attention is a step, in ViT's case of E4M3 numbers
    kinds = [getattr(each, "kind", None) for each in stepped.children()]
    assert kinds.count(torch.float8_e4m3fn) == (0 if joined else 2)
    with torch.inference_mode():
        assert np.square(stepped(batch)[0].float().numpy() - reference).sum() < 2 * noise


class Parts(torch.nn.Module):
    """One layer twice, one as GPT-2 writes it, one with a bias that is computed, and one without a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice = torch.nn.Linear(16, 16)
        self.turned = torch.nn.Parameter(torch.randn(16, 32) / 4)
        self.weight = torch.nn.Parameter(torch.randn(48, 32) / 4)
        self.plain = torch.nn.Parameter(torch.randn(48, 16) / 4)
        self.bias, self.part = (torch.nn.Parameter(torch.randn(size)) for size in (32, 24))

    def forward(self, given):
        hidden = torch.addmm(self.bias, self.twice(self.twice(given).relu()), self.turned)
        bias = torch.cat((self.part, torch.zeros_like(self.part)))
        return torch.nn.functional.linear(hidden, self.weight, bias) @ self.plain


@pytest.mark.slow
def test_layers_are_found_as_modules_write_them_and_unknown_ones_are_named():
    module, given = Parts().half(), torch.randn(4, 16).half()
    wide = {name: each.detach().float() for name, each in module.named_parameters()}
    known = {
        "a": wide["twice.weight"],
        "b": wide["twice.weight"],
        "c": wide["turned"].t(),
        "d": wide["weight"],
    }
    known |= {"e": wide["plain"].t(), "other": wide["twice.weight"].flip(0)}
    layers = []
    for name, each in known.items():
        values = each.contiguous().numpy()
        scale = choose_scale(float(np.abs(values).max()))
        weight, read_scale = round_to_e4m3(values, scale), 2.0 ** -(6 if name == "b" else 5)
        layers.append(QuantizedLayer(name, weight, np.full(len(weight), scale), read_scale))
    program = torch.export.export(module, (given,)).module()
    assert torch_fp8.replace_linear_layers(program, layers, wide) == ("other",)
    scales = [
        float(each.scale) for _, each in program.named_children() if hasattr(each, "weight_scale")
    ]
    assert scales[:2] == [2.0**-5, 2.0**-6], "a shared weight serves its layers in order"
    assert "twice.weight" not in dict(program.named_parameters())
    expected = module(given).float()
    noise = (program(given).float() - expected).square().sum() / expected.square().sum()
    assert noise < 0.01


def test_a_relu_ahead_of_an_fp8_layer_is_computed():
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in (("w1", (32, 48)), ("w2", (48, 16)))
    }
    nodes = [("MatMul", "x w1", "a"), ("Relu", "a", "r"), ("MatMul", "r w2", "y")]
    model = onnx_model(nodes, {"x": ["n", 32]}, {"y": ["n", 16]}, opset=20, **weights)
    placed, batch = (
        place_qdq(model, "fp8"),
        torch.from_numpy(rng.standard_normal((8, 32), np.float32)),
    )
    graph = qdq_from_onnx(model, placed, measure_ranges(model, placed.tensors, batch))
    found, exact = (
        open_model_session(graph).run(None, {"x": batch.numpy()})[0],
        run_onnx(model, batch)[0],
    )
    assert np.square(found - exact).sum() < 0.01 * np.square(exact).sum()


class Odd(torch.nn.Module):
    """One layer twice, a layer of zeros, one whose input is zero, and one of 24 input features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.zeros, self.unseen = (torch.nn.Linear(32, 32) for _ in range(3))
        self.narrow = torch.nn.Linear(24, 32)
        torch.nn.init.zeros_(self.zeros.weight)

    def forward(self, given):
        found = self.twice(self.twice(given).relu())
        return (
            found
            + self.zeros(found)
            + self.unseen((given - 100).relu())
            + self.narrow(given[:, :24])
        )


@pytest.mark.slow
def test_odd_layers_stay_in_fp16_with_their_reason_or_compute_what_they_did(tmp_path):
    spec = InputSpec("given", "float32", *((size, 32) for size in (1, 4, 16)), batch=0)
    card = export_quickly(Odd().eval(), spec, tmp_path / "model.onnx")
    model, batch = onnx.load(tmp_path / "model.onnx"), draw(spec)
    first, second, *others = place_qdq(model, "fp8").layers
    ranges = measure_ranges(model, place_qdq(model, "fp8").tensors, batch)
    table = CalibrationTable(
        method="max",
        model="odd",
        graph_sha256="",
        transform_sha256=None,
        set=SampleSetSummary("x", "", 4, 0),
        keep=(first,),
        ranges=ranges,
    )
    graph, placed = quantize_graph(model, table, "fp8")
    assert {each.reason for each in placed.skipped} == {
        "kept in floating point by request",
        "its input was empty or zero in all calibration data",
        "a matrix of 32 × 24: FP8 kernels take multiples of 16",
    }
    assert second in placed.layers
    assert len(placed.layers) == len(others)  # of `zeros` and the second use of `twice`
    onnx.save(graph, tmp_path / "fp8.onnx")
    request = BuildRequest(
        card, Precision.FP8, tmp_path / "fp8.onnx", lambda: Odd().eval(), "cpu", {}, tmp_path
    )
    program, missed = lower_fp8(request, Precision.FP32)
    assert missed == ()
    far = batch + 120  # what calibration has not seen
    for each in (batch, far):
        with torch.inference_mode():
            expected, found = run_onnx(graph, each)[0], program(each)[0].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_an_older_gpu_is_refused_at_once(monkeypatch, tmp_path):
    class Unloadable:
        def __getattr__(self, name):
            raise AssertionError(f"{name} of the model is read")

    gpu = Gpu(0, "NVIDIA A100", "8.0", 0, "580")
    monkeypatch.setattr(inductor, "list_gpus", lambda: (gpu,))
    monkeypatch.setattr(
        Inductor, "probe_capability", lambda *_: type("Found", (), {"builds": True, "runs": True})
    )
    assert "9.0 or later for int8" in str(inductor.find_old_gpu("cuda", Precision.INT8))
    for named in (True, False):
        plan = BuildPlan(
            (Precision.FP8,), (Inductor(),), named=named, automatic=not named, device="cuda"
        )
        with pytest.raises(MissingError) as refused:
            build_model(
                cast("Any", Unloadable()), plan, Store(tmp_path / "workspace"), SilentListener()
            )
        assert str(refused.value) == (
            "nothing can be built: inductor needs a GPU of compute capability 8.9 or later for fp8; NVIDIA A100 has 8.0"
        )
    monkeypatch.setattr(inductor, "list_gpus", lambda: (Gpu(0, "NVIDIA L4", "8.9", 0, "580"),))
    assert inductor.find_old_gpu("cuda", Precision.FP8) is None


def test_backend_auto_adds_the_one_that_has_fp8():
    assert "inductor" in [each.name for each in backends_from_text("auto", "cpu", (Precision.FP8,))]
    assert "inductor" not in [
        each.name for each in backends_from_text("auto", "cpu", (Precision.FP16,))
    ]
