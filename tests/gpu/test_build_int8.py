"""INT8 through ONNX Runtime on a real GPU: computed in FP16 there, so not proven, but the answers must be right."""

import json
import subprocess
import sys

import pytest

from optpipe.workspace.environment import list_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU or no driver on this machine")]


@pytest.mark.parametrize("layout", [(), ("--option", "onnxruntime.nhwc=false")])
def test_digits_in_int8_answers_like_the_source(tmp_path, layout):
    command = [sys.executable, "-m", "optpipe", "build", "digits", "--precision", "int8", "--backend", "onnxruntime"]
    command += ["--device", "cuda", *layout, "--workspace", str(tmp_path), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr  # the share of INT8 multiply-adds is 0 %, and a build says so
    (artifact,) = json.loads(ran.stdout)["artifacts"]
    assert artifact["parity"]["top1_accuracy"] > 0.98
