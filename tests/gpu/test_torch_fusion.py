"""Fused convolutions through the real cuDNN: the same outputs, and the kernels that fusing was to save are gone."""

from pathlib import Path

import pytest
import torch

from optpipe.backends.torch_eager import load_program


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchvision's ResNet-18 in FP16, channels last, with statistics drawn at random, exported with an open batch."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None).eval()
    for each in model.modules():
        if isinstance(each, torch.nn.BatchNorm2d):
            each.running_mean.uniform_(-0.3, 0.3)
            each.running_var.uniform_(0.5, 1.5)
            torch.nn.init.uniform_(each.bias, -0.3, 0.3)
    model = model.to(device="cuda", dtype=torch.float16, memory_format=torch.channels_last)
    batch = torch.export.Dim("batch", min=1, max=64)
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (pictures(2),), dynamic_shapes=({0: batch},)), path)
    return path


def pictures(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 224, 224, device="cuda").half().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_fused_and_plain_agree(saved: Path, batch: int) -> None:
    given = pictures(batch)
    with torch.inference_mode():
        plain = load_program(saved, {"fuse": False})(given).float()
        fused = load_program(saved, {"fuse": True})(given).float()
    assert 10 * torch.log10(plain.square().mean() / (plain - fused).square().mean()) > 40  # dB


def test_normalization_and_relu_have_no_kernels_of_their_own(saved: Path) -> None:
    def kernels(*, fuse: bool) -> list[str]:
        program, given = load_program(saved, {"fuse": fuse}), pictures(8)
        with torch.inference_mode():
            program(given)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                program(given)
                torch.cuda.synchronize()
        return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    assert any("batch_norm" in name for name in kernels(fuse=False))
    fused = kernels(fuse=True)
    # three shortcuts have a convolution; its bias joins the sum, so nothing is normalized by itself
    assert not any("batch_norm" in name or "clamp" in name for name in fused), fused
