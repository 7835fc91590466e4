"""Whole texts of `optpipe preprocess` and `optpipe bench --from-images`."""

from dataclasses import replace

from tests.fakes.console import text_of
from tests.fakes.golden import assert_golden
from tests.fakes.preprocess import preprocess_record

from optpipe.core.verdict import Verdict
from optpipe.preprocess.dali_pipeline import DaliPlan
from optpipe.preprocess.document import document_from_end_to_end, document_from_preprocess
from optpipe.preprocess.end_to_end import (
    EndToEndMeasurement,
    EndToEndRecord,
    EndToEndResult,
    OverlappedBatches,
    PartRates,
    PredictionCheck,
    compute_figures,
)
from optpipe.preprocess.records import PredictionAgreement, RefusedImage, TaskScore

GPU = DaliPlan(decode="mixed", device="gpu", batch_size=64, hw_decoder_load=0.9, cpu_share=0.125)


def test_a_proof_with_its_speed():
    assert_golden(text_of(document_from_preprocess(preprocess_record(GPU))), "preprocess.txt")


def test_a_proof_that_fails_without_its_speed():
    record = preprocess_record(tuned=False)
    failed = replace(
        record.parity.proof, verdict=Verdict.FAIL, reason="DALI cannot decode 1 image", remedy="convert it"
    )
    failed = replace(failed, output=replace(failed.output, snr_db=None), top1_agreement=None, accuracy=None)
    parity = replace(record.parity, proof=failed, refused=(RefusedImage("/images/a.gif", "unsupported format"),))
    assert_golden(text_of(document_from_preprocess(replace(record, parity=parity))), "preprocess-failed.txt")


def test_a_proof_of_a_detector():
    record = preprocess_record(tuned=False)
    proof = replace(
        record.parity.proof,
        reason="AP drop 0.01 points, 95 % interval -0.01 to 0.05, 250 images",
        top1_agreement=None,
        accuracy=None,
        task_score=TaskScore("AP", 0.5837, 0.5836, 0.0001, (-0.0001, 0.0005)),
        prediction_agreement=PredictionAgreement(0.9993, (0.9982, 1.0), 250),
    )
    record = replace(record, parity=replace(record.parity, proof=proof))
    assert_golden(text_of(document_from_preprocess(record)), "preprocess-detector.txt")


def test_files_to_predictions():
    named = {"batch_ns": 10, "latency_ns": 25, "wait_ns": 6, "launch_ns": 1, "output_ns": 2}
    measured = EndToEndMeasurement(
        OverlappedBatches(**{name: (ms * 1_000_000,) * 70 for name, ms in named.items()}),
        PartRates(90_000, 12_000, 7_000, 20_000),
        launch_share=0.1,
        cpu_share=0.3,
        other_cpu_cores=0.1,
        handover="none: DLPack",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        check=PredictionCheck(32, 20, 1),
    )
    results = (
        EndToEndResult("ab", "tensorrt fp16 (cuda)", GPU, {}, Verdict.FAIL, compute_figures(measured, GPU)),
        EndToEndResult("cd", "onnxruntime fp16 (cuda)", GPU, {}, Verdict.FAIL, error="out of memory"),
    )
    record = EndToEndRecord("/images", 2048, 10**8, results, Verdict.FAIL, "/runs/end-to-end-1")
    assert_golden(text_of(document_from_end_to_end(record)), "end-to-end.txt")
