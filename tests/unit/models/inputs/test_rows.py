"""Rows and a model's own layout are the same data."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.models.inputs.rows import batch_from_rows, lay_out, split_batches, to_rows

CARD = ModelCard(
    "voice", "voice.onnx", Task.OTHER,
    (
        InputSpec("x", "float32", (1, 3), (2, 3), (4, 3)),
        InputSpec("state", "float32", (2, 1, 5), (2, 2, 5), (2, 4, 5), batch=1),
        InputSpec("rate", "int64", (), (), ()),
    ),
)  # fmt: skip


@given(hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=4)), st.data())
def test_there_and_back(rows, data) -> None:
    axis = data.draw(st.integers(0, rows.ndim - 1))
    batch = lay_out(rows, axis)
    assert batch.shape[axis] == len(rows)
    assert np.array_equal(to_rows(batch, axis), rows)


def test_a_batch_has_every_input_in_its_own_layout() -> None:
    rows = {"x": np.ones((5, 3)), "state": np.arange(50).reshape(5, 2, 5), "rate": np.full(5, 16000)}
    found = list(split_batches(CARD, rows))
    assert [count for _, count in found] == [4, 1]
    assert {name: value.shape for name, value in found[0][0].items()} == {"x": (4, 3), "state": (2, 4, 5), "rate": ()}
    assert np.array_equal(found[1][0]["state"][:, 0], rows["state"][4])
    assert batch_from_rows(CARD, rows)["rate"] == 16000


def test_without_a_batch_axis_every_call_is_one_sample() -> None:
    card = ModelCard("tone", "tone.onnx", Task.OTHER, (InputSpec("x", "float32", (7,), (7,), (7,), batch=None),))
    assert card.batch_range == (1, 1, 1)
    assert [batch["x"].shape for batch, _ in split_batches(card, {"x": np.ones((3, 7))})] == [(7,)] * 3
