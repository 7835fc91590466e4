"""What a re-check says of outputs and of a latency's ratio; texts of deployments."""

from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.console import assert_golden, text_of

from optpipe.core.entries import Environment
from optpipe.core.verdict import Verdict
from optpipe.deploy.recheck import judge_recheck, list_output_changes
from optpipe.deploy.records import (
    Choice,
    Comparison,
    DeploymentRecord,
    DeployResult,
    DossierReference,
    OutputChange,
    ProofRecord,
    RecheckRecord,
    document_from_deployment,
    document_from_recheck,
)
from optpipe.stats.ratio import Change, Ratio, count_rounds_to_settle


def latency(ratio, low, high, change=Change.NO_DIFFERENCE):
    return Ratio(ratio, (low, high), change, 10, 0.99, 0.5, 0.1)


def changed(values, first, error, predictions):
    return OutputChange("logits", 100, values, first, error, predictions)


EQUAL = latency(1.0, 0.99, 1.01)
SAME = OutputChange("logits", 100, 0, None, 0.0, 0)


@pytest.mark.parametrize(
    ("outputs", "found", "verdict", "reason"),
    [
        (SAME, latency(1.0, 0.99, 1.01), Verdict.PASS, "p50 is 1.000 times the old"),
        (SAME, latency(1.05, 1.02, 1.08, Change.SLOWER), Verdict.FAIL, "slower: p50 is 1.050"),
        (
            SAME,
            latency(1.0, 0.9, 1.1),
            Verdict.INCONCLUSIVE,
            "about 37 rounds would decide it (--rounds)",
        ),
        (
            changed(1, (0, 3), 1e-7, 0),
            EQUAL,
            Verdict.PASS,
            "1 of 100 values changed, the first at [0, 3]",
        ),
        (changed(90, (0, 0), 1e-7, 2), EQUAL, Verdict.FAIL, "2 predictions changed"),
        (changed(100, (0, 0), 0.2, 0), EQUAL, Verdict.FAIL, "relative error 0.2 exceeds 0.001"),
    ],
)
def test_verdicts(outputs, found, verdict, reason):
    got, reasons = judge_recheck([outputs], found, 37, 1e-3, 0.05)
    assert got is verdict
    assert any(reason in each for each in reasons), reasons


@given(st.integers(0, 39), st.integers(0, 31))
def test_an_output_changed_in_one_bit_is_named(at, bit):
    before = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    after = before.copy()
    after.reshape(-1).view(np.uint32)[at] ^= np.uint32(1 << bit)
    (found,) = list_output_changes({"logits": before}, {"logits": after}, classifies=True)
    assert (found.changed, found.first_changed) == (1, (at // 10, at % 10))
    (same,) = list_output_changes({"logits": before}, {"logits": before.copy()}, classifies=True)
    assert (same.changed, same.first_changed, same.predictions_changed) == (0, None, 0)


@given(st.floats(0.9, 1.15), st.floats(0.005, 0.2), st.integers(8, 40))
def test_the_rounds_that_would_settle_it_put_the_interval_on_one_side(value, half, rounds):
    ratio = Ratio(
        value, (value * exp(-half), value * exp(half)), Change.NO_DIFFERENCE, rounds, 0.99, 0.5, 0.1
    )
    needed = count_rounds_to_settle(ratio, 0.05)
    narrowed = half * sqrt(rounds / max(needed, 1))
    assert log(value) + narrowed <= log(1.05) + 1e-9 or log(value) - narrowed >= -1e-9


RECORD = DeploymentRecord(
    target="triton",
    model="digits",
    artifact="83b17120bac6",
    artifact_sha256="0" * 64,
    backend="onnxruntime",
    precision="int8",
    device="cpu",
    dossier=DossierReference(
        "digits-onnxruntime-int8-20261122T125811", "1" * 64, Verdict.PASS, (), None
    ),
    engine="digits_engine",
    preprocessing="digits_preprocess",
    ensemble="digits",
    options={"threads": 1, "spinning": True},
    labels=("0", "1"),
    choices=(
        Choice(
            "max_batch_size",
            "16",
            "the largest measured within the limit of 15.0 ms (6.00 ms; run bench-1)",
        ),
        Choice("instance_group.count", "1", "several streams were not measured"),
    ),
    not_carried=("spinning",),
    tolerance=0.5,
    images={},
    environment=Environment(cpu="a CPU", packages={"onnxruntime-gpu": "1.31.1"}),
    triton="choose a release with ONNX Runtime 1.31.1",
    optpipe="0.1.0",
    created_utc="2026-11-22T12:00:00+00:00",
)
PROOF = ProofRecord(
    server="tritonserver 2.51.0, Python 3.11, NumPy 1.26.4",
    models={
        "digits": "served by tritonserver",
        "digits_engine": "configured, not run: onnxruntime; run by optpipe's session",
    },
    comparisons=(
        Comparison("digits_engine", "http", 8, 8, 0.0, None),
        Comparison(
            "digits", "grpc", 32, 30, 1.2e-7, "32 of 32 equal to the signed-off predictions"
        ),
    ),
    notes=(
        "digits_engine: the server has no such backend (python); prove it again where it is deployed",
    ),
)


def test_a_deployment_that_was_proven_in_part():
    assert_golden(
        text_of(document_from_deployment(DeployResult("served", RECORD, (), PROOF))),
        "deploy-proven.txt",
    )


def test_a_deployment_with_a_reason_on_another_machine():
    reason = replace(
        RECORD.dossier, verdict=Verdict.INCONCLUSIVE, because="a trial on the staging host"
    )
    record = replace(RECORD, dossier=reason)
    found = DeployResult("served", record, ("CPU: the evidence is from a CPU; this machine has b",))
    assert_golden(text_of(document_from_deployment(found)), "deploy-because.txt")


def test_a_recheck():
    found = RecheckRecord(
        dossier="digits-onnxruntime-int8-20261122T125811",
        artifact="83b17120bac6",
        verdict=Verdict.FAIL,
        reasons=(
            "slower: p50 is 1.052 times the old (1.031 to 1.074)",
            "output 'logits': 3 of 8,000 values changed, the first at [0, 4]",
        ),
        versions={"onnxruntime-gpu": ("1.31.1", "1.32.0")},
        outputs=(OutputChange("logits", 8000, 3, (0, 4), 1e-7, 0),),
        load="batch 16, single-stream, compute",
        latency=latency(1.052, 1.031, 1.074, Change.SLOWER),
        rounds_to_settle=20,
        max_slowdown=0.05,
    )
    assert_golden(text_of(document_from_recheck(found)), "recheck.txt")
