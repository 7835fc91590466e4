"""Whole text of an evaluation of a task with scores of its own."""

from tests.fakes.console import text_of
from tests.fakes.golden import assert_golden

from optpipe.core.entries import WeightsRecord
from optpipe.core.verdict import Verdict
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.result import Agreement, ClassScore, Dataset, EvaluatedModel, Evaluation, Score, TaskScores


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
