"""FP16 on ONNX Runtime's CUDA provider: biases are additions, no pass puts them back, and the answers are verified."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from optpipe.workspace.environment import list_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU or no driver on this machine")]


def test_convolutions_have_no_bias_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optpipe", "build", "digits", "--precision", "fp16", "--backend", "onnxruntime"]
    arguments = [*command, "--device", "cuda", "--workspace", str(tmp_path / "workspace"), "--json"]
    built = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (artifact,) = json.loads(built.stdout)["artifacts"]
    nodes = onnx.load(artifact["path"]).graph.node
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    assert convolutions
    assert all(len(node.input) == 2 for node in convolutions)
    assert sum(node.name.endswith("_bias") for node in nodes) == len(convolutions)
