"""Commands in a folder whose files have the names of modules that Python, torch and our children import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.core.test_child_processes import plant

OPTPIPE = str(Path(sys.executable).with_name("optpipe"))
NET = """
import torch
from layers import Small

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 4], "opt": [2, 4], "max": [8, 4]}]

def make():
    torch.manual_seed(0)
    return Small()
"""
LAYERS = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network whose file imports a neighbor, beside files that nobody may import."""
    made = tmp_path_factory.mktemp("user")
    (made / "net.py").write_text(NET)
    (made / "layers.py").write_text(LAYERS)
    plant(made, made / "marker")
    run(made, "build", "net.py:make", "--precision", "fp32", "--backend", "onnxruntime,inductor")
    return made


def run(folder, *words):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    finished = subprocess.run(
        [OPTPIPE, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert finished.returncode in (0, 1, 5), finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
    marker = folder / "marker"
    assert not marker.exists(), marker.read_text()


BENCH = ("bench", "net.py:make", "--backend", "onnxruntime", "--batch", "1", "--processes", "2")
SWEEP = ("sweep", "net.py:make", "--precision", "fp32", "--batch", "1", "--backend", "onnxruntime")
PROFILE = ("profile", "net.py:make", "--stage", "inference", "--precision", "fp32")


@pytest.mark.parametrize(
    "words",
    [
        (*BENCH, "--min-time", "0.1"),
        (*SWEEP, "--processes", "1", "--min-time", "0.1"),
        (*PROFILE, "--backend", "onnxruntime"),
        ("doctor",),
    ],
    ids=lambda words: words[0],
)
def test_no_file_of_the_users_folder_runs(folder, words) -> None:
    run(folder, *words)
