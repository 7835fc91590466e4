"""INT8 on a real GPU: AOTInductor computes it in INT8; ONNX Runtime in FP16, so not proven, but the answers must be right."""

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


def test_inductor_computes_digits_in_int8_and_shows_its_tactics(tmp_path):
    command = [sys.executable, "-m", "optpipe", "build", "digits", "--precision", "int8", "--backend", "inductor"]
    command += ["--device", "cuda", "--workspace", str(tmp_path), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (artifact,) = json.loads(ran.stdout)["artifacts"]
    assert artifact["precision_share"]["macs"]["int8"] > 0.95
    assert artifact["parity"]["top1_accuracy"] > 0.98
    shown = subprocess.run(
        [sys.executable, "-m", "optpipe", "show", artifact["id"], "--workspace", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tactics  batch 64: " in shown.stdout
