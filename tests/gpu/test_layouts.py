"""torch's choice of layouts on a real GPU: what it makes wrong is built again without it. The first convolution of DETR was wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.fakes.fp8_models import make_card

from optpipe.backends.base import BuildRequest
from optpipe.backends.inductor import CONFIGS
from optpipe.backends.inductor_layouts import (
    LEAST_AGREEMENT_DB,
    keep_right_layouts,
    measure_agreement,
    takes_layouts,
)
from optpipe.backends.inductor_packages import Compilation, load_package
from optpipe.backends.torch_program import export_program
from optpipe.core.card import InputSpec
from optpipe.core.precision import Precision

SIDE = 320


def make_stem(*more, bias=False):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7, 2, 3, bias=bias), *more)


def make_frozen():
    from torchvision.ops import FrozenBatchNorm2d

    return make_stem(FrozenBatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1))


def make_backbone():
    from transformers import ResNetBackbone, ResNetConfig

    class Backbone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = ResNetBackbone(ResNetConfig(out_features=["stage4"]))

        def forward(self, image):
            return self.model(image).feature_maps[0]

    return Backbone()


CASES: dict[str, Callable[[], torch.nn.Module]] = {
    "convolution": make_stem,
    "convolution with a bias": partial(make_stem, bias=True),
    "normalization": partial(make_stem, torch.nn.BatchNorm2d(64)),
    "frozen": make_frozen,
    "backbone": make_backbone,
}


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("name", CASES)
def test_code_that_is_kept_agrees_with_the_exported_program(name, most, tmp_path, record_property):
    spec = InputSpec("image", "float32", *((size, 3, SIDE, SIDE) for size in (1, 1, most)), batch=0)
    card = make_card(spec)
    wanted = BuildRequest(
        card, Precision.FP16, tmp_path, lambda: CASES[name]().eval(), "cuda", {}, tmp_path
    )
    program = export_program(wanted)
    assert takes_layouts(program)
    compilation = Compilation(program, tmp_path / "model.pt2", CONFIGS["cuda"])
    compilation.run()
    batch = torch.randn(1, 3, SIDE, SIDE, device="cuda")
    with torch.inference_mode():
        expected = program.module()(batch)
        chosen = measure_agreement(expected, load_package(compilation.package, "cuda")(batch))
        remark = keep_right_layouts(compilation, (batch,))
        kept = measure_agreement(expected, load_package(compilation.package, "cuda")(batch))
    record_property("snr_db", f"{chosen:.1f} {kept:.1f} {remark}")
    print(
        f"{name}, up to {most}: {chosen:.1f} dB with torch's choice of layouts, {kept:.1f} dB kept"
    )
    assert kept >= LEAST_AGREEMENT_DB
    assert (remark is not None) == (chosen < LEAST_AGREEMENT_DB)


def test_a_wrong_package_is_replaced(tmp_path):
    """A fault is planted: the package is compiled from a program with other weights."""
    spec = InputSpec("image", "float32", *((1, 3, 64, 64),) * 3, batch=0)
    wanted = BuildRequest(
        make_card(spec), Precision.FP16, tmp_path, lambda: make_stem().eval(), "cuda", {}, tmp_path
    )
    program = export_program(wanted)
    other = replace(wanted, module=lambda: make_stem(torch.nn.Tanh()).eval())
    package = tmp_path / "model.pt2"
    Compilation(export_program(other), package, CONFIGS["cuda"]).run()
    batch = torch.randn(1, 3, 64, 64, device="cuda")
    remark = keep_right_layouts(Compilation(program, package, CONFIGS["cuda"]), (batch,))
    assert "without torch's choice of layouts" in str(remark)
    with torch.inference_mode():
        found = load_package(package, "cuda")(batch)
        assert measure_agreement(program.module()(batch), found) >= LEAST_AGREEMENT_DB
