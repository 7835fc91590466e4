"""What a module may do in forward, and what is said of one that cannot be exported."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optpipe.backends.plain_session import PlainSession
from optpipe.core import torch
from optpipe.core.card import InputSpec, ModelCard, Task, TensorSpec, card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, GateError, StageError
from optpipe.core.events import SilentListener
from optpipe.models.export import onnx_export
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    explain_other_export,
    export_model,
    run_torch_model,
)
from optpipe.models.export.onnx_export import onnx_from_torch
from optpipe.models.sources.python_file import PythonFileSource
from optpipe.workspace.file_names import CARD
from optpipe.workspace.store import Store

INPUTS = 'INPUTS = [dict(name="x", min=[1, 8], opt=[4, 8], max=[16, 8])]'
HEAD = f"""
from dataclasses import dataclass
import torch
from torch import nn
{INPUTS}
@dataclass
class Out:
    scores: torch.Tensor
    loss: torch.Tensor | None = None
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 4), nn.Embedding(10, 4)
        self.register_buffer("calls", torch.zeros(1))
"""
TWO = 'INPUTS += [dict(name="ids", dtype="int64", min=[1, 5], opt=[4, 5], max=[16, 5])]\n'


def checked(folder, forward, more=""):
    """The card and the reference of a model with this forward."""
    (folder / "net.py").write_text(f"{HEAD}    def forward{forward}\n{more}")
    model, store = (
        Model(PythonFileSource(folder / "net.py", "Net"), WeightsRequest()),
        Store(folder / ".optpipe"),
    )
    entry, _ = export_model(model, store, SilentListener())
    found, _ = compute_reference(model, entry, None, store, SilentListener())
    return card_from_file(entry.file(CARD)), found


WRITTEN = [
    ("(self, x, scale=2.0): return Out(self.linear(x) * scale)", "", ["scores"]),
    (
        "(self, *, x): return {'logits': self.linear(x), 'more': (x, [x * 2])}",
        "",
        ["logits", "more.0", "more.1.0"],
    ),
    # `mul` is also what the exporter calls the product inside
    ("(self, x): return {'mul': x * 2 + 1, 'same': x * 2 + 1}", "", ["mul", "same"]),
    ("(self, x): return (y := {'once': self.linear(x)}) | {'twice': y['once']}", "", 2),
    ("(self, x): return {'x': self.linear(x)}", "", 1),
    ("(self, ids, *, x): return self.linear(x) + self.table(ids).mean(1)", TWO, 1),
    ("(self, x): return x, x.T * 2", "", 2),
    ("(self, x): return self.linear(x), None, [None, (x * 2, x.T * 3)]", "", 3),
    ("(self, cat): return torch.cat([cat, cat * 2], 1)", INPUTS.replace('"x"', '"cat"'), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "more", "outputs"), WRITTEN)
def test_forwards_as_people_write_them(tmp_path, forward, more, outputs) -> None:
    card, found = checked(tmp_path, forward, more)
    names = [each.name for each in card.outputs]
    assert (len(names) if isinstance(outputs, int) else names) == outputs
    assert all(each.relative < 1e-3 for each in found.info.export_parity)
    assert [each.below for each in card.inputs] == [None, 10][: len(card.inputs)]


REFUSED = [
    ("(self, x): raise ValueError('own')", BadInputError, r"ValueError: own \(net.py, line 15\)"),
    ("(self, x): return 3.0", BadInputError, r"forward returns the output \(float\), not tensors"),
    ("(self, x): return {'y': 'a', 'z': [1]}", BadInputError, r"returns y \(str\), z.0 \(int\)"),
    (
        "(self, x): return {'y': x * 2, 'loss': x.mean()}",
        BadInputError,
        r"output 'loss' is a single value for a whole batch.*--batch 1",
    ),
    ("(self, x): return None", BadInputError, "forward returns no tensor"),
    (
        "(self, x): return self.table(x)",
        BadInputError,
        r"fails on the inputs .* \(x float32 4x8\): RuntimeError",
    ),
    (
        "(self, x): return x.mean()",
        BadInputError,
        r"output '.*' is a single value for a whole batch",
    ),
    (
        "(self, x): return x.reshape(4, 8) * 2",
        BadInputError,
        "accepts only size 4 in dimension 0.*--batch 4",
    ),
    ("(self, x, ids): return x * 2", BadInputError, "not use input 'ids'"),
    (
        "(self, x): self.calls += 1; return x * self.calls",
        BadInputError,
        "modifies its buffer 'calls'",
    ),
    (
        "(self, x): return x if x.sum() > 0 else -x",
        StageError,
        r"\(net.py, line 15\)\n.*torch.where",
    ),
    ("(self, x): return nn.functional.dropout(x)", GateError, "is not deterministic"),
    ("(self, x): return self.linear(x) / 0 * 0", BadInputError, "NaN or Inf in output"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "error", "said"), REFUSED)
def test_what_cannot_be_exported_is_said_with_the_way_out(
    tmp_path, capsys, forward, error, said
) -> None:
    with pytest.raises(error, match=said):
        checked(tmp_path, forward, TWO if "ids" in forward else "")
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_outputs_that_are_no_tensors_are_named(tmp_path) -> None:
    class_ = "class Cache: pass\n"
    (tmp_path / "net.py").write_text(
        f"{HEAD}    def forward(self, x): return {{'y': self.linear(x), 'past': Cache(), 'n': 3}}\n{class_}"
    )
    model, store = (
        Model(PythonFileSource(tmp_path / "net.py", "Net"), WeightsRequest()),
        Store(tmp_path / ".optpipe"),
    )
    stored = None
    for _ in range(2):
        listener = SilentListener()
        entry, _ = export_model(model, store, listener, stored)
        stored = entry
        assert entry.info.left_out == ("past (Cache)", "n (int)")
        assert "left out of its outputs" in " ".join(listener.warnings)


BLOCKED = [
    (
        "nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)))",
        r"remove_parametrizations\(module.get_submodule\('0'\), 'weight'\)",
    ),
    ("Packed()", "run the layer on the padded batch"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("made", "said"), BLOCKED)
def test_what_the_exporter_lacks_has_a_way_out(tmp_path, made, said) -> None:
    (tmp_path / "net.py").write_text(
        f"""import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
{INPUTS}
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(1, 4, batch_first=True)
    def forward(self, x):
        lengths = (x.abs().sum(1) > 3).long() + 4
        packed = pack_padded_sequence(x[..., None], lengths, True, False)
        return pad_packed_sequence(self.layer(packed)[0], True, total_length=8)[0]
def make():
    return {made}
"""
    )
    model = Model(PythonFileSource(tmp_path / "net.py", "make"), WeightsRequest())
    with pytest.raises(StageError, match=said):
        export_model(model, Store(tmp_path / ".optpipe"), SilentListener())


def test_data_that_the_module_fails_on_are_refused() -> None:
    import torch

    ids = InputSpec("ids", "int64", (1, 2), (4, 2), (8, 2))
    card = ModelCard(
        "net.make",
        "net.py:make",
        Task.OTHER,
        (ids,),
        (TensorSpec("y", "float32", ("batch", 2, 4)),),
    )
    with pytest.raises(BadInputError, match="fails on its inputs: IndexError: index out of range"):
        run_torch_model(torch.nn.Embedding(10, 4), card, {"ids": np.array([[1, -1]])})


@pytest.mark.slow
def test_outputs_that_ignore_the_input_are_said(tmp_path) -> None:
    (tmp_path / "net.py").write_text(f"{HEAD}    def forward(self, x): return self.linear(x * 0)\n")
    model, store = (
        Model(PythonFileSource(tmp_path / "net.py", "Net"), WeightsRequest()),
        Store(tmp_path / ".optpipe"),
    )
    for known in (False, True):
        listener = SilentListener()
        _, stored = compute_reference(
            model, export_model(model, store, listener)[0], None, store, listener
        )
        assert stored is known
        assert "the same outputs for every input" in " ".join(listener.warnings)


def test_a_module_whose_weights_no_file_holds_is_refused_before_the_export(tmp_path) -> None:
    import torch

    module = torch.nn.Linear(1 << 15, 1 << 14, bias=False, device="meta")
    card = ModelCard(
        "net", "net.py:make", Task.OTHER, (InputSpec("x", "float32", (1, 8), (1, 8), (1, 8)),)
    )
    with pytest.raises(
        BadInputError, match=r"net: its weights take 2\.00 GiB; an ONNX file holds 2 GiB at most"
    ):
        onnx_from_torch(module, card, tmp_path / "net.onnx")


@pytest.mark.slow
def test_inputs_that_are_not_numbers_are_not_blamed_on_the_weights(tmp_path) -> None:
    (tmp_path / "net.py").write_text(f"{HEAD}    def forward(self, x): return self.linear(x)\n")
    model, store = (
        Model(PythonFileSource(tmp_path / "net.py", "Net"), WeightsRequest()),
        Store(tmp_path / ".optpipe"),
    )
    entry, _ = export_model(model, store, SilentListener())
    np.savez(tmp_path / "data.npz", x=np.full((4, 8), np.nan, np.float32))
    with pytest.raises(BadInputError, match=r"data\.npz: input 'x' contains NaN"):
        compute_reference(model, entry, tmp_path / "data.npz", store, SilentListener())


@pytest.mark.slow
def test_another_export_is_explained_by_what_differs(tmp_path) -> None:
    (tmp_path / "net.py").write_text(
        f"{HEAD}    def forward(self, x):\n        return self.linear(x)\n"
    )
    store = Store(tmp_path / ".optpipe")
    model = Model(PythonFileSource(tmp_path / "net.py", "Net"), WeightsRequest())
    entry, _ = export_model(model, store, SilentListener())
    assert explain_other_export(model, entry) == ("", True)

    recipe = dict(entry.recipe)
    older = {
        "a version of torch": (recipe | {"tools": recipe["tools"] | {"torch": "1.0"}}, "torch"),
        "a version of optpipe": (recipe | {"revision": "older"}, "optpipe"),
    }
    for changed, named in older.values():
        exported: Any = SimpleNamespace(recipe=changed)
        how = explain_other_export(model, exported)
        assert how == (f"other versions of {named}", True)

    narrow = replace(model, batch=(1, 2, 3))
    assert explain_other_export(narrow, entry) == ("other batch", False)


class Steps(SilentListener):
    """Remembers the names of the steps that were shown."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def step(self, name: str, total: int | None = None):
        self.names.append(name)
        return super().step(name, total=total)


@pytest.mark.slow
def test_an_export_shows_its_parts_and_is_made_once(tmp_path) -> None:
    """Whatever precisions are built: an export of a detector takes minutes."""
    (tmp_path / "net.py").write_text(f"{HEAD}    def forward(self, x): return self.linear(x)\n")
    model = Model(PythonFileSource(tmp_path / "net.py", "Net"), WeightsRequest())
    store, shown = Store(tmp_path / ".optpipe"), Steps()
    first, existed = export_model(model, store, shown)
    assert not existed
    assert {"convert to ONNX", "simplify the graph"} <= {*shown.names}
    again = Steps()
    second, existed = export_model(model, store, again)
    assert existed
    assert second.id == first.id
    assert "convert to ONNX" not in again.names


@pytest.mark.slow
def test_a_large_graph_is_the_same_without_the_exporters_optimizer(tmp_path, monkeypatch) -> None:
    net = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    card = ModelCard(
        "net",
        "net.py:make",
        Task.OTHER,
        (InputSpec("x", "float32", (1, 5, 16), (2, 5, 16), (4, 5, 16)),),
    )
    graphs = []
    for largest in (onnx_export.LARGEST_OPTIMIZED, 0):
        monkeypatch.setattr(onnx_export, "LARGEST_OPTIMIZED", largest)
        graphs.append(onnx_from_torch(net, card, tmp_path / f"{largest}.onnx").graph)
    kinds = ("MatMul", "Gemm", "Softmax", "LayerNormalization")
    counts = [
        [node.op_type for node in each.graph.node if node.op_type in kinds] for each in graphs
    ]
    assert sorted(counts[0]) == sorted(counts[1])
    assert [each.name for each in graphs[0].graph.output] == [
        each.name for each in graphs[1].graph.output
    ]
    x = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
    one, two = (PlainSession(graph).run({"x": x}) for graph in graphs)
    for name, value in one.items():
        assert np.allclose(value, two[name], atol=1e-5)
