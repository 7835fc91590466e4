"""Whole texts of evaluations."""

from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import HASH

from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import ExitStatus
from optpipe.core.verdict import Verdict
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.result import (
    Accuracy,
    Agreement,
    ClassScore,
    Dataset,
    EvaluatedModel,
    Evaluation,
    Score,
    TaskScores,
)


def make_scores(drop: float) -> TaskScores:
    scores = [
        Score(name, value - drop, (value - drop - 0.02, value - drop + 0.02), drop, (drop - 0.004, drop + 0.004))
        for name, value in (("AP", 0.584), ("AP50", 0.819), ("AP75", 0.687))
    ]
    return TaskScores(tuple(scores), (ClassScore("circle", 0.6, drop * 2), ClassScore("square", 0.58, drop / 2)))


def test_scores_drops_by_class_and_how_boxes_were_chosen() -> None:
    agreement = Agreement(0.984, (0.98, 0.99), ())
    rows = (
        EvaluatedModel("source", "source", "cpu", 250, agreement=Agreement(1.0, (1.0, 1.0), ()), scores=make_scores(0.0)),
        EvaluatedModel(
            "onnxruntime", "int8", "cpu", 250, "7d95a3c42e4a", snr_db=49.0, agreement=agreement,
            scores=make_scores(0.03), verdict=Verdict.FAIL,
        ),
        EvaluatedModel("tensorrt", "fp16", "cuda", 250, "0732e95c196b", "no GPU"),
    )  # fmt: skip
    dataset = Dataset(
        "shapes/validation", "images", "92c930fec99e0000", 250, (), True, 3, ("circle", "square", "triangle")
    )
    found = Evaluation(
        "shapes-detector", "s", "m", WeightsRecord("default:x", "0"), dataset, 0.01, rows, "/w/runs/evaluate-1",
        task="detection", scoring="yolov8 head, NMS outside the engine per class (IoU 0.5)",
    )  # fmt: skip
    assert_golden(text_of(document_from_evaluation(found)), "evaluate-scores.txt")


def evaluation(kind="images", *, labeled=True):
    accuracy = Accuracy(0.985, (0.97, 0.99), 0.999, 0.98, 0.004, (-0.001, 0.009), 0.005, (-0.002, 0.012), 9, 5, 0.42)
    source = EvaluatedModel("source", "source", "cpu", 800, accuracy=accuracy if labeled else None)
    rows = (
        source,
        EvaluatedModel("onnxruntime", "int8", "cpu", 800, "0123456789ab", snr_db=31.4,
                       agreement=Agreement(0.99, (0.98, 0.995), ()), accuracy=accuracy if labeled else None,
                       verdict=Verdict.INCONCLUSIVE),
        EvaluatedModel("onnxruntime", "fp32", "cpu", 800, "1123456789ab", verdict=Verdict.PASS),
        EvaluatedModel("tensorrt", "fp16", "cuda", 800, "2123456789ab", why_not="no NVIDIA GPU on this machine"),
        EvaluatedModel("torch", "fp32", "cpu", 800, "3123456789ab", why_not="model.pt2: changed", failed=True),
    )  # fmt: skip
    dataset = Dataset("digits/validation", kind, HASH, 800, (), labeled, 10)
    weights = WeightsRecord("file" if labeled else "random", HASH)
    return Evaluation("digits", "card:digits", "m", weights, dataset, 0.01, rows, "/w/runs/evaluate-1")


def test_an_evaluation():
    assert evaluation().status is ExitStatus.STAGE_FAILED
    text = text_of(document_from_evaluation(evaluation()), document_from_evaluation(evaluation("texts", labeled=False)))
    assert_golden(text, "evaluate.txt")
