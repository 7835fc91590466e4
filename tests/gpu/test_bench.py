"""`optpipe bench` on a real GPU: events, memory, energy's reason, several streams."""

import json
import subprocess
import sys

import pytest

from optpipe.workspace.environment import list_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU or no driver on this machine")]
QUICK = ("--min-time", "0.5", "--percentile", "90", "--set", "max-warm-up=3", "--json")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-bench")
    command = [
        sys.executable,
        "-m",
        "optpipe",
        "build",
        "digits",
        "--precision",
        "fp16",
        "--backend",
        "onnxruntime,torch",
    ]
    subprocess.run([*command, "--device", "cuda", "--workspace", str(folder)], check=True, capture_output=True)
    return folder


def bench(workspace, *arguments):
    command = [sys.executable, "-m", "optpipe", "bench", "digits", *arguments, *QUICK, "--workspace", str(workspace)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)["measurements"]


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("mode", ["compute", "end-to-end"])
def test_parts_are_timed_by_events(workspace, backend, mode):
    row = bench(workspace, "--backend", backend, "--mode", mode, "--batch", "8")[0]
    assert row["output_check"]["passed"]
    assert row["subject"]["cuda_graph"] is True
    assert (
        0
        < row["parts_ns"]["compute"]["percentiles"]["p50"]["value"]
        <= row["latency_ns"]["percentiles"]["p50"]["value"]
    )
    assert ("h2d" in row["parts_ns"]) == (mode == "end-to-end")
    assert row["device_peak_bytes"] > 0


@pytest.mark.parametrize("scenario", ["offline", "multi-stream"])
def test_several_streams_give_right_answers(workspace, scenario):
    row = bench(workspace, "--backend", "onnxruntime", "--scenario", scenario, "--streams", "2", "--batch", "8")[0]
    assert row["output_check"]["passed"]
