"""Scores, drops and verdicts of an evaluation, a user's own task, which evaluation is judged, and the texts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.console import assert_golden, text_of
from tests.fakes.entries import HASH, artifact_info
from tests.fakes.extensions import optpipe_brightness

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.entries import WeightsRecord
from optpipe.core.errors import BadInputError, ExitStatus
from optpipe.core.verdict import Verdict
from optpipe.evaluate.document import document_from_evaluation
from optpipe.evaluate.evaluate import (
    EvaluatedArtifact,
    Predictions,
    _find_undefined,
    predict_samples,
    score_artifacts,
)
from optpipe.evaluate.recompute import observe_accuracy
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
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.classification import list_best_classes
from optpipe.evaluate.tasks.masks import encode_mask
from optpipe.evaluate.tasks.segmentation import Segmentation
from optpipe.evaluate.tasks.texts import Embedding
from optpipe.evaluate.tasks.user_file import StoredScores, UserTask
from optpipe.models.artifacts.judged_build import judged_build_from_entry
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.sample_set import SetFile
from optpipe.models.inputs.task_data import find_label_indices
from optpipe.models.inputs.tensor_set import tensor_set_from_parts
from optpipe.models.inputs.text_set import text_set_from_path

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, 400)
TASK = TASKS[Task.CLASSIFICATION]


def predictions_from_scores(values) -> Predictions:
    return Predictions(list_best_classes(values), values, values.shape[1])


def scores(right_share: float, seed: int = 1):
    """Scores whose largest is at the label for a share of the samples, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    values = rng.random((400, 10)).astype(np.float32)
    values[np.arange(400), LABELS] += np.where(rng.random(400) < right_share, 2.0, -2.0)
    return values


ENTRY: Any = SimpleNamespace(
    id="abc", info=artifact_info(precision="int8"), sha256=lambda name: f"hash of {name}"
)


def rows(found, budget=None, calibrated_on=0):
    source = EvaluatedArtifact(None, predictions_from_scores(scores(0.95)))
    judged = EvaluatedArtifact(ENTRY, found, calibrated_on=calibrated_on)
    return list(
        score_artifacts([source, judged], LABELS.tolist(), TASK, (), 10, budget, trained=True)
    )


def named(labels) -> ImageSet:
    return ImageSet(
        "s",
        Path("root"),
        0,
        tuple(SetFile(f"{i}.png", "0", each) for i, each in enumerate(labels)),
        tuple(sorted(set(labels) - {None})),
    )


@pytest.mark.parametrize(
    ("shape", "fits"), [(("n", 4, 64, 64), False), (("n", 7, 84), False), (("n", 10), True)]
)
def test_outputs_that_are_no_scores_of_classes_are_refused(shape, fits) -> None:
    image = InputSpec("x", "float32", *[(1, 3, 8, 8)] * 3)
    model = ModelCard(
        "m", "s", Task.CLASSIFICATION, (image,), (TensorSpec("logits", "float32", shape),)
    )
    if fits:
        TASK.require_model(model)
        return
    with pytest.raises(
        BadInputError, match=f"logits has shape {'×'.join(map(str, shape))}\n.*another task"
    ):
        TASK.require_model(model)


def card(labels=()) -> ModelCard:
    return ModelCard("m", "s", Task.CLASSIFICATION, (), labels=tuple(labels))


def test_the_source_is_a_row_and_equal_predictions_lose_nothing() -> None:
    source, same = rows(predictions_from_scores(scores(0.95)))
    assert source.precision == "source"
    assert source.accuracy.top1 == pytest.approx(0.95, abs=0.03)
    assert source.accuracy.top1_ci[0] < source.accuracy.top1 < source.accuracy.top1_ci[1]
    assert same.accuracy.drop == 0
    assert same.agreement.share == 1
    assert same.accuracy.drop_ci[1] > 0  # 400 images cannot prove equality
    assert (source.sha256, same.sha256) == (None, "hash of model.onnx")


def test_a_planted_drop_is_found() -> None:
    broken = scores(0.95)
    broken[LABELS == 3, 7] = 9.0
    _, row = rows(predictions_from_scores(broken), budget=0.01)
    assert row.accuracy.drop_ci[0] > 0
    assert row.verdict == "FAIL"


def test_verdicts_follow_the_interval() -> None:
    same = predictions_from_scores(scores(0.95))
    assert rows(same, budget=0.02)[1].verdict == "PASS"
    assert rows(same, budget=0.001)[1].verdict == "INCONCLUSIVE"
    assert rows(None, budget=0.5)[1].verdict == "INCONCLUSIVE"
    assert rows(same, budget=0.02, calibrated_on=8)[1].verdict == "INCONCLUSIVE", (
        "calibration samples count as lost"
    )
    assert rows(same, budget=0.05, calibrated_on=8)[1].verdict == "PASS"


@given(pairs=st.integers(20, 60), share=st.floats(0.01, 0.5), slack=st.sampled_from([-0.01, 0.01]))
def test_what_calibration_hides_is_of_the_scores_range(pairs, share, slack) -> None:
    """A correlation can lose 2 on every sample, from 1 to -1."""
    angles = np.linspace(0, 3, pairs)
    turned = np.stack([0 * angles, angles], axis=1).ravel()
    values = np.stack([np.cos(turned), np.sin(turned)], axis=1)
    truths = [[float(number), -float(number)] for number in range(pairs) for _ in "ab"]
    found, used = Predictions(values.tolist(), values, 2), max(1, round(share * 2 * pairs))
    evaluated = [
        EvaluatedArtifact(None, found),
        EvaluatedArtifact(ENTRY, found, calibrated_on=used),
    ]
    high = (
        Embedding().score_predictions(truths, values.tolist(), values.tolist()).scores[0].drop_ci[1]
    )
    budget = used / pairs + high + slack
    row = list(score_artifacts(evaluated, truths, Embedding(), (), 0, budget, trained=True))[1]
    assert row.scores is not None
    assert row.scores.scores[0].value == pytest.approx(1)
    assert row.verdict == ("PASS" if slack > 0 else "INCONCLUSIVE")


def test_random_weights_prove_nothing() -> None:
    constant = np.zeros((400, 10), np.float32)
    constant[:, 4] = 1
    evaluated = [
        EvaluatedArtifact(entry, predictions_from_scores(constant)) for entry in (None, ENTRY)
    ]
    _, row = score_artifacts(evaluated, LABELS.tolist(), TASK, (), 10, 0.5, trained=False)
    assert row.accuracy is None
    assert row.agreement is None
    assert row.verdict == "INCONCLUSIVE"


def test_labels_by_name_index_or_order() -> None:
    assert find_label_indices(named(["dog", "cat"]), card(["cat", "dog"]), 2).tolist() == [1, 0]
    assert find_label_indices(named(["3", "0"]), card(), 4).tolist() == [3, 0]
    assert find_label_indices(named(["n02", "n01"]), card(["a", "b"]), 2).tolist() == [1, 0]
    assert find_label_indices(named([None, "x"]), card(), 2) is None
    with pytest.raises(BadInputError, match="label 'bird' of s is not a class of m"):
        find_label_indices(named(["bird", "cat"]), card(["cat", "dog", "cow"]), 3)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (["negative", "Positive"], None),  # by the alphabet, capitals come first, and classes swap
        (["Positive", "negative"], None),
        (["not_good", "very good"], None),
        (["0", "2"], None),
        (["1", "2"], None),
        (["0.5", "1"], None),
        (["-1", "1"], None),
        (["0", "good"], None),
        (["0.0", "1.0"], [0, 1]),
        (["n2", "n1"], [1, 0]),
    ],
)
def test_classes_are_never_guessed_against_the_labels_of_the_card(labels, found) -> None:
    names = ["negative", "positive"] if "good" not in labels[-1] else ["very_good", "NotGood"]
    if found is not None:
        assert find_label_indices(named(labels), card(names), 2).tolist() == found
        return
    with pytest.raises(BadInputError, match="is not a class of m"):
        find_label_indices(named(labels), card(names), 2)


def test_labels_of_texts_are_never_guessed(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "label": "ham"}\n{"text": "b", "label": "spam"}\n')
    texts, _ = text_set_from_path(path)
    with pytest.raises(BadInputError, match=r"is not a class of m: use class indices 0 to 1"):
        find_label_indices(texts, card(), 2)
    assert find_label_indices(texts, card(["spam", "ham"]), 2).tolist() == [1, 0]


def test_a_label_of_several_classes_is_refused_only_where_it_is_used() -> None:
    birds = card(["crane", "heron", "crane"])
    assert find_label_indices(named(["heron", "heron"]), birds, 3).tolist() == [1, 1]
    with pytest.raises(BadInputError, match="'crane' of m names the classes 0 and 2"):
        find_label_indices(named(["crane", "heron"]), birds, 3)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_a_score_that_is_not_defined_is_refused() -> None:
    """As JSON knows no NaN, a stored one could not be read again."""
    masks = [encode_mask(np.full((4, 4), 255, np.uint8))]
    with pytest.raises(BadInputError, match="mIoU is not defined on these samples"):
        Segmentation().score_predictions(masks, masks, masks)


def find_boxes(batch):
    """As many boxes as the largest value says, without an axis for the image."""
    count = int(batch["x"].max())
    return {
        "boxes": np.full((count, 4), count, np.float32),
        "scores": np.arange(count, dtype=np.float32),
    }


def predict_boxes(run, *counts, batch=(1, 1, 1)):
    """How many boxes each image has, as the task is given them, and what is kept of the outputs."""
    outputs = (TensorSpec("boxes", "float32", ("n", 4)), TensorSpec("scores", "float32", ("n",)))
    image = InputSpec("x", "float32", *((size, 2) for size in batch))
    detector = ModelCard("m", "m.onnx", Task.DETECTION, (image,), outputs)
    samples = tensor_set_from_parts(
        "s", [{"x": np.array([[count, 0] for count in counts], np.float32)}]
    )
    task: Any = SimpleNamespace(
        needs_finite=False,
        class_axis=None,
        decode=lambda rows, files, *_: [len(rows["boxes"]) for _ in files],
        join_rows=lambda rows, _: rows,
    )
    return predict_samples(cast("Any", None), detector, samples, task, run)


@pytest.mark.parametrize(("finite", "undefined"), [(False, [1]), (True, [0, 1])])
def test_numbers_that_are_compared_are_finite(*, finite: bool, undefined: list[int]) -> None:
    rows = {"y": np.array([[1.0, np.inf], [np.nan, 0.0], [1.0, 2.0]])}
    assert _find_undefined(rows, 3, finite=finite) == undefined


def test_all_boxes_of_an_image_are_judged() -> None:
    found = predict_boxes(find_boxes, 3, 1, 5)
    assert found.values == [3, 1, 5]
    assert found.outputs.tolist() == [[3.0] * 12 + [1.0] * 4 + [5.0] * 20]


def test_outputs_of_another_size_are_not_called_equal() -> None:
    source, fewer = (predict_boxes(find_boxes, *counts) for counts in ((3, 1), (2, 1)))
    evaluated = [
        EvaluatedArtifact(None, source),
        EvaluatedArtifact(ENTRY, fewer),
        EvaluatedArtifact(ENTRY, source),
    ]
    task: Any = SimpleNamespace(compute_parity=lambda *_: None)
    _, other, same = score_artifacts(evaluated, None, task, (), 0, None, trained=True)
    assert (other.snr_db, other.same_sizes) == (None, False)
    assert (same.snr_db, same.same_sizes) == (None, True)


def test_what_fills_a_fixed_batch_is_not_judged() -> None:
    filled = predict_boxes(
        lambda _: {"boxes": np.ones((4, 4)), "scores": np.ones(4)}, 1, 1, batch=(4, 4, 4)
    )
    assert filled.values == [2, 2]


VALIDATION = {"name": "digits/validation", "sha256": "a" * 64}
TRAINING = {"name": "digits/train", "sha256": "b" * 64, "validation": False}


@pytest.fixture
def judge(workspace):
    """Evaluates on each of some sets, the newest last; returns the value and the text of what is judged."""
    entry = workspace.artifact("fp32")

    def observe(*sets):
        runs = [
            workspace.evaluate(entry, lost, dataset=dataset) for lost, dataset in enumerate(sets)
        ]
        found = observe_accuracy(runs, judged_build_from_entry(entry), 0.95)["drop"]
        return round(1000 * float(found.value)), found.about

    return observe


def test_the_validation_set_goes_before_newer_data_and_is_named(judge) -> None:
    whole = {**VALIDATION, "validation": True}
    value, about = judge(whole, TRAINING)
    assert value == 0
    assert about.startswith("1,000 images of digits/validation (aaaaaaaaaaaa)")


def test_the_newest_evaluation_on_the_validation_set_counts_whatever_gave_it(judge) -> None:
    whole, same = ({**VALIDATION, "validation": known} for known in (True, False))
    assert judge(whole, same, TRAINING)[0] == 1
    newer = {**whole, "sha256": "c" * 64}
    value, about = judge(whole, newer, TRAINING)
    assert value == 1
    assert about.startswith("1,000 images of digits/validation (cccccccccccc)")


def test_without_it_the_newest_counts_and_is_named(judge) -> None:
    value, about = judge({**VALIDATION, "validation": False}, TRAINING)
    assert value == 1
    assert about.startswith("1,000 images of digits/train (bbbbbbbbbbbb)")


BRIGHTNESS = Path(optpipe_brightness.__file__).read_text(encoding="utf-8")
CARD = ModelCard("m", "s", Task.OTHER, (), (TensorSpec("mean", "float32", (1, 2)),))
SAMPLES = ImageSet("s", Path("root"), 0, tuple(SetFile(f"{index}.png", "0") for index in range(8)))


def make_task(tmp_path, text: str = BRIGHTNESS) -> UserTask:
    (tmp_path / "task.py").write_text(text)
    return UserTask.from_file(tmp_path / "task.py")


def decode(task: UserTask, shift: float):
    truths = task.read_truths(SAMPLES, CARD, None)
    values = np.arange(8)[:, None] / 10 + np.full((8, 2), shift)
    return truths, task.decode({"mean": values}, SAMPLES.files, SAMPLES, CARD)


def test_the_mean_of_the_users_scores_is_the_score_and_needs_no_code_again(tmp_path) -> None:
    task = make_task(tmp_path)
    truths, source = decode(task, 0.0)
    _, found = decode(task, 0.2)
    assert truths is not None
    scored = StoredScores().score_predictions(truths, source, found)
    assert scored.scores[0].value == pytest.approx(0.8)
    assert scored.scores[0].drop == pytest.approx(0.2)
    parity = StoredScores().compute_parity(source, source)
    assert parity is not None
    assert parity.share == 1
    assert task.name == "user:brightness"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("TASK = Brightness()", ""), "defines no TASK"),
        (("def score", "def rate"), r"its TASK has no score\(\)"),
        (('name = "brightness"', "name = 3"), "its TASK has no name"),
        (
            ("1 - abs(prediction - truth)", "3.0"),
            "score gives 3.0 for 0.png; it must be a number from 0 to 1",
        ),
        (("round(float(", "undefined(float("), "decode raised NameError"),
        (("return [float", "return [1] + [float"), "read_truths gives 9 truths for 8 samples"),
        (
            ('outputs["mean"].mean()), 3)', 'outputs["mean"].mean()), 3) * 1j'),
            "JSON cannot hold a complex",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(tmp_path, change, message) -> None:
    assert change[0] in BRIGHTNESS
    with pytest.raises(BadInputError, match=message):
        decode(make_task(tmp_path, BRIGHTNESS.replace(*change)), 0.0)


def make_scores(drop: float) -> TaskScores:
    scores = [
        Score(
            name,
            value - drop,
            (value - drop - 0.02, value - drop + 0.02),
            drop,
            (drop - 0.004, drop + 0.004),
        )
        for name, value in (("AP", 0.584), ("AP50", 0.819), ("AP75", 0.687))
    ]
    classes = (
        ClassScore("circle", 0.6, drop * 2, (0.5, 0.7), (drop * 2 - 0.04, drop * 2 + 0.04)),
        ClassScore("square", 0.58, drop / 2),
    )
    return TaskScores(tuple(scores), classes)


def test_scores_drops_by_class_and_how_boxes_were_chosen() -> None:
    agreement = Agreement(0.984, (0.98, 0.99))
    rows = (
        EvaluatedModel(
            "source",
            "source",
            "cpu",
            250,
            agreement=Agreement(1.0, (1.0, 1.0)),
            scores=make_scores(0.0),
        ),
        EvaluatedModel(
            "onnxruntime",
            "int8",
            "cpu",
            250,
            "7d95a3c42e4a",
            snr_db=49.0,
            agreement=agreement,
            scores=make_scores(0.03),
            verdict=Verdict.FAIL,
        ),
        EvaluatedModel("tensorrt", "fp16", "cuda", 250, "0732e95c196b", "no GPU"),
    )
    classes = ("circle", "square", "triangle")
    dataset = Dataset("shapes/validation", "images", "92c930fec99e0000", 250, (), True, 3, classes)
    found = Evaluation(
        "shapes-detector",
        "s",
        "m",
        WeightsRecord("default:x", "0"),
        dataset,
        0.01,
        rows,
        "/w/runs/evaluate-1",
        task="detection",
        scoring="yolov8 head, NMS outside the engine per class (IoU 0.5)",
    )
    assert_golden(text_of(document_from_evaluation(found, {})), "evaluate-scores.txt")


def evaluation(kind="images", *, labeled=True):
    accuracy = Accuracy(
        0.985, (0.97, 0.99), 0.999, 0.98, 0.004, (-0.001, 0.009), 0.005, (-0.002, 0.012), 9, 5
    )
    source = EvaluatedModel("source", "source", "cpu", 800, accuracy=accuracy if labeled else None)
    rows = (
        source,
        EvaluatedModel(
            "onnxruntime",
            "int8",
            "cpu",
            800,
            "0123456789ab",
            snr_db=31.4,
            agreement=Agreement(0.99, (0.98, 0.995)),
            accuracy=accuracy if labeled else None,
            verdict=Verdict.INCONCLUSIVE,
        ),
        EvaluatedModel("onnxruntime", "fp32", "cpu", 800, "1123456789ab", verdict=Verdict.PASS),
        EvaluatedModel(
            "tensorrt", "fp16", "cuda", 800, "2123456789ab", why_not="no NVIDIA GPU on this machine"
        ),
        EvaluatedModel(
            "torch", "fp32", "cpu", 800, "3123456789ab", why_not="model.pt2: changed", failed=True
        ),
    )
    dataset = Dataset("digits/validation", kind, HASH, 800, (), labeled, 10)
    weights = WeightsRecord("file" if labeled else "random", HASH)
    return Evaluation(
        "digits", "card:digits", "m", weights, dataset, 0.01, rows, "/w/runs/evaluate-1"
    )


def test_an_evaluation():
    assert evaluation().status is ExitStatus.STAGE_FAILED
    text = text_of(
        *(
            document_from_evaluation(each, {})
            for each in (evaluation(), evaluation("texts", labeled=False))
        )
    )
    assert_golden(text, "evaluate.txt")
