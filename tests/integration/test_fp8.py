"""`--precision fp8` as a user types it: a transformer is built and proven on the CPU; what has no FP8 is refused in one or two lines."""

import json
import shutil

import numpy as np
import pytest

from tests.fakes.fp8_models import BERT, VIT
from tests.integration.conftest import optpipe

compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


@compiler
def test_a_transformer_is_built_proven_verified_and_shown(tmp_path):
    (tmp_path / "net.py").write_text(BERT)
    np.savez(tmp_path / "data.npz", input_ids=np.random.default_rng(0).integers(0, 100, (32, 16)))
    words = ("--calibration", "data.npz", "--precision", "fp8", "--backend", "inductor", "--json")
    (artifact,) = (
        optpipe("build", "net.py:make", *words, cwd=tmp_path).expect(0).document["artifacts"]
    )
    proof = artifact["precision_proof"]
    assert proof["proven"]
    assert 0.8 < proof["share"]["macs"]["fp8"] < 1
    assert artifact["parity"]["passed"]
    assert artifact["parity"]["snr_db"] > 15
    shown = optpipe("store", "show", artifact["id"], cwd=tmp_path)
    assert "fp8: proven" in shown.stdout
    assert "on a CPU, FP8 shows a GPU's outputs" in " ".join(shown.stdout.split())


def test_what_has_no_fp8_is_refused(exported, tmp_path):
    exported(tmp_path / ".optpipe")
    (failed,) = (
        optpipe("build", "digits", "--precision", "fp8", "--json", cwd=tmp_path)
        .expect(2)
        .document["failed"]
    )
    assert failed["backend"] == "inductor"
    said, way_out = failed["reason"].splitlines()
    assert said.startswith("FP8 fits no layer of digits (")
    assert said.endswith(": a convolution; FP8 is for linear layers)")
    assert way_out == "build it in fp16 or int8"
    (tmp_path / "net.py").write_text(VIT)
    for arguments, status, said in (
        (("net.py:make",), 2, "FP8 needs real inputs to calibrate net.make on"),
        (
            ("net.py:make", "--backend", "onnxruntime"),
            3,
            "onnxruntime has no fp8 kernels on cpu, only fp32, int8",
        ),
    ):
        refused = optpipe(
            "build", *arguments, "--precision", "fp8", "--device", "cpu", "--json", cwd=tmp_path
        )
        assert refused.status == status, refused.stderr
        assert said in json.loads(refused.stdout)["error"]["message"]
