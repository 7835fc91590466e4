"""`optpipe build` and `bench` on a real GPU: what a provider computes in which type, and times by events."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests.fakes.graphs import onnx_model
from tests.integration.conftest import optpipe

QUICK = ("--min-time", "0.5", "--percentile", "90", "--set", "max-warm-up=3", "--json")


def build(folder, *words, model="digits", status=0):
    ran = optpipe(
        "build",
        model,
        "--device",
        "cuda",
        *words,
        "--json",
        workspace=folder / "workspace",
        cwd=folder,
    )
    assert ran.status == status, ran.stderr
    return ran.document["artifacts"]


def test_convolutions_in_fp16_on_onnx_runtime_have_no_bias_of_their_own(tmp_path) -> None:
    """Biases are additions, and no pass puts them back."""
    (artifact,) = build(tmp_path, "--precision", "fp16", "--backend", "onnxruntime")
    nodes = onnx.load(tmp_path / artifact["path"]).graph.node
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    assert convolutions
    assert all(len(node.input) == 2 for node in convolutions)
    assert sum(node.name.endswith("_bias") for node in nodes) == len(convolutions)


@pytest.mark.parametrize("layout", [(), ("--option", "onnxruntime.nhwc=false")])
def test_digits_in_int8_on_onnx_runtime_answers_like_the_source_and_is_not_proven(tmp_path, layout):
    """It computes in FP16."""
    (artifact,) = build(
        tmp_path, "--precision", "int8", "--backend", "onnxruntime", *layout, status=1
    )
    assert artifact["parity"]["top1_accuracy"] > 0.98


def test_inductor_computes_digits_in_int8_and_records_its_tactics(tmp_path):
    (artifact,) = build(tmp_path, "--precision", "int8", "--backend", "inductor")
    assert artifact["precision_proof"]["share"]["macs"]["int8"] > 0.95
    assert artifact["parity"]["top1_accuracy"] > 0.98
    shown = optpipe("store", "show", artifact["id"], "--json", workspace=tmp_path / "workspace")
    assert shown.document["manifest"]["info"]["details"]["tactics"].keys() == {
        "1",
        "8",
        "16",
        "64",
        "256",
    }


def test_a_convolution_that_falls_back_to_the_cpu_is_named_and_not_proven(tmp_path) -> None:
    """The CUDA provider has no kernel for integer convolutions."""
    nodes = [
        ("Conv", "x w", "a", {"name": "on_the_gpu"}),
        ("DynamicQuantizeLinear", "a", "q scale zero", {"name": "quantize"}),
        ("ConvInteger", "q v zero", "i", {"name": "on_the_cpu"}),
        ("Cast", "i", "y", {"name": "cast", "to": TensorProto.FLOAT}),
    ]
    draw = np.random.default_rng(0)
    first, second = (
        draw.normal(size=(8, 3, 1, 1)).astype(np.float32),
        draw.integers(0, 255, (8, 8, 1, 1), np.uint8),
    )
    shapes = {"x": ["batch", 3, 16, 16]}, {"y": ["batch", 8, 16, 16]}
    onnx_model(nodes, *shapes, path=tmp_path / "net.onnx", w=first, v=second)
    words = ("--precision", "fp32", "--backend", "onnxruntime")
    (artifact,) = build(tmp_path, *words, model="net.onnx", status=1)
    placement = artifact["precision_proof"]["placement"]
    assert placement["provider"] == "CUDAExecutionProvider"
    assert placement["elsewhere"][0]["name"] == "on_the_cpu"
    assert placement["elsewhere"][0]["provider"] == "CPUExecutionProvider"
    assert placement["share"] > 0.5
    assert not artifact["precision_proof"]["proven"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-bench")
    build(folder, "--precision", "fp16", "--backend", "onnxruntime,torch")
    return folder / "workspace"


def bench(workspace, *words):
    ran = optpipe("bench", "digits", "--batch", "8", *words, *QUICK, workspace=workspace).expect(0)
    return ran.document["measurements"][0]


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("mode", ["compute", "end-to-end"])
def test_parts_are_timed_by_events(workspace, backend, mode):
    row = bench(workspace, "--backend", backend, "--mode", mode)
    assert row["output_check"]["passed"]
    assert row["subject"]["cuda_graph"] is True
    assert 0 < row["parts_ns"]["compute"]["mean"] <= row["latency_ns"]["mean"]
    assert ("h2d" in row["parts_ns"]) == (mode == "end-to-end")
    assert row["device_peak_bytes"] > 0


@pytest.mark.parametrize("scenario", ["offline", "multi-stream"])
def test_several_streams_give_right_answers(workspace, scenario):
    row = bench(workspace, "--backend", "onnxruntime", "--scenario", scenario, "--streams", "2")
    assert row["output_check"]["passed"]
