"""Rows that a graph selects are compared as sets: equal scores may swap places, and what is wrong stays wrong."""

from typing import Any

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.backends.selections import read_selection, selection_from_graph
from optpipe.stats.selected_rows import EMPTY, Selection, align_rows

RANDOM = np.random.default_rng(0)


def make_outputs(samples=3, rows=7):
    return {
        "boxes": RANDOM.standard_normal((samples, rows, 4)).astype(np.float32),
        "labels": RANDOM.integers(0, 9, (samples, rows)),
        "scores": RANDOM.random((samples, rows)).astype(np.float32),
        "features": RANDOM.standard_normal((samples, 5)).astype(np.float32),
    }


SELECTION = Selection({"boxes": (0,), "features": (0,), "labels": (0,), "scores": (0,)}, (7,))


def shuffle(outputs):
    order = [RANDOM.permutation(7) for _ in outputs["boxes"]]
    return {
        name: value
        if name == "features"
        else np.stack([v[o] for v, o in zip(value, order, strict=True)])
        for name, value in outputs.items()
    }


@pytest.mark.parametrize("noise", [0.0, 1e-3, 3e-2])
def test_swapped_rows_go_back_together(noise) -> None:
    expected = make_outputs()
    found = shuffle(expected)
    found = {
        name: value + noise * RANDOM.standard_normal(value.shape).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for name, value in found.items()
    }
    aligned = align_rows(expected, found, SELECTION, 1e-5)
    assert np.array_equal(aligned["labels"], expected["labels"])
    for name in ("boxes", "scores", "features"):
        off = np.linalg.norm(aligned[name] - expected[name]) / np.linalg.norm(expected[name])
        assert off <= 4 * noise + 1e-6


def test_a_wrong_row_stays_wrong() -> None:
    expected = make_outputs()
    found = shuffle(expected)
    found["boxes"][0, 0] += 5
    aligned = align_rows(expected, found, SELECTION, 1e-5)
    assert np.linalg.norm(aligned["boxes"] - expected["boxes"]) > 5


def test_columns_that_no_selection_takes_are_never_reordered() -> None:
    """The classes of a classifier whose features pass a TopK are no rows."""
    expected = {"features": RANDOM.standard_normal((3, 5)).astype(np.float32)}
    found = {"features": expected["features"][:, ::-1]}
    aligned = align_rows(expected, found, SELECTION, 1e-5)
    assert np.array_equal(aligned["features"], found["features"])


def test_rows_of_another_shape_and_outputs_with_nan_stay_as_they_are() -> None:
    expected = make_outputs()
    fewer = {name: value[:, :4] for name, value in expected.items()}
    assert all(align_rows(expected, fewer, SELECTION, 1e-5)[name] is fewer[name] for name in fewer)
    broken = shuffle(expected)
    broken["scores"][:] = np.nan
    assert np.isnan(align_rows(expected, broken, SELECTION, 1e-5)["scores"]).all()


def test_the_selection_of_a_graph_is_read_from_it(tmp_path) -> None:
    nodes = [("TopK", "x k", ["v", "i"], {"axis": 1}), ("Relu", "x", "other"), ("Neg", "v", "y")]
    onnx_model(
        nodes,
        {"x": ["n", 9]},
        {"y": ["n", 4], "other": ["n", 9]},
        path=tmp_path / "net.onnx",
        k=np.array([4]),
    )
    assert read_selection(tmp_path / "net.onnx") == Selection({"y": (0,)}, (4,))
    inside = read_selection(tmp_path / "net.onnx", inside=True)
    assert inside == Selection({"i": (0,), "v": (0,), "y": (0,)}, (4,), ranked=("v",))


def permute(outputs, order):
    return {
        name: value if name == "features" else value[:, order] for name, value in outputs.items()
    }


RANKED = Selection(SELECTION.outputs, SELECTION.counts, ranked=("scores",))
ORDER = [1, 0, 2, 3, 4, 6, 5]


def make_ranked(scores):
    return make_outputs() | {"scores": np.tile(np.array(scores, np.float32), (3, 1))}


def test_rows_of_equal_scores_swap_places_and_others_do_not() -> None:
    equal = make_ranked([0.9, 0.9, 0.5, 0.5, 0.5, 0.2, 0.2])
    assert measure(equal, align_rows(equal, permute(equal, ORDER), RANKED, 1e-5)) == 0
    ordered = make_ranked([0.9, 0.8, 0.5, 0.5, 0.5, 0.2, 0.1])
    swapped = permute(ordered, ORDER)
    assert measure(ordered, align_rows(ordered, swapped, RANKED, 1e-5)) > 0.05
    assert measure(ordered, align_rows(ordered, swapped, SELECTION, 1e-5)) == 0


def test_ascending_scores_have_an_order_too() -> None:
    ordered = make_ranked([0.1, 0.2, 0.5, 0.5, 0.5, 0.8, 0.9])
    assert measure(ordered, align_rows(ordered, permute(ordered, ORDER), RANKED, 1e-5)) > 0.05


def measure(expected, found):
    """The largest relative error of an output; the share of labels that differ."""
    return max(
        np.linalg.norm(value - expected[name]) / np.linalg.norm(expected[name])
        if value.dtype.kind == "f"
        else np.mean(value != expected[name])
        for name, value in found.items()
    )


@pytest.mark.parametrize("ranked", [SELECTION, RANKED], ids=["any order", "in order"])
def test_what_is_wrong_stays_wrong_in_any_order(ranked) -> None:
    expected = make_ranked([0.9, 0.8, 0.7, 0.5, 0.4, 0.2, 0.2])
    wrong: dict[str, dict[str, Any]] = {
        "a wrong box with the right score": {"boxes": 0},
        "a wrong score with the right box": {"scores": 3},
        "scores in another order than their boxes": {"scores": ORDER},
        "boxes in another order than their scores": {"boxes": ORDER},
        "classes in another order than their boxes": {"labels": ORDER},
    }
    for what, change in wrong.items():
        found = {name: value.copy() for name, value in expected.items()}
        for name, how in change.items():
            if isinstance(how, list):
                found[name] = found[name][:, how]
            else:
                found[name][:, how] *= -3
        if (found["labels"] == expected["labels"]).all() and "classes" in what:
            continue  # the swapped rows have one class
        for order in (list(range(7)), [0, 1, 2, 3, 4, 6, 5]):
            aligned = align_rows(expected, permute(found, order), ranked, 1e-5)
            assert measure(expected, aligned) > 0.02, what


def test_a_row_appears_as_often_as_in_the_other() -> None:
    expected = make_outputs()
    for name in ("boxes", "labels", "scores"):
        expected[name][:, 1] = expected[name][:, 0]
    assert measure(expected, align_rows(expected, shuffle(expected), SELECTION, 1e-5)) == 0
    twice = permute(expected, [0, 2, 2, 3, 4, 5, 6])
    assert measure(expected, align_rows(expected, twice, SELECTION, 1e-5)) > 0.1
    thrice = permute(expected, [0, 1, 0, 3, 4, 5, 6])
    assert measure(expected, align_rows(expected, thrice, SELECTION, 1e-5)) > 0.1


def test_two_selections_of_one_size_are_ordered_apart() -> None:
    """Two heads: ties of one do not move the rows of the other."""
    selection = Selection({"a": (0,), "b": (0,), "c": (1,)}, (7,))
    expected = {name: RANDOM.standard_normal((2, 7)) for name in "abc"}
    found = {
        "a": expected["a"][:, ORDER],
        "b": expected["b"][:, ORDER],
        "c": expected["c"][:, ::-1],
    }
    assert measure(expected, align_rows(expected, found, selection, 1e-5)) == 0
    joined = Selection(dict.fromkeys("abc", (0,)), (7,))
    assert measure(expected, align_rows(expected, found, joined, 1e-5)) > 0.1


TWO_HEADS = [
    ("TopK", "x k", ["v", "i"], {"axis": 1}),
    ("TopK", "x k", ["w", "j"], {"axis": 1, "sorted": 0}),
    ("GatherElements", "x i", "again", {"axis": 1}),
    ("Sigmoid", "again", "scores"),
    ("GatherElements", "other i", "values", {"axis": 1}),
    ("ReduceMean", "v", "mean", {"axes": [1], "keepdims": 0}),
    ("Unsqueeze", "mean last", "column"),
    ("MatMul", "column weight", "logits"),
]


def test_a_graph_tells_rows_from_columns_and_scores_from_other_values(tmp_path) -> None:
    """The classes of a mean over rows are no rows, although there are as many of them."""
    onnx_model(
        TWO_HEADS,
        {"x": ["n", 9], "other": ["n", 9]},
        {name: ["n", 4] for name in ("v", "w", "scores", "values", "logits")},
        path=tmp_path / "net.onnx",
        k=np.array([4]),
        last=np.array([1]),
        weight=np.ones((1, 4), np.float32),
    )
    found = read_selection(tmp_path / "net.onnx")
    assert found.outputs == {"v": (0,), "w": (1,), "scores": (0,), "values": (0,), "logits": ()}
    assert found.ranked == ("scores", "v")
    logits = {"logits": RANDOM.standard_normal((3, 4))}
    reversed_classes = {"logits": logits["logits"][:, ::-1]}
    aligned = align_rows(logits, reversed_classes, found, 1e-5)
    assert np.array_equal(aligned["logits"], reversed_classes["logits"])


def test_a_number_of_rows_that_is_computed_has_a_bound(tmp_path) -> None:
    """As in torchvision's detectors: at most 300 of those whose score is high enough."""
    nodes = [
        ("Shape", "x", "size", {"start": 1}),
        ("Min", "limit size", "fewer"),
        ("Cast", "fewer", "k", {"to": 7}),
        ("TopK", "x k", ["v", "i"], {"axis": 1}),
    ]
    model = onnx_model(nodes, {"x": ["n", "m"]}, {"v": ["n", None]}, limit=np.array([4]))
    assert selection_from_graph(model) == Selection({"v": (3,)}, (4,), ranked=("v",))


def test_without_a_selection_nothing_moves() -> None:
    expected = make_outputs()
    found = shuffle(expected)
    assert all(align_rows(expected, found, EMPTY, 0.0)[name] is found[name] for name in found)
