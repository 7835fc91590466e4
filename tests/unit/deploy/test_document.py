"""A deployment with its proof, and a re-check, as whole texts."""

from dataclasses import replace

from tests.fakes.console import text_of
from tests.fakes.golden import assert_golden

from optpipe.core.entries import Environment
from optpipe.core.measurement import LatencySummary
from optpipe.core.quantity import Estimate
from optpipe.core.verdict import Verdict
from optpipe.deploy.document import document_from_deployment, document_from_recheck
from optpipe.deploy.records import (
    Choice,
    Comparison,
    DeploymentRecord,
    DeployResult,
    DossierReference,
    LatencyChange,
    OutputChange,
    ProofRecord,
    RecheckRecord,
    ServerCost,
    ServerRecord,
    ServerThroughput,
)
from optpipe.stats.ratio import Change


def latency(ms):
    found = {
        name: Estimate(ms * 1e6 * times, ms * 0.98e6 * times, ms * 1.02e6 * times)
        for name, times in (("p50", 1), ("p99", 2))
    }
    return LatencySummary(1000, found, ms * 1e6, ms * 3e6, ms * 1.1e6, 0.0, {})


RECORD = DeploymentRecord(
    target="triton",
    model="digits",
    artifact="83b17120bac6",
    artifact_sha256="0" * 64,
    backend="onnxruntime",
    precision="int8",
    device="cpu",
    dossier=DossierReference("digits-onnxruntime-int8-20261122T125811", "1" * 64, Verdict.PASS, (), None),
    engine="digits_engine",
    preprocessing="digits_preprocess",
    ensemble="digits",
    options={"threads": 1, "spinning": True},
    labels=("0", "1"),
    choices=(
        Choice("max_batch_size", "16", "the largest measured within the limit of 15.0 ms (6.00 ms; run bench-1)"),
        Choice("instance_group.count", "1", "several streams were not measured"),
    ),
    not_carried=("spinning",),
    tolerance=0.5,
    images=(),
    environment=Environment(cpu="a CPU", packages={"onnxruntime-gpu": "1.31.1"}),
    triton="choose a release with ONNX Runtime 1.31.1",
    optpipe="0.1.0",
    created_utc="2026-11-22T12:00:00+00:00",
)
PROOF = ProofRecord(
    deployment="served",
    server=ServerRecord("tritonserver", "2.51.0", "3.11", "1.26.4", ("python",)),
    models={
        "digits": "served by tritonserver",
        "digits_engine": "configured, not run: onnxruntime; run by optpipe's session",
    },
    comparisons=(
        Comparison("digits_engine", "http", 8, 8, 0.0, None),
        Comparison("digits", "grpc", 32, 30, 1.2e-7, "32 of 32 equal to the signed-off predictions"),
    ),
    costs=(
        ServerCost("batch 1, single-stream, end-to-end", "latency.p99 of the policy", latency(0.4), latency(1.2), 8e5),
    ),
    throughputs=(
        ServerThroughput(8, Estimate(5200.0, 5100.0, 5300.0), Estimate(1490.0, 1420.0, 1560.0), latency(5.3)),
    ),
    notes=("digits_engine: the server has no such backend (python); prove it again where it is deployed",),
)


def test_a_deployment_that_was_proven_in_part():
    assert_golden(text_of(document_from_deployment(DeployResult("served", RECORD, (), PROOF))), "deploy-proven.txt")


def test_a_deployment_with_a_reason_on_another_machine():
    reason = replace(RECORD.dossier, verdict=Verdict.INCONCLUSIVE, because="a trial on the staging host")
    found = DeployResult(
        "served", replace(RECORD, dossier=reason), ("CPU: the evidence is from a CPU; this machine has b",)
    )
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
        outputs_how="to the last bit, both environments here",
        latency=LatencyChange(
            "p50",
            "batch 16, single-stream, compute",
            1.052,
            (1.031, 1.074),
            0.99,
            Change.SLOWER,
            "10 rounds of two processes in turn",
        ),
        precision="int8, as built",
        max_slowdown=0.05,
    )
    assert_golden(text_of(document_from_recheck(found)), "recheck.txt")
