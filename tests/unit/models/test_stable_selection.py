"""Among equal values the reference selects what its exported graph selects: the lower index."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.graphs import onnx_model

from optpipe.backends.plain_session import PlainSession
from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec
from optpipe.core.process import run_python_code
from optpipe.models.export.exported import run_torch_model
from optpipe.models.export.stable_selection import open_stable_selection

RANDOM = np.random.default_rng(0)
SHAPE = (3, 200)
TIED = RANDOM.integers(0, 4, SHAPE).astype(np.float32)
"""Each value occurs about fifty times in a row, so that the edge of every selection is a tie."""


@pytest.mark.parametrize("largest", [False, True])
def test_topk_takes_what_onnx_takes(largest) -> None:
    nodes = [("TopK", "x k", ["v", "i"], {"axis": 1, "largest": int(largest)})]
    outputs = {"v": ("FLOAT", ["a", "b"]), "i": ("INT64", ["a", "b"])}
    with PlainSession(onnx_model(nodes, {"x": [*SHAPE]}, outputs, k=np.array([60]))) as session:
        expected = session.run({"x": TIED})
    with open_stable_selection():
        found = torch.from_numpy(TIED).topk(60, 1, largest)
    assert np.array_equal(found.values, expected["v"])
    assert np.array_equal(found.indices, expected["i"])


@given(k=st.integers(0, 3), largest=st.booleans(), axis=st.integers(-2, 1), seed=st.integers(0, 99))
def test_topk_is_a_stable_sort_cut_off(k, largest, axis, seed) -> None:
    values = np.random.default_rng(seed).integers(0, 3, (3, 50)).astype(np.float32)
    order = np.argsort(-values if largest else values, axis=axis, kind="stable")
    with open_stable_selection():
        found = torch.from_numpy(values).topk(k, axis, largest)
    expected = np.take(order, np.arange(k), axis)
    assert np.array_equal(found.indices, expected)
    assert np.array_equal(found.values, np.take_along_axis(values, expected, axis))


@pytest.mark.parametrize("descending", [False, True])
def test_sorts_keep_the_order_of_equal_values(descending) -> None:
    expected = np.argsort(-TIED if descending else TIED, axis=1, kind="stable")
    values = torch.from_numpy(TIED)
    with open_stable_selection():
        assert np.array_equal(values.sort(descending=descending).indices, expected)
        assert np.array_equal(torch.argsort(values, -1, descending), expected)


class Selector(torch.nn.Module):
    """Rows of `x` by the largest of a score that is zero for most, as masked anchors have it."""

    def forward(self, x):
        score = torch.where(x > 2, x, torch.zeros_like(x))
        return x.gather(1, score.topk(20).indices)


CARD = ModelCard(
    "net",
    "net.py:make",
    Task.OTHER,
    (InputSpec("x", "float32", (1, 200), (4, 200), (8, 200), batch=0),),
    outputs=(TensorSpec("y", "float32", ("batch", 20)),),
)


@pytest.mark.parametrize("scripted", [False, True])
def test_a_module_selects_the_same_rows_in_every_batch(scripted) -> None:
    """torch.topk alone sorts rows of a large batch in another way than those of a small one."""
    module = torch.jit.script(Selector()) if scripted else Selector()
    rows = RANDOM.standard_normal((8, 200)).astype(np.float32)
    score = np.where(rows > 2, rows, 0)
    expected = np.take_along_axis(rows, np.argsort(-score, axis=1, kind="stable")[:, :20], 1)
    assert np.array_equal(run_torch_model(module, CARD, {"x": rows})["y"], expected)
    assert np.array_equal(run_torch_model(module, CARD, {"x": rows[:3]})["y"], expected[:3])


def test_errors_and_other_operators_are_those_of_torch() -> None:
    values = torch.from_numpy(TIED)
    with open_stable_selection():
        assert torch.tensor(3.0).topk(1).indices == 0
        with pytest.raises(RuntimeError, match="out of range"):
            values.topk(201)
        attention = torch.nn.functional.scaled_dot_product_attention
        answer = attention(*(torch.ones(1, 1, 2, 8),) * 3)
    assert torch.equal(answer, torch.ones(1, 1, 2, 8))


@pytest.mark.slow
def test_it_costs_no_import_of_the_compiler() -> None:
    code = (
        "import sys, torch; from optpipe.models.export.stable_selection import open_stable_selection as hold\n"
        "with hold(): torch.zeros(9).topk(3)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_python_code(code).stdout.split() == ["False"]


@pytest.mark.slow
def test_a_module_that_compiles_itself_under_it_selects_the_same() -> None:
    compiled = torch.compile(lambda values: values.topk(5).indices, backend="eager")
    with torch.inference_mode(), open_stable_selection():
        found = compiled(torch.from_numpy(TIED))
    expected = torch.sort(torch.from_numpy(TIED), dim=-1, descending=True, stable=True).indices
    assert torch.equal(found, expected[:, :5])
