"""A selection among equal values is named where torch and the exported graph choose differently."""

from typing import Any

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.models.export.ties import describe_tie

DISTINCT = np.arange(12, dtype=np.float32).reshape(2, 6)
TOP = [("TopK", "x k", ["v", "y"], {"axis": -1})]
LOWEST = [("TopK", "x k", ["v", "y"], {"axis": -1, "largest": 0})]
CASES: dict[str, Any] = {
    "TopK": TOP,
    "TopK of the smallest": LOWEST,
    "ArgMax": [("ArgMax", "x", "y", {"axis": 1})],
    "ArgMin": [("ArgMin", "x", "y", {"axis": 1})],
}


def describe(nodes, values):
    outputs = {"y": ("INT64", ["a", "b"])}
    model = onnx_model(nodes, {"x": ["N", 6]}, outputs, k=np.array([2], np.int64))
    return describe_tie(model, {"x": values})


@pytest.mark.parametrize("case", CASES)
def test_equal_values_among_the_chosen_are_named(case) -> None:
    assert describe(CASES[case], DISTINCT) is None
    said = describe(CASES[case], np.zeros((2, 6), np.float32))
    assert said is not None
    assert said.startswith(CASES[case][0][0])
    assert "'x'" in said


@pytest.mark.parametrize(("nodes", "place"), [(TOP, slice(0, 2)), (LOWEST, slice(4, 6))])
def test_equal_values_that_no_choice_reaches_are_no_tie(nodes, place) -> None:
    values = DISTINCT.copy()
    values[:, place] = values[:, place].mean()
    assert describe(nodes, values) is None


@pytest.mark.parametrize(("nodes", "place"), [(TOP, slice(3, 5)), (LOWEST, slice(1, 3))])
def test_a_tie_at_the_edge_of_the_choice_is_named(nodes, place) -> None:
    values = DISTINCT.copy()
    values[:, place] = values[:, place].mean()
    assert describe(nodes, values) is not None


@pytest.mark.parametrize("apart", [1e-6, 1e-3])
def test_values_that_rounding_may_exchange_at_the_edge_are_named(apart) -> None:
    """The scores of a detector with random weights; another runtime may find the other one larger."""
    near = DISTINCT.copy()
    near[:, 4] = near[:, 5] - apart * near[:, 5]
    near[:, 3] = near[:, 4] - 1
    said = describe(TOP, near)
    assert (said is not None) is (apart < 1e-5)
    assert said is None or "equal up to rounding" in said


def test_boxes_of_equal_scores_are_named() -> None:
    boxes = np.array([[[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]], np.float32)
    model = onnx_model(
        [("NonMaxSuppression", "b s most", "y")],
        {"b": [1, 3, 4], "s": [1, 1, 3]},
        {"y": ("INT64", ["n", 3])},
        most=np.array([2], np.int64),
    )
    tied = {"b": boxes, "s": np.full((1, 1, 3), 0.5, np.float32)}
    said = describe_tie(model, tied)
    assert said is not None
    assert said.startswith("NonMaxSuppression")
    ramp = {"b": boxes, "s": np.array([[[0.5, 0.6, 0.7]]], np.float32)}
    assert describe_tie(model, ramp) is None
