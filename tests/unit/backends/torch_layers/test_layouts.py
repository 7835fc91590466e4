"""Programs with their images channels last: the same numbers, no copies, and the operators that follow the layout."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.emulation import register_emulation
from tests.fakes.fp8_models import draw
from tests.fakes.int8_network import SPEC, make_int8_request
from torch.nn import functional

from optpipe.backends import torch_program
from optpipe.backends.torch_layers.layouts import make_arranger
from optpipe.backends.torch_layers.lowering import lower_program
from optpipe.backends.torch_program import export_rewritten
from optpipe.core.precision import Precision

register_emulation()


class Pyramid(torch.nn.Module):
    """A U-Net of one step: pooling, a transposed convolution, concatenation, a head at each pixel."""

    def __init__(self):
        super().__init__()
        make = torch.nn.Conv2d
        self.first, self.second = make(3, 16, 3, padding=1), make(16, 32, 3, padding=1)
        self.up, self.joined = torch.nn.ConvTranspose2d(32, 16, 2, 2), make(32, 16, 3, padding=1)
        self.norm, self.head = torch.nn.BatchNorm2d(32), make(16, 5, 1)

    def forward(self, image):
        skip = self.first(image).relu()
        value = self.up(self.second(functional.max_pool2d(skip, 2)).relu())
        return self.head(self.joined(self.norm(torch.cat([skip, value], 1))).relu())


class Tokens(torch.nn.Module):
    """Images become tokens, a layer reads them, and they become images again, which are resized and concatenated."""

    def __init__(self):
        super().__init__()
        self.first, self.tokens = torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.Linear(16, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.deep = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = torch.nn.Conv2d(48, 4, 1)

    def forward(self, image):
        value = self.first(image)
        images, channels, height, width = value.shape
        tokens = self.norm(self.tokens(value.flatten(2).transpose(1, 2)))
        back = self.deep(tokens.transpose(1, 2).view(images, channels, height, width))
        back = back.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()
        size = image.shape[2:]
        larger = [
            functional.interpolate(back, size=size, mode="bilinear", align_corners=False),
            functional.interpolate(value, scale_factor=2.0, mode="nearest"),
            functional.interpolate(tokens.permute(0, 2, 1).reshape(back.shape), size=size, mode="bilinear", align_corners=True),
        ]  # fmt: skip
        return self.head(torch.cat(larger, 1) * 2)


class Gate(torch.nn.Module):
    """A gate by the mean of all pixels, channels in two halves, and a reduction without its axes."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.Conv2d(32, 32, 1)

    def forward(self, image):
        value = self.first(image)
        one, other = (value * self.gate(value.mean((2, 3), keepdim=True)).sigmoid()).chunk(2, 1)
        return (one + other).amax((2, 3)), functional.adaptive_avg_pool2d(other[:, 2:], 1).flatten(
            1
        )


class Block(torch.nn.Module):
    """A block of ConvNeXt: its linear layers read tokens (images, height, width, channels)."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.deep = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = torch.nn.LayerNorm(16)
        self.wide, self.narrow = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, image):
        value = self.first(image)
        tokens = self.norm(self.deep(value).permute(0, 2, 3, 1))
        tokens = self.narrow(functional.gelu(self.wide(tokens)))
        return (value + tokens.permute(0, 3, 1, 2)).mean((2, 3))


NETWORKS = (Pyramid, Tokens, Gate, Block)


@pytest.fixture
def prefer_channels_last(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(torch_program, "prefers_channels_last", lambda *_: True)


def make_request(module, folder):
    wanted = make_int8_request("residual", folder)
    return replace(wanted, precision=Precision.FP16, module=lambda: deepcopy(module))


def measure_snr(expected, found):
    noise = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_a_program_gives_its_module_s_outputs_and_copies_no_image(
    network, tmp_path, prefer_channels_last
):
    torch.manual_seed(0)
    module, batch = network().eval(), draw(SPEC)
    wanted = make_request(module, tmp_path)
    program, _ = lower_program(wanted)
    arranger = make_arranger()(program)
    exported = export_rewritten(program, wanted)
    with torch.inference_mode():
        expected = module(batch)
        for found in (arranger.run(batch), exported.module()(batch), exported.module()(batch[:2])):
            several = expected if isinstance(expected, tuple) else (expected,)
            for one, other in zip(several, found, strict=True):
                assert measure_snr(one[: len(other)], other) > 45
    assert arranger.copies == []


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_image_of_the_exported_program_is_channels_last(
    network, tmp_path, prefer_channels_last
):
    """What a compiler is given: convolutions and our operators read and write one layout."""
    torch.manual_seed(0)
    wanted = make_request(network().eval(), tmp_path)
    exported = export_rewritten(lower_program(wanted)[0], wanted)
    read = 0
    for node in exported.graph.nodes:
        if (
            any(name in str(node.target) for name in ("conv", "optpipe"))
            and node.args[0].op == "call_function"
        ):
            value = node.args[0].meta["val"]
            if value.dim() == 4 and "flat=True" not in str(node.args):  # those are tokens
                read += 1
                assert value.is_contiguous(memory_format=torch.channels_last), node
    assert read


@pytest.mark.slow
def test_an_image_in_another_order_is_copied_once_and_counted(tmp_path, prefer_channels_last):
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 8, 3)

        def forward(self, image):
            return self.second(
                self.first(image).transpose(2, 3).softmax(3).flatten(1).view(-1, 8, 32, 32)
            )

    torch.manual_seed(0)
    module, batch = Turned().eval(), draw(SPEC)
    arranger = make_arranger()(lower_program(make_request(module, tmp_path))[0])
    with torch.inference_mode():
        assert measure_snr(module(batch), arranger.run(batch)[0]) > 45
    assert [each.shape for each in arranger.copies] == [(len(batch), 8, 32, 32)]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    old=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    new=st.tuples(st.integers(1, 15), st.integers(1, 15)),
    mode=st.sampled_from(("bilinear", "corners", "nearest")),
)
def test_resizing_is_torch_s_for_every_size(old, new, mode):
    class Resize(torch.nn.Module):
        def forward(self, value):
            value = value.contiguous(memory_format=torch.channels_last)
            if mode == "nearest":
                return functional.interpolate(value, size=new, mode=mode)
            return functional.interpolate(
                value, size=new, mode="bilinear", align_corners=mode == "corners"
            )

    value = torch.randn(2, 3, *old, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Resize(), (value,)).run_decompositions({}).module()
    torch.testing.assert_close(
        make_arranger()(program).run(value), Resize()(value), rtol=1e-4, atol=1e-5
    )
