"""`sweep --against` as a user sees it: a real PASS, and a real FAIL of a network that was made deeper behind the same name."""

import os

import pytest

from tests.integration.conftest import optpipe

NET = """
import os
import torch

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 512], "opt": [8, 512], "max": [64, 512]}]


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(int(os.environ["DEPTH"]))))
"""
UNDISTURBED = """
import optpipe.measure.validity

optpipe.measure.validity.find_reasons = lambda evidence: ()  # other work on the machine is not what is tested
"""
QUICK = (
    "--precision", "fp32", "--backend", "onnxruntime", "--gpu", "cpu", "--processes", "5", "--min-time", "0.3", "--set", "warm-up=0.1",
    "--set", "max-warm-up=1", "--max-time", "5", "--set", "percentile=90", "--max-cv", "500%",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("against")
    (made / "net.py").write_text(NET)
    (made / "sitecustomize.py").write_text(UNDISTURBED)
    return made


def sweep(folder, name, depth, *arguments):
    """What a sweep of the network at this depth ends with; a cell that is INVALID even so is measured once more."""
    environment = {"DEPTH": str(depth), "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    command = ("sweep", "net.py:make", *QUICK, *arguments)
    for _ in range(3):
        ran = optpipe(*command, "--json", cwd=folder, workspace=folder / name, **environment)
        if {row["state"] for row in ran.document["rows"]} <= {"done", "to run"}:
            break
    return ran, optpipe(*command, cwd=folder, workspace=folder / name, **environment)


@pytest.fixture(scope="module")
def baseline(folder):
    ran, _ = sweep(folder, "before", 8)
    assert ran.status == 0, ran.stderr + ran.stdout
    return folder / "before"


def test_the_same_network_passes_within_a_wide_tolerance(folder, baseline):
    ran, shown = sweep(folder, "same", 8, "--against", baseline, "--set", "tolerance=900%")
    assert (ran.status, shown.status) == (0, 0), shown.stdout
    (cell,) = ran.document["regression"]["cells"]
    assert (cell["verdict"], cell["ratio"]["high"] <= 10) == ("PASS", True)
    assert f"PASS  against {baseline}: 1 PASS; tolerance 900.0%" in shown.stdout


def test_a_network_that_became_ten_times_deeper_fails(folder, baseline):
    ran, shown = sweep(folder, "slower", 80, "--against", baseline, "--set", "tolerance=50%")
    assert (ran.status, shown.status) == (1, 1), shown.stdout
    (cell,) = ran.document["regression"]["cells"]
    assert (cell["verdict"], cell["ratio"]["low"] > 1.5) == ("FAIL", True)
    for depth, stored in ((80, True), (8, False)):  # what runs again is what the code makes now
        planned, _ = sweep(folder, "slower", depth, "--dry-run")
        assert [row["stored"] for row in planned.document["rows"]] == [stored]
    said = " ".join(shown.stdout.split())
    assert "exceeds the tolerance of 50.0%" in said
    assert f"FAIL against {baseline}: 1 FAIL; tolerance 50.0%, at most 2.5% false FAIL over all cells (Holm)" in said
