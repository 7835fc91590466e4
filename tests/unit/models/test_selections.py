"""Rows that a graph selects are compared as sets: equal scores may swap places, and what is wrong stays wrong."""

import numpy as np
import pytest
from tests.fakes.graphs import onnx_model

from optpipe.models.export.selections import Selection, align_rows, read_selection

RANDOM = np.random.default_rng(0)


def make_outputs(samples=3, rows=7):
    return {
        "boxes": RANDOM.standard_normal((samples, rows, 4)).astype(np.float32),
        "labels": RANDOM.integers(0, 9, (samples, rows)),
        "scores": RANDOM.random((samples, rows)).astype(np.float32),
        "features": RANDOM.standard_normal((samples, 5)).astype(np.float32),
    }


SELECTION = Selection(frozenset({"boxes", "labels", "scores", "features"}), frozenset({7}))


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
    assert read_selection(tmp_path / "net.onnx") == Selection(frozenset({"y"}), frozenset({4}))
