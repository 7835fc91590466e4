"""AOTInductor for real, on the CPU: compiled ahead of time, then loaded and measured by a process that compiles nothing."""

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def optpipe(workspace, *arguments):
    command = [sys.executable, "-m", "optpipe", *arguments, "--workspace", str(workspace), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_digits_compiled_ahead_of_time_answers_like_the_source_in_another_process(exported, tmp_path):
    workspace = exported(tmp_path / "workspace")
    built = optpipe(workspace, "build", "digits", "--precision", "fp32", "--backend", "inductor", "--device", "cpu")
    (artifact,) = built["artifacts"]
    assert artifact["precision_proof"]["proven"]
    assert artifact["parity"]["passed"]
    assert artifact["parity"]["top1_accuracy"] > 0.99
    quick = ("--batch", "2", "--min-time", "0.2", "--percentile", "50", "--max-warm-up", "1", "--max-cv", "100%")
    (measured,) = optpipe(workspace, "bench", "digits", "--backend", "inductor", *quick)["measurements"]
    assert measured["output_check"]["passed"]
    assert measured["samples"] > 10
