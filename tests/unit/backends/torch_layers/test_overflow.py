"""Values that FP16 cannot hold: layers are tuned all the same, and a network computes them in FP32 and names them."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.emulation import compute_step, register_emulation
from tests.fakes.fp8_models import draw
from tests.fakes.int8_network import (
    SPEC,
    make_int8_request,
    random_convolution,
    random_depthwise,
    random_sequences,
)

from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_layers.overflow import WIDENED, widen_overflows
from optpipe.backends.torch_products import layers_from_program
from optpipe.backends.torch_program import export_rewritten
from optpipe.core.precision import Precision
from optpipe.kernels import tuner

register_emulation()
STEPS = {
    "convolution": lambda: random_convolution(half=True, floating=True, added=True),
    "product": lambda: random_convolution(32, 48, 1, half=True, floating=True, activation="silu"),
    "linear": lambda: random_convolution(
        32, 48, 1, half=True, floating=True, flat=True, activation="gelu"
    ),
    "depthwise": lambda: random_depthwise(activation="hardswish"),
    "masked": lambda: random_sequences(mask=torch.float16),
    "attention": random_sequences,
}
odd = st.sampled_from([float("nan"), float("inf"), float("-inf"), 65504.0])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(STEPS)), value=odd, everywhere=st.booleans(), shared=st.booleans()
)
def test_a_step_is_tuned_on_finite_values_whatever_reaches_it(
    monkeypatch, name, value, everywhere, shared
):
    step, operands = STEPS[name]()
    tensors = [operands.data, *([operands.added] if shared and operands.added is not None else [])]
    for tensor in tensors:
        tensor.copy_(value) if everywhere else tensor.view(-1)[:3].copy_(
            torch.tensor(value)
        ) if tensor.is_contiguous() else tensor[:1].fill_(value)
    seen = []

    def launch(step, given, _tactic=None):
        seen.append(given)
        return compute_step(step, given)

    monkeypatch.setattr(tuner, "launch_step", launch)
    monkeypatch.setattr(tuner, "time_launch", lambda _: 1.0)
    assert tuner._time_tactics(step, tuner.make_finite(operands))
    assert all(bool(each.data.float().isfinite().all()) for each in seen)
    assert seen[0].data.stride() == operands.data.stride()


def test_a_mask_keeps_its_barred_keys():
    _, operands = random_sequences(mask=torch.float16)
    operands.added[..., -2:] = -torch.inf
    assert tuner.make_finite(operands).added is operands.added


class Loud(torch.nn.Module):
    """Its second convolution has outputs of some hundred thousands, which the third one divides again."""

    def __init__(self):
        super().__init__()
        make = torch.nn.Conv2d
        self.first, self.loud = make(3, 16, 3, padding=1), make(16, 16, 3, padding=1)
        self.deep = make(16, 16, 3, padding=1, groups=16)
        self.calm, self.last = make(16, 16, 1), make(16, 16, 3)
        with torch.no_grad():
            self.loud.weight *= 4e5
            self.deep.weight *= 3
            self.calm.weight *= 1e-6

    def forward(self, image):
        value = self.deep(self.loud(self.first(image).relu()).relu())
        return self.last(self.calm(value).relu()).mean((2, 3))


class Steep(torch.nn.Module):
    """Folding its normalization would give weights beyond FP16's range."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 16, 3, bias=False), torch.nn.BatchNorm2d(16)
        self.second, self.last = torch.nn.Conv2d(16, 16, 3, bias=False), torch.nn.Conv2d(16, 8, 1)
        with torch.no_grad():
            self.second.weight *= 1e-3
            self.norm.running_var.fill_(1e-7)
            self.norm.weight *= 1e3
            self.norm.eps = 1e-12

    def forward(self, image):
        return self.last(self.norm(self.second(self.first(image).relu())))


def make_request(module, folder, precision):
    return replace(
        make_int8_request("residual", folder), precision=precision, module=lambda: deepcopy(module)
    )


@pytest.mark.slow
@pytest.mark.parametrize("network", [Loud, Steep])
def test_a_network_whose_values_leave_the_range_of_fp16_has_its_outputs(network, tmp_path):
    torch.manual_seed(0)
    module, batch = network().eval(), draw(SPEC)
    wanted = make_request(module, tmp_path, Precision.FP16)
    program, remarks = lower_program(wanted)
    exported = export_rewritten(program, wanted)
    with torch.inference_mode():
        expected = module(batch).double()
        assert not torch.isfinite(deepcopy(module).half()(batch.half())).all() or network is Steep
        for found in (program(batch)[0], exported.module()(batch)[0]):
            noise = (found.double() - expected).square().sum()
            assert 10 * torch.log10(expected.square().sum() / noise) > 45
    if network is Loud:
        assert program.meta[WIDENED][0] == "loud"
        assert len(remarks) == 1
        assert "loud" in remarks[0]
        types = {each.type for each in layers_from_program(exported, Precision.FP16) if each.macs}
        assert types == {"fp16", "fp32"}


def test_values_are_computed_whatever_strides_other_kernels_give():
    """On a GPU, attention in FP32 has other strides than in FP16, with which the program was traced."""

    class Flat(torch.nn.Module):
        def forward(self, value):
            return value.relu().view(len(value), -1) * 70000

    value = torch.ones(2, 3, 4, 4, dtype=torch.float16)
    program = torch.export.export(Flat(), (value,)).module()
    widen_overflows(program, {}, (value.contiguous(memory_format=torch.channels_last),))
    assert torch.equal(program(value), torch.full((2, 48), 70000.0))


@pytest.mark.slow
def test_a_network_within_the_range_is_not_changed(tmp_path):
    wanted = replace(make_int8_request("residual", tmp_path), precision=Precision.FP16)
    program, remarks = lower_program(wanted)
    assert (program.meta[WIDENED], remarks) == ((), ())
