"""Triton's kernels in its interpreter, on the CPU: the same numbers as the emulation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[4]


@pytest.mark.slow
def test_every_kernel_gives_the_emulation_s_numbers():
    command = [sys.executable, "-m", "tests.unit.backends.torch_int8.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    compared = json.loads(ran.stdout)
    kernels = {tactic.split()[0] for tactic, _ in compared}
    assert {
        "int8_wgmma_product",
        "int8_wgmma_convolution_gathered",
        "int8_wgmma_convolution_boxes",
        "int8_wgmma_linear",
        "fp16_wgmma_stem",
    } <= kernels
    assert [row for row in compared if row[1] > 1e-3] == []  # INT8 equal, FP16 and FP32 to rounding
