"""Several labels, values, and predictions of a user's task that are numbers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec, card_from_dict, task_from_text
from optpipe.core.errors import BadInputError
from optpipe.evaluate.tasks import TASKS
from optpipe.evaluate.tasks.closeness import compare_predictions
from optpipe.models.inputs.tensor_set import read_tensor_set
from optpipe.models.inputs.text_set import text_set_from_path
from optpipe.signoff.policy import policy_from_toml

X = InputSpec("x", "float32", (1, 3), (2, 3), (8, 3))
LABELED, VALUED = TASKS[Task.MULTI_LABEL], TASKS[Task.REGRESSION]


def card(task, outputs=4, labels=(), **head):
    spec = TensorSpec("y", "float32", ("batch", outputs))
    return ModelCard("net", "net.py:make", task, (X,), (spec,), labels=labels, head=head)


def samples(folder, labels, name="labels"):
    np.savez(folder / "data.npz", x=np.ones((len(labels), 3), np.float32), **{name: labels})
    return read_tensor_set(folder / "data.npz", (X,))


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target"])
def test_truths_in_a_file_of_tensors_have_the_usual_names(tmp_path, name) -> None:
    found = samples(tmp_path, np.arange(5), name)
    assert [each.label for each in found.files] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.array(["a", "b"]), "labels are <U1"),
        (np.arange(3), "give one integer for each of the 2 samples"),
        (np.array([1.0, np.nan]), "labels contain NaN"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, labels, said) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((2, 3), np.float32), labels=labels)
    with pytest.raises(BadInputError, match=said):
        read_tensor_set(tmp_path / "data.npz", (X,))


def test_an_unknown_array_names_that_of_the_truths(tmp_path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((2, 3), np.float32), classes=np.arange(2))
    with pytest.raises(
        BadInputError, match=r"unknown array 'classes'.*truths are an array 'labels'"
    ):
        read_tensor_set(tmp_path / "data.npz", (X,))


@pytest.mark.parametrize(
    "labels", [np.array([[0, 1, 0, 1], [0, 0, 0, 0]]), np.array([[0.0, 1, 0, 1], [0, 0, 0, 0]])]
)
def test_a_mark_for_each_class_gives_the_classes(tmp_path, labels) -> None:
    found = LABELED.read_truths(samples(tmp_path, labels), card(Task.MULTI_LABEL), 4)
    assert found == [[1, 3], []]


def write_label_lines(path, labels):
    lines = [json.dumps({"text": "a", "labels": each}) for each in labels]
    path.write_text("\n".join(lines) + "\n")
    return text_set_from_path(path)[0]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([[0, 1], [1, 1], [0, 0]], [[1], [0, 1], []]),
        ([[0, 1], [1], []], [[0, 1], [1], []]),  # a list of another length: all are indices
        ([[0, 1], ["a"]], [[0, 1], [0]]),
        ([["a", "b"], ["b"]], [[0, 1], [1]]),
    ],
)
def test_the_labels_of_a_set_are_all_marks_or_all_indices(tmp_path, labels, found) -> None:
    made = card(Task.MULTI_LABEL, 2, labels=("a", "b"))
    samples = write_label_lines(tmp_path / "texts.jsonl", labels)
    assert LABELED.read_truths(samples, made, 2) == found


def test_marks_in_quotes_are_no_marks(tmp_path) -> None:
    samples = write_label_lines(tmp_path / "texts.jsonl", [["0", "1"], ["0", "0"]])
    with pytest.raises(BadInputError, match="'0' is not a class of net"):
        LABELED.read_truths(samples, card(Task.MULTI_LABEL), 2)


def test_a_label_that_is_no_class_is_refused(tmp_path) -> None:
    with pytest.raises(BadInputError, match=r"7 is not a class of net; give a 0 or 1"):
        LABELED.read_truths(
            samples(tmp_path, np.array([[1, 7], [1, 2]])), card(Task.MULTI_LABEL), 4
        )


def decode(task, outputs, **head):
    made = card(Task.MULTI_LABEL if task is LABELED else Task.REGRESSION, outputs.shape[1], **head)
    return task.decode({"y": outputs}, (), None, made)


def test_classes_above_the_threshold_are_predicted() -> None:
    logits = np.array([[-2.0, 3, 0, 1], [-1, -1, -1, -1]], np.float32)
    assert decode(LABELED, logits) == [[1, 3], []]
    assert decode(LABELED, 1 / (1 + np.exp(-logits)), threshold=0.5) == [[1, 3], []]


def test_probabilities_without_a_threshold_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"as probabilities are\n.*threshold = 0.5"):
        decode(LABELED, np.array([[0.1, 0.9]], np.float32))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"threshold": "0.5"}, "'0.5' is not a number"),
        ({"threshold": True}, "True is not a number"),
        ({"limit": 0.5}, "has no 'limit'"),
    ],
)
def test_a_threshold_is_a_number_and_the_only_entry(head, said) -> None:
    with pytest.raises(BadInputError, match=said):
        decode(LABELED, np.array([[-0.1, 2.9]], np.float32), **head)


def test_scores_of_labels_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import f1_score, precision_score, recall_score

    rng = np.random.default_rng(0)
    true, found = rng.random((2, 50, 6)) > 0.6
    lists = [[np.flatnonzero(row).tolist() for row in each] for each in (true, found)]
    scores = LABELED.score_predictions(lists[0], lists[1], lists[1])
    expected = [
        measure(true, found, average="micro")
        for measure in (f1_score, precision_score, recall_score)
    ]
    assert [each.value for each in scores.scores] == pytest.approx(expected)
    by_class = f1_score(true, found, average=None)
    assert [each.value for each in scores.classes] == pytest.approx(by_class)


@pytest.mark.parametrize("outputs", [1, 3])
def test_scores_of_values_are_those_of_scikit_learn(outputs) -> None:
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    rng = np.random.default_rng(0)
    true = 10 + rng.normal(size=(200, outputs)) * np.arange(1, outputs + 1)
    found = true + 0.2 * rng.normal(size=true.shape)
    scores = VALUED.score_predictions(true.tolist(), true.tolist(), found.tolist()).scores
    assert [each.name for each in scores] == ["R2", "RMSE", "MAE"]
    scaled, moved = true / true.std(axis=0), found / true.std(axis=0)
    assert scores[0].value == pytest.approx(r2_score(true, found))
    assert scores[1].value == pytest.approx(mean_squared_error(scaled, moved) ** 0.5)
    assert scores[2].value == pytest.approx(mean_absolute_error(scaled, moved))
    for each in scores:
        assert each.drop > 0, "worse than the source, which is exact"
        assert each.drop_ci[0] <= each.drop <= each.drop_ci[1]


def test_equal_models_have_no_drop_and_an_interval_around_it() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=(500, 1))
    found = (true + 0.3 * rng.normal(size=true.shape)).tolist()
    for each in VALUED.score_predictions(true.tolist(), found, found).scores:
        assert each.drop == 0
        assert each.drop_ci[0] < 0 < each.drop_ci[1]


def test_the_interval_of_a_drop_holds_it_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(0), {"R2": 0, "RMSE": 0, "MAE": 0}
    expected = {"R2": 0.2**2 - 0.1**2, "RMSE": 0.1, "MAE": 0.1 * (2 / np.pi) ** 0.5}
    for _ in range(60):
        true = rng.normal(size=(200, 1))
        source, found = (true + share * rng.normal(size=true.shape) for share in (0.1, 0.2))
        for each in VALUED.score_predictions(true.tolist(), source.tolist(), found.tolist()).scores:
            held[each.name] += each.drop_ci[0] <= expected[each.name] <= each.drop_ci[1]
    assert min(held.values()) >= 54


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.array([2.5, 2.5, 2.5]), "all labels are 2.5"),
        (np.array([[1.0, 2], [1, 3], [1, 4]]), "all labels are 1 in one place"),
    ],
)
def test_labels_without_a_spread_have_no_scores(tmp_path, labels, said) -> None:
    with pytest.raises(BadInputError, match=said):
        VALUED.read_truths(samples(tmp_path, labels), card(Task.REGRESSION), None)


def test_values_of_another_number_than_the_outputs_are_refused(tmp_path) -> None:
    truths = VALUED.read_truths(
        samples(tmp_path, np.array([[1.0, 2], [3, 5]])), card(Task.REGRESSION), None
    )
    with pytest.raises(BadInputError, match=r"labels have 2 values .* first output has 4"):
        VALUED.score_predictions(truths, decode(VALUED, np.ones((2, 4))), [[0.0] * 4] * 2)


leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=2)
predictions = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(predictions, min_size=1, max_size=6))
@pytest.mark.slow
def test_a_prediction_agrees_with_itself(values) -> None:
    assert compare_predictions(values, values).tolist() == [1.0] * len(values)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(1e-5, 1e5))
def test_agreement_does_not_depend_on_the_unit(values, scale) -> None:
    moved = [value + at * 1e-3 for at, value in enumerate(values)]
    if np.ptp(values) < 1e-3:
        return
    before = compare_predictions([[each] for each in values], [[each] for each in moved])
    room = 0.01 * np.std(values)
    clear = np.abs(np.abs(np.subtract(moved, values)) - room) > 1e-9
    after = compare_predictions(
        [[each * scale] for each in values], [[each * scale] for each in moved]
    )
    assert (before == after)[clear].all()


@pytest.mark.parametrize(
    ("noise_db", "least", "most"), [(148, 1.0, 1.0), (60, 0.99, 1.0), (20, 0.0, 0.2)]
)
def test_agreement_of_numbers_follows_their_error(noise_db, least, most) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=2000)
    noisy = values + 10 ** (-noise_db / 20) * rng.normal(size=2000)
    share = compare_predictions(values.tolist(), noisy.tolist()).mean()
    assert least <= share <= most


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 4, 0.0),
        (3, 3.0, 1.0),
        (True, 1, 0.0),
        ("1.0", "1.00", 0.0),
        ([1.0], [1.0, 1.0], 0.0),
        ({"a": 1}, {"b": 1}, 0.0),
        ({}, [], 0.0),
        (float("nan"), float("nan"), 1.0),
        (float("inf"), 1.0, 0.0),
        (None, None, 1.0),
    ],
)
def test_what_is_no_number_with_a_fraction_is_compared_exactly(one, other, same) -> None:
    assert compare_predictions([one], [other]).tolist() == [same]


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"did you mean regression\?.*segmentation"):
        task_from_text("regression-")
    with pytest.raises(BadInputError, match="unknown task 'sorting': tasks are classification"):
        card_from_dict({"name": "net", "source": "net.onnx", "task": "sorting"})


def test_a_lowest_error_is_refused_in_a_policy() -> None:
    with pytest.raises(BadInputError, match="RMSE is better when lower"):
        policy_from_toml(b'schema = 1\n[accuracy]\nminimum_score = "5 RMSE"\n')
    policy_from_toml(b'schema = 1\n[accuracy]\nmaximum_drop = "5 RMSE"\n')


@pytest.mark.parametrize(
    ("line", "truth"),
    [
        ({"sentence1": "a", "sentence2": "b", "score": 3.5}, 3.5),
        ({"text": "a", "label": 2.0, "score": 0.9}, 2.0),
    ],
)
def test_the_truth_of_a_text_is_its_label_or_else_its_score(tmp_path, line, truth):
    lines = [{**line, "label": 1.0} if "label" in line else {**line, "score": 1.0}, line]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found, _ = text_set_from_path(tmp_path / "texts.jsonl")
    truths = VALUED.read_truths(found, card(Task.REGRESSION), None)
    assert sorted(truths) == [[1.0], [truth]]
