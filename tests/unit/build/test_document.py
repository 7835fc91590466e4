"""Whole texts of a build, of doctor and of all options."""

from tests.fakes.console import text_of
from tests.fakes.entries import FINDING, HASH, MIXED, WRONG, proof
from tests.fakes.golden import assert_golden

from optpipe.build.doctor import ToolStatus, list_options
from optpipe.build.document import document_from_build, document_from_diagnosis, document_from_options
from optpipe.build.records import ArtifactResult, BuildResult, Omission
from optpipe.core.entries import LintSummary, SkippedLayer, VerificationInfo, WeightsRecord
from optpipe.core.errors import ExitStatus
from optpipe.core.precision import (
    Precision,
)


def verified(**changes):
    known = {
        "reference": "source model", "samples": 800, "tolerance_relative": 0.02, "snr_db": 61.2, "top1_agreement": 0.99,
        "top1_accuracy": 0.9875, "source_top1_accuracy": 0.99, "outputs": (), "values": 8000, "passed": True,
    }  # fmt: skip
    return VerificationInfo(**{**known, **changes})


def built(ident, backend, precision, **changes):
    known = {
        "path": "p", "sha256": HASH, "size_bytes": 705_000, "build_seconds": 1.25, "why_not": None,
        "precision_proof": proof(precision), "lint": LintSummary(), "parity": verified(),
    }  # fmt: skip
    return ArtifactResult(ident, backend, Precision(precision), "cuda", **{**known, **changes})


def test_a_build():
    artifacts = (
        built("0123456789ab", "tensorrt", "fp16"),
        built("1123456789ab", "onnxruntime", "int8", lint=LintSummary({"reformat": 3}, (FINDING,)),
              parity=verified(passed=False, snr_db=3.2)),
        built("2123456789ab", "torch", "fp16", precision_proof=WRONG, parity=verified(snr_db=None, top1_accuracy=None),
              kept=(SkippedLayer("fc", "its weights are not constant"),)),
        built("4123456789ab", "onnxruntime", "int8", parity=verified(
            snr_db=None, top1_accuracy=None, top1_agreement=None, selected=("boxes",), box_agreement=0.88)),
        built("3123456789ab", "tensorrt-rtx", "fp16", why_not="no NVIDIA GPU on this machine", parity=None, mixed=MIXED),
    )  # fmt: skip
    found = BuildResult(
        "digits", "card:digits", "m", WeightsRecord("random", HASH, 0, "3 of 8 tensors, first conv1"), "default",
        "no network", artifacts, (Omission("inductor", "int8", "has no int8 kernels on cuda", ExitStatus.MISSING),),
        (Omission("torch", "bf16", "out of memory", ExitStatus.STAGE_FAILED),), (), (), ExitStatus.FAIL,
    )  # fmt: skip
    assert_golden(text_of(document_from_build(found)), "build.txt")


def test_a_diagnosis():
    found = (
        ToolStatus("GPU", False, None, "tuned engines", None, "requires an NVIDIA GPU"),
        ToolStatus("backend onnxruntime", True, "1.31.1", "ONNX inference", "cuda: no NVIDIA GPU on this machine"),
        ToolStatus("nsys", False, None, "profiling", "/usr/bin/nsys failed to run", "`apt-get install nsight-systems`"),
    )
    assert_golden(text_of(document_from_diagnosis(found)), "doctor.txt")


def test_the_options_of_all_backends():
    assert_golden(text_of(document_from_options(list_options())), "doctor-options.txt")
