"""AOTInductor for real, on the CPU: compiled ahead of time, then loaded and measured by a process that compiles nothing."""

import json
import shutil

import pytest

from tests.integration.conftest import optpipe

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def done(*arguments, workspace):
    ran = optpipe(*arguments, "--json", workspace=workspace)
    assert ran.status == 0, ran.stderr
    return ran.document


def test_digits_compiled_ahead_of_time_answers_like_the_source_in_another_process(exported, tmp_path):
    workspace = exported(tmp_path / "workspace")
    built = done(
        "build", "digits", "--precision", "fp32", "--backend", "inductor", "--device", "cpu", workspace=workspace
    )
    (artifact,) = built["artifacts"]
    assert artifact["precision_proof"]["proven"]
    assert artifact["parity"]["passed"]
    assert artifact["parity"]["top1_accuracy"] > 0.99
    quick = (
        "--processes",
        "1",
        "--batch",
        "2",
        "--min-time",
        "0.2",
        "--percentile",
        "50",
        "--max-warm-up",
        "1",
        "--max-cv",
        "100%",
    )
    (measured,) = done("bench", "digits", "--backend", "inductor", *quick, workspace=workspace)["measurements"]
    assert measured["output_check"]["passed"]
    assert measured["samples"] > 10
    manifest = next((workspace / "store").glob(f"artifact-{artifact['id']}*")) / "manifest.json"
    for key, said in (
        ("compiled_by", "compiled by torch 1.0, this is torch"),
        ("compiled_for", "compiled for 1.0, this"),
    ):
        intact = manifest.read_text()
        record = json.loads(intact)
        record["info"]["details"][key] = "1.0"
        manifest.write_text(json.dumps(record))
        ran = optpipe("bench", "digits", "--backend", "inductor", *quick, workspace=workspace)
        manifest.write_text(intact)
        assert ran.status == 3
        assert said in ran.stderr
