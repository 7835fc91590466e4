"""From files to predictions: the bottleneck, the figures, the tuned plan, and the texts."""

from dataclasses import replace

import pytest
from tests.fakes.console import assert_golden, text_of
from tests.fakes.preprocess import preprocess_record

from optpipe.core.records import json_from_record
from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.document import document_from_end_to_end, document_from_preprocess
from optpipe.preprocess.end_to_end import (
    EndToEndRecord,
    EndToEndResult,
    PartRates,
    compute_figures,
    find_bottleneck,
    find_tuned_plan,
)
from optpipe.preprocess.proof import Agreement, RefusedImage, TaskScore
from optpipe.preprocess.throughput import BatchTimes
from optpipe.workspace.file_names import PREPROCESSING
from optpipe.workspace.runs import begin_run, finish_run
from optpipe.workspace.store import Store

GPU = DaliPlan(decode="mixed", device="gpu", batch_size=100)
CPU = DaliPlan(batch_size=100)


def batches(count):
    times = tuple(10_000_000 + at % 3 - 1 for at in range(count))
    return BatchTimes(times, latency_ns=(25_000_000,) * count)


def parts(**changed):
    return PartRates(
        **{"read": 90_000, "decode": 12_000, "preprocess": 11_000, "inference": 20_000, **changed}
    )


def figures(plan, count=700, check=None, **changed):
    return compute_figures(
        batches(count),
        parts(**changed),
        plan,
        launch_share=0.1,
        cpu_share=0.3,
        handover="none: DLPack",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        check=check or (32, 32, 9),
    )


@pytest.mark.parametrize(
    ("plan", "rates", "cpu", "launch", "name"),
    [
        (GPU, parts(read=10_500), 0.3, 0.1, "I/O"),
        (GPU, parts(), 0.3, 0.1, "GPU"),
        (GPU, parts(), 0.97, 0.1, "CPU"),
        (CPU, parts(), 0.3, 0.1, "CPU"),
        (GPU, parts(preprocess=30_000, decode=31_000), 0.3, 0.1, "GPU"),
        (GPU, parts(preprocess=30_000, decode=31_000), 0.3, 0.9, "launch"),
        (CPU, parts(preprocess=30_000), 0.95, 0.1, "CPU"),
        (DaliPlan(decode="cpu", device="gpu"), parts(decode=30_000), 0.3, 0.1, "copy"),
        (DaliPlan(decode="cpu", device="gpu"), parts(), 0.3, 0.1, "CPU"),
    ],
)
def test_the_bottleneck_is_named_with_its_numbers(plan, rates, cpu, launch, name):
    bottleneck, reason = find_bottleneck(10_000, rates, plan, cpu, launch)
    assert bottleneck == name
    assert any(character.isdigit() for character in reason)


def test_the_figures_are_rates_and_latencies():
    found = figures(GPU)
    assert found.images_per_s == pytest.approx(10_000)
    assert found.of_slower_part == pytest.approx(10_000 / 11_000)
    assert (found.latency_p50_ns, found.latency_p99_ns) == (25e6, 25e6)
    assert found.environment
    assert not figures(CPU).environment
    few = figures(GPU, 70)
    assert (few.latency_p50_ns, few.latency_p99_ns) == (
        25e6,
        None,
    )  # which 70 batches cannot support


@pytest.mark.parametrize(
    ("equal", "classes", "verdict"),
    [(32, 9, "PASS"), (29, 9, "PASS"), (28, 9, "FAIL"), (32, 1, "INCONCLUSIVE")],
)
def test_wrong_predictions_fail_and_one_class_proves_nothing(equal, classes, verdict):
    assert figures(GPU, check=(32, equal, classes)).verdict is Verdict(verdict)


@pytest.mark.parametrize(
    ("verdict", "taken"), [("PASS", True), ("INCONCLUSIVE", True), ("FAIL", False)]
)
def test_a_plan_that_was_shown_to_change_the_predictions_is_not_taken(tmp_path, verdict, taken):
    plan = DaliPlan(threads=7)
    run = begin_run(tmp_path, "preprocess")
    record = replace(preprocess_record(plan), verdict=Verdict(verdict))
    (run.path / PREPROCESSING).write_bytes(json_from_record(record))
    finish_run(run, command="optpipe preprocess digits", model="digits")
    assert find_tuned_plan("digits", Store(tmp_path), gpu=False) == (plan if taken else None)
    assert find_tuned_plan("digits", Store(tmp_path), gpu=True) is None


TUNED_GPU = DaliPlan(decode="mixed", device="gpu", batch_size=64, hw_decoder_load=0.9)


def test_a_proof_with_its_speed():
    assert_golden(text_of(document_from_preprocess(preprocess_record(TUNED_GPU))), "preprocess.txt")


def test_a_proof_that_fails_without_its_speed():
    record = preprocess_record(tuned=False)
    proof = record.parity.proof
    failed = replace(
        proof, verdict=Verdict.FAIL, reason="DALI cannot decode 1 image", remedy="convert it"
    )
    failed = replace(
        failed, output=replace(failed.output, snr_db=None), top1_agreement=None, accuracy=None
    )
    parity = replace(
        record.parity, proof=failed, refused=(RefusedImage("/images/a.gif", "unsupported format"),)
    )
    assert_golden(
        text_of(document_from_preprocess(replace(record, parity=parity))), "preprocess-failed.txt"
    )


def test_a_proof_of_a_detector():
    record = preprocess_record(tuned=False)
    proof = replace(
        record.parity.proof,
        reason="AP drop 0.01 points, 95 % interval -0.01 to 0.05, 250 images",
        top1_agreement=None,
        accuracy=None,
        task_score=TaskScore("AP", 0.5837, 0.5836, 0.0001, (-0.0001, 0.0005)),
        prediction_agreement=Agreement(250, 0.9993, (0.9982, 1.0)),
    )
    record = replace(record, parity=replace(record.parity, proof=proof))
    assert_golden(text_of(document_from_preprocess(record)), "preprocess-detector.txt")


def test_files_to_predictions():
    wrong = figures(TUNED_GPU, 70, (32, 20, 1), preprocess=7_000)
    results = (
        EndToEndResult("ab", "tensorrt fp16 (cuda)", TUNED_GPU, {}, Verdict.FAIL, wrong),
        EndToEndResult(
            "cd", "onnxruntime fp16 (cuda)", TUNED_GPU, {}, Verdict.FAIL, error="out of memory"
        ),
    )
    record = EndToEndRecord("/images", 2048, results, Verdict.FAIL, "/runs/end-to-end-1")
    assert_golden(text_of(document_from_end_to_end(record)), "end-to-end.txt")
