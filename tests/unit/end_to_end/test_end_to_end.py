import pytest

from optpipe.core.verdict import Verdict
from optpipe.end_to_end.end_to_end import EndToEndResult, find_end_to_end_bottleneck
from optpipe.preprocess.dali.pipeline import DaliPlan

GPU = DaliPlan(decode="mixed", device="gpu", batch_size=100)
CPU = DaliPlan(batch_size=100)


def measured(cpu_share=0.3, enqueue_share=0.1, **parts):
    usual = {"read": 90_000, "decode": 12_000, "preprocess": 11_000, "inference": 20_000}
    return {
        "parts": {**usual, **parts},
        "cpu_share": cpu_share,
        "other_cpu_cores": 0.1,
        "enqueue_share": enqueue_share,
        "batch_ns": [10_000_000] * 700,
        "latency_ns": [25_000_000] * 700,
        "wait_ns": [6_000_000] * 700,
        "launch_ns": [1_000_000] * 700,
        "answer_ns": [2_000_000] * 700,
        "handover": "none: DLPack",
        "sharing": None,
        "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        "checked": {"answers": 32, "equal": 32, "classes": 9},
    }


@pytest.mark.parametrize(
    ("plan", "found", "name"),
    [
        (GPU, measured(read=10_500), "I/O"),
        (GPU, measured(), "GPU"),
        (GPU, measured(cpu_share=0.97), "CPU"),
        (CPU, measured(), "CPU"),
        (GPU, measured(preprocess=30_000, decode=31_000), "GPU"),
        (GPU, measured(preprocess=30_000, decode=31_000, enqueue_share=0.9), "launch"),
        (CPU, measured(preprocess=30_000, cpu_share=0.95), "CPU"),
        (DaliPlan(decode="cpu", device="gpu"), measured(decode=30_000), "copy"),
        (DaliPlan(decode="cpu", device="gpu"), measured(), "CPU"),
    ],
)
def test_the_bottleneck_is_named_with_its_numbers(plan, found, name):
    bottleneck = find_end_to_end_bottleneck(10_000, found, plan)
    assert bottleneck.name == name
    assert any(character.isdigit() for character in bottleneck.reason)


def test_the_record_has_rates_latencies_and_the_shares_of_the_timeline():
    record = EndToEndResult("onnxruntime fp16 (cuda)", "abc", GPU, measured()).to_dict()
    assert record["images_per_s"] == pytest.approx(10_000)
    assert record["of_slower_part"] == pytest.approx(10_000 / 11_000)
    assert record["latency_ms"] == {"p50": 25.0, "p90": 25.0, "p99": 25.0}
    assert sum(record["timeline"].values()) == pytest.approx(1)
    assert record["verdict"] == "PASS"


def test_percentiles_that_the_batches_cannot_support_are_left_out():
    few = {**measured(), "latency_ns": [25_000_000] * 70}
    assert set(EndToEndResult("x", "abc", GPU, few).to_dict()["latency_ms"]) == {"p50", "p90"}


def test_wrong_answers_fail_and_one_class_proves_nothing():
    wrong = {**measured(), "checked": {"answers": 32, "equal": 20, "classes": 9}}
    same = {**measured(), "checked": {"answers": 32, "equal": 32, "classes": 1}}
    assert EndToEndResult("x", "abc", GPU, wrong).verdict is Verdict.FAIL
    assert EndToEndResult("x", "abc", GPU, same).verdict is Verdict.INCONCLUSIVE
    assert EndToEndResult("x", "abc", GPU, {}, "out of memory").to_dict()["error"] == "out of memory"
