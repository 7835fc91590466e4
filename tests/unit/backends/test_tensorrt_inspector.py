"""The layers that are kept of an engine: of a network that TensorRT-RTX parsed, and out of the inspector's JSON."""

import json

import pytest
from tests.fakes.tensorrt_api.build_case import SPEC, save_graph

from optpipe.backends.base import BuildRequest
from optpipe.backends.tensorrt import TENSORRT_RTX, layers_from_inspector
from optpipe.core.card import ModelCard, Task
from optpipe.core.entries import ENGINE_LAYERS, EngineLayer, EngineLayers
from optpipe.core.errors import BadInputError
from optpipe.core.precision import Precision
from optpipe.core.records import read_record
from optpipe.workspace.environment import list_gpus

INSPECTED = {  # of the form in NVIDIA's documentation; none was recorded by us
    "Layers": [
        {
            "Name": "conv1 + relu1",
            "LayerType": "CaskConvolution",
            "Inputs": [{"Name": "x", "Dimensions": [8, 3, 16, 16], "Format/Datatype": "Channel major FP16 format"}],
            "Outputs": [{"Name": "b", "Dimensions": [8, 16, 16, 16], "Format/Datatype": "Channel major FP16 format"}],
            "TacticName": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x64x32",
            "TacticValue": "0x9b1d0d9dbb1c1ed0",
        },
        {"Name": "reshape", "LayerType": "NoOp", "Inputs": [], "Outputs": []},
        "a name alone",
    ],
    "Bindings": ["x", "y"],
}


def test_the_inspector_tells_types_and_tactics() -> None:
    first, second, third = layers_from_inspector(json.dumps(INSPECTED))
    assert (first.name, first.op) == ("conv1 + relu1", "CaskConvolution")
    assert first.inputs == first.outputs == ("Channel major FP16 format",)
    assert first.tactic
    assert first.tactic.startswith("sm80_xmma")
    assert second == EngineLayer("reshape", "NoOp", (), ())
    assert third == EngineLayer("a name alone", "", (), ())


@pytest.mark.skipif(bool(list_gpus()), reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_the_parsed_network_is_kept_and_says_so(tmp_path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx-cu13")
    save_graph(tmp_path)
    card = ModelCard("net", "net.onnx", Task.OTHER, (SPEC,))
    request = BuildRequest(card, Precision.FP32, tmp_path / "model.onnx", None, "cuda", {}, tmp_path)
    TENSORRT_RTX.build(request)
    found = read_record(tmp_path / ENGINE_LAYERS, EngineLayers)
    assert found.origin == "parsed network; no NVIDIA GPU to deserialize the engine on"
    computing = [each for each in found.layers if each.op in ("CONVOLUTION", "ACTIVATION")]
    assert [(each.name, each.op, each.inputs[:1], each.outputs) for each in computing] == [
        ("first", "CONVOLUTION", ("fp32",), ("fp32",)),
        ("relu", "ACTIVATION", ("fp32",), ("fp32",)),
        ("second", "CONVOLUTION", ("fp32",), ("fp32",)),
    ]
    assert found.count_types()["fp32"] >= 3


def test_sparsity_is_refused_where_no_weight_has_the_pattern(tmp_path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx-cu13")
    save_graph(tmp_path, sparse=False)
    card = ModelCard("net", "net.onnx", Task.OTHER, (SPEC,))
    asked = BuildRequest(
        card, Precision.FP32, tmp_path / "model.onnx", None, "cuda", {"sparse_weights": "true"}, tmp_path
    )
    with pytest.raises(BadInputError, match="no convolution or matrix product has weights in the 2:4 pattern"):
        TENSORRT_RTX.build(asked)
