"""Outputs at each batch size that has code of its own are compared; the worst counts."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.inductor_packages import parse_static_batches
from optpipe.build.verify import fill_batches, verify_session
from optpipe.core.card import card_from_dict
from optpipe.core.entries import ReferenceInfo
from optpipe.core.errors import BadInputError
from optpipe.models.export.exported import Reference

CARD = card_from_dict(
    {
        "name": "double",
        "source": "double.onnx",
        "inputs": [{"name": "x", "dtype": "float32", "min": [1, 3], "opt": [4, 3], "max": [16, 3]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
    }
)


ABOUT = ReferenceInfo("tensors", 0, "", "test", ())


def make_reference(samples):
    rows = np.random.default_rng(samples).normal(size=(samples, 3)).astype(np.float32)
    return Reference({"x": rows}, {"y": 2 * rows})


def answer(inputs, wrong=()):
    """A session's outputs; the last row of a batch of a size in `wrong` is off."""
    outputs = 2 * inputs["x"]
    if len(outputs) in wrong:
        outputs[-1] += 1
    return {"y": outputs}


@given(st.integers(1, 9), st.sets(st.integers(1, 16), max_size=3))
def test_a_wrong_row_at_one_batch_size_fails_the_whole_artifact(samples, sizes):
    def verify(wrong):
        session = SimpleNamespace(run=lambda inputs: answer(inputs, wrong))
        return verify_session(session, CARD, 1e-3, make_reference(samples), ABOUT, sorted(sizes))[0]

    right = verify(())
    assert right.passed
    assert right.samples == samples
    for size in sizes:
        assert verify({size}).passed is False


@pytest.mark.parametrize(("change", "agreement"), [("order", 1.0), ("one of four boxes", 0.75), ("every box", 0.0)])
def test_rows_that_the_graph_selects_are_compared_as_boxes(tmp_path, change, agreement):
    onnx_model([("TopK", "x k", "found places", {"axis": 1})], {"x": ["batch", 4, 6]}, {"found": ["batch", 4, 6]},
               k=np.array([4]), path=tmp_path / "graph.onnx")  # fmt: skip
    place = {"name": "x", "dtype": "float32", "min": [1, 4, 6], "opt": [4, 4, 6], "max": [16, 4, 6]}
    output = {"name": "found", "dtype": "float32", "shape": ["batch", 4, 6]}
    card = card_from_dict({"name": "d", "source": "d", "task": "detection", "inputs": [place], "outputs": [output]})
    best = np.arange(4, 0, -1)[:, None]
    boxes = np.concatenate([best * 20, best * 20, best * 20 + 9, best * 20 + 9, best / 5 + 0.1, best], 1).astype(
        np.float32
    )
    moved = {"order": 0, "one of four boxes": 1, "every box": 4}[change]

    def answer_in_another_order(inputs):
        found = inputs["x"].copy()
        found[:, :moved, :4] += 200
        return {"found": found[:, ::-1]}

    reference = Reference({"x": np.stack([boxes] * 5)}, {"found": np.stack([boxes] * 5)})
    session = SimpleNamespace(run=answer_in_another_order)
    info, rows = verify_session(session, card, 0.3, reference, ABOUT, graph=tmp_path / "graph.onnx")
    assert info.box_agreement == pytest.approx(agreement)
    assert (info.passed, info.snr_db) == (agreement > 0.7, None)
    assert (info.selected, info.outputs, rows) == (("found",), (), {})


@given(st.integers(1, 9), st.integers(1, 16))
def test_samples_are_repeated_as_whole_until_they_fill_batches(samples, size):
    filled = fill_batches(make_reference(samples), size)
    assert len(filled.inputs["x"]) % size == 0
    assert len(filled.inputs["x"]) % samples == 0
    np.testing.assert_array_equal(2 * filled.inputs["x"], filled.outputs["y"])


@pytest.mark.parametrize(("text", "sizes"), [("", ()), ("none", ()), ("64,1", (1, 64)), (" 8, 8", (8,))])
def test_static_batches_are_read_in_any_order(text, sizes):
    assert parse_static_batches(text) == sizes


@pytest.mark.parametrize("text", ["0", "1,x", "-4", "1.5"])
def test_what_is_no_batch_size_is_refused(text):
    with pytest.raises(BadInputError, match="is not a batch size; example: 1,64"):
        parse_static_batches(text)
