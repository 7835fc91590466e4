"""ONNX Runtime's CUDA provider has no kernel for integer convolutions: they run on the CPU, and the build says so."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optpipe.workspace.environment import list_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU or no driver on this machine")]


def test_a_convolution_that_falls_back_to_the_cpu_is_named_and_not_proven(tmp_path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="on_the_gpu"),
        helper.make_node("DynamicQuantizeLinear", ["a"], ["q", "scale", "zero"], name="quantize"),
        helper.make_node("ConvInteger", ["q", "v", "zero"], ["i"], name="on_the_cpu"),
        helper.make_node("Cast", ["i"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    generator = np.random.default_rng(0)
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8, 16, 16])],
        [numpy_helper.from_array(generator.normal(size=(8, 3, 1, 1)).astype(np.float32), "w"),
         numpy_helper.from_array(generator.integers(0, 255, (8, 8, 1, 1)).astype(np.uint8), "v")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    command = [sys.executable, "-m", "optpipe", "build", "net.onnx", "--backend", "onnxruntime", "--device", "cuda"]
    ran = subprocess.run(
        [*command, "--precision", "fp32", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    (artifact,) = json.loads(ran.stdout)["artifacts"]
    placement = artifact["precision_proof"]["placement"]
    assert placement["provider"] == "CUDAExecutionProvider"
    assert placement["elsewhere"][0]["name"] == "on_the_cpu"
    assert placement["elsewhere"][0]["provider"] == "CPUExecutionProvider"
    assert placement["share"] > 0.5
    assert not artifact["precision_proof"]["proven"]
    assert ran.returncode == 1
