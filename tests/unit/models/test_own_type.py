"""Modules in other types than float32 are converted, and the user's own stays the reference; quantized ones are refused."""

import numpy as np
import pytest

from optpipe.core.card import card_from_file
from optpipe.core.entries import WeightsRequest
from optpipe.core.errors import BadInputError, GateError
from optpipe.core.events import SilentListener
from optpipe.models.export.exported import (
    Model,
    compute_reference,
    export_model,
    reference_from_file,
)
from optpipe.models.sources.python_file import PythonFileSource
from optpipe.workspace.file_names import CARD, REFERENCE
from optpipe.workspace.store import Store

HEAD = """
import torch
from torch import nn
def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""


def model_of(folder, body, dtype="float32"):
    inputs = f'INPUTS = [dict(name="x", dtype="{dtype}", min=[1, 8], opt=[4, 8], max=[16, 8])]'
    (folder / "net.py").write_text(f"{inputs}{HEAD}{body}\n")
    return Model(PythonFileSource(folder / "net.py", "make"), WeightsRequest())


@pytest.mark.slow
@pytest.mark.parametrize("own", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("declared", ["float32", "own"])
def test_the_reference_is_the_module_in_its_own_type(tmp_path, own, declared) -> None:
    import torch

    dtype = own if declared == "own" else declared
    model = model_of(tmp_path, f"def make(): return make_net().to(torch.{own})", dtype)
    store, listener = Store(tmp_path / ".optpipe"), SilentListener()
    entry, _ = export_model(model, store, listener)
    found, _ = compute_reference(model, entry, None, store, listener)

    assert entry.info.weights.converted_from == own
    assert any(f"is in {own} and was converted to float32" in each for each in listener.warnings)
    card = card_from_file(entry.file(CARD))
    assert [each.dtype for each in card.inputs] == ["float32"]

    reference = reference_from_file(found.file(REFERENCE))
    scope: dict = {}
    exec(HEAD, scope)
    module = scope["make_net"]().to(getattr(torch, own)).eval()
    with torch.inference_mode():
        inputs = torch.from_numpy(reference.inputs["x"]).to(getattr(torch, own))
        expected = module(inputs).float().numpy()
    (outputs,) = reference.outputs.values()
    assert np.array_equal(outputs, expected)
    assert all(each.relative < 1e-3 for each in found.info.export_parity)


@pytest.mark.slow
def test_an_overflow_in_the_own_type_is_not_taken_for_rounding(tmp_path) -> None:
    body = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()
    def forward(self, x):
        return (self.net(x) * 60000) * 60000 * 1e-6
def make(): return Net().half()"""
    model, store = model_of(tmp_path, body), Store(tmp_path / ".optpipe")
    entry, _ = export_model(model, store, SilentListener())
    with pytest.raises(GateError, match="float32 does not match the module in float16"):
        compute_reference(model, entry, None, store, SilentListener())


def test_the_identity_is_that_of_the_given_tensors(tmp_path) -> None:
    known = set()
    for own in ("float32", "float16", "bfloat16", "float64"):
        folder = tmp_path / own
        folder.mkdir()
        loaded = model_of(folder, f"def make(): return make_net().to(torch.{own})").load()
        known.add(loaded.weights.sha256)
        assert {str(each.dtype) for each in loaded.module.parameters()} == {"torch.float32"}
        assert {str(each.dtype) for each in loaded.given.parameters()} == {f"torch.{own}"}
    assert len(known) == 4


QUANTIZED = {
    "static": """
def make():
    stubs = torch.ao.quantization.QuantStub(), make_net(), torch.ao.quantization.DeQuantStub()
    net = nn.Sequential(*stubs).eval()
    net.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    torch.ao.quantization.prepare(net, inplace=True)(torch.randn(4, 8))
    return torch.ao.quantization.convert(net)""",
    "dynamic": "def make(): return torch.ao.quantization.quantize_dynamic(make_net())",
    "dynamic float16": """
def make(): return torch.ao.quantization.quantize_dynamic(make_net(), dtype=torch.float16)""",
    "fx": """
def make():
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx
    mapping = get_default_qconfig_mapping("x86")
    net = quantize_fx.prepare_fx(make_net().eval(), mapping, (torch.randn(4, 8),))
    net(torch.randn(4, 8))
    return quantize_fx.convert_fx(net)""",
    "a tensor": """
def make():
    net = make_net()
    scale = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    net.register_buffer("scale", scale)
    return net""",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_modules_are_refused_with_the_way_out(tmp_path, case) -> None:
    with pytest.raises(BadInputError, match=r"is quantized already.*\n.*return the float module"):
        model_of(tmp_path, QUANTIZED[case]).load()
