"""What a proof asks of a server."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.deploy import proof
from optpipe.models.export.exported import Reference

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: the extra `triton`")


@pytest.mark.parametrize(("lengths", "asked"), [((4, 16, 32), [16, 16, 4, 32]), ((16, 16, 16), [16, 16])])
def test_sequences_are_asked_at_the_known_the_shortest_and_the_longest_length(tmp_path, lengths, asked):
    ids = InputSpec("input_ids", "int64", *((size, length) for size, length in zip((1, 8, 64), lengths, strict=True)))
    checked: Any = SimpleNamespace(folder=tmp_path, card=ModelCard("texts", "hf:texts", Task.EMBEDDING, (ids,)))
    place = tmp_path / "models" / "texts_engine"
    place.mkdir(parents=True)
    (place / "config.pbtxt").write_text('name: "texts_engine"\nmax_batch_size: 64\n')
    rows = np.arange(8 * 16).reshape(8, 16)
    known = Reference({"input_ids": rows}, {"sum": rows.sum(1)})
    found = list(
        proof._expect_rows("texts_engine", lambda calls: [{"sum": calls[0]["input_ids"].sum(1)}], known, checked)
    )
    assert [each.inputs["input_ids"].shape for each in found] == [(4, length) for length in asked]
    assert [bool(each.source) for each in found] == [length == 16 for length in asked]
    assert all(np.array_equal(each.outputs["sum"], each.inputs["input_ids"].sum(1)) for each in found)
