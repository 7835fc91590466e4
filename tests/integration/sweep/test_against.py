"""`sweep --against` as a user sees it: a real PASS, and a real FAIL of a network that was made deeper behind the same name."""

import pytest

from tests.integration.conftest import ignore_host, optpipe

NET = """
import os
import torch

INPUTS = [{"name": "x", "dtype": "float32", "min": [1, 512], "opt": [8, 512], "max": [64, 512]}]


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(int(os.environ["DEPTH"]))))
"""
QUICK = (
    "--precision", "fp32", "--backend", "onnxruntime", "--gpu", "cpu", "--processes", "3", "--min-time", "0.2", "--set", "warm-up=0.1",
    "--set", "max-warm-up=0.5", "--max-time", "3", "--set", "percentile=50", "--max-cv", "500%",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("against")
    (made / "net.py").write_text(NET)
    return made


def sweep(folder, name, depth, *arguments):
    """What a sweep of the network at this depth ends with."""
    environment = {"DEPTH": str(depth), **ignore_host(folder)}
    command = ("sweep", "net.py:make", *QUICK, *arguments)
    return optpipe(*command, cwd=folder, workspace=folder / name, **environment)


@pytest.fixture(scope="module")
def baseline(folder):
    sweep(folder, "before", 2).expect(0)
    return folder / "before"


def test_the_same_network_passes_within_a_wide_tolerance(folder, baseline):
    ran = sweep(folder, "same", 2, "--against", baseline, "--set", "tolerance=900%", "--json").expect(0)
    (cell,) = ran.document["regression"]["cells"]
    assert (cell["verdict"], cell["ratio"]["high"] <= 10) == ("PASS", True)


def test_a_network_that_became_ten_times_deeper_fails(folder, baseline):
    against = ("--against", baseline, "--set", "tolerance=50%")
    (cell,) = sweep(folder, "slower", 20, *against, "--json").expect(1).document["regression"]["cells"]
    assert (cell["verdict"], cell["ratio"]["low"] > 1.5) == ("FAIL", True)
    for depth, stored in ((20, True), (2, False)):  # what runs again is what the code makes now
        planned = sweep(folder, "slower", depth, "--dry-run", "--json")
        assert [row["stored"] for row in planned.document["rows"]] == [stored]
