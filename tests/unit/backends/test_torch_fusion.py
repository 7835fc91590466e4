"""Fused convolutions compute what the program computed before. cuDNN is played by the CPU: only `tests/gpu` runs it."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

from optpipe.backends.torch_eager import fuse_convolutions


@pytest.fixture(scope="module", autouse=True)
def cudnn_played_by_the_cpu() -> Iterator[None]:
    """What torch documents the two operators to compute, in the same type."""
    library = torch.library.Library("aten", "IMPL")

    def relu(x, weight, bias, stride, padding, dilation, groups):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()

    def add_relu(x, weight, z, alpha, bias, stride, padding, dilation, groups):
        return (torch.conv2d(x, weight, bias, stride, padding, dilation, groups) + alpha * z).relu()

    library.impl("cudnn_convolution_relu", relu, "CPU")
    library.impl("cudnn_convolution_add_relu", add_relu, "CPU")
    yield
    library._destroy()


class Block(nn.Module):
    """Convolution, maybe normalization, then `after` with the block's input at hand."""

    def __init__(self, after: Callable[["Block", torch.Tensor, torch.Tensor], torch.Tensor], **settings: bool) -> None:
        super().__init__()
        self.after = after
        self.conv = nn.Conv2d(
            8, 8, 3, padding=1, bias=settings.get("bias", False), groups=8 if settings.get("grouped") else 1
        )
        self.bn = (
            nn.BatchNorm2d(8, affine=not settings.get("plain")) if settings.get("normalized", True) else nn.Identity()
        )
        self.side = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self, self.bn(self.conv(x)), x)


def exported(module: nn.Module) -> tuple[torch.fx.GraphModule, nn.Module, torch.Tensor]:
    """The module in BF16 with statistics drawn at random, exported with an open batch; and an input."""
    torch.manual_seed(0)
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.uniform_(-0.5, 0.5)
            each.running_var.uniform_(0.5, 2)
            if each.affine:
                nn.init.uniform_(each.weight, 0.5, 1.5)
                nn.init.uniform_(each.bias, -0.5, 0.5)
    module = module.eval().bfloat16()
    x = torch.randn(3, 8, 6, 6).bfloat16()
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},))
    return program.module(), module, x


def error(program: torch.fx.GraphModule, module: nn.Module, x: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    with torch.inference_mode():
        wanted, found = module(x).float(), program(x).float()
    return float((wanted - found).abs().max() / wanted.abs().max())


FUSED = {
    "relu": (lambda _b, y, _x: y.relu(), 1),
    "relu in place": (lambda _b, y, _x: y.relu_(), 1),
    "identity added": (lambda _b, y, x: (y + x).relu(), 1),
    "identity added in place": (lambda _b, y, x: y.add_(x).relu_(), 1),
    "added to the identity": (lambda _b, y, x: (x + y).relu(), 1),
    "a convolution added": (lambda b, y, x: (y + b.side(x)).relu(), 1),
    "a convolution added in place": (lambda b, y, x: y.add_(b.side(x)).relu_(), 1),
    "two in a row": (lambda b, y, _x: b.bn(b.conv(y.relu())).relu(), 2),
}
PLAIN = {"bias": True, "normalized": False}
LEFT_ALONE = {
    "no relu": lambda _b, y, _x: y,
    "another activation": lambda _b, y, _x: nn.functional.silu(y),
    "used twice": lambda _b, y, _x: y.relu() + y,
    "a sum used twice": lambda _b, y, x: (s := y + x).relu() * s,
    "a scaled sum": lambda _b, y, x: torch.add(y, x, alpha=2).relu(),
    "a broadcast sum": lambda _b, y, x: (y + x.mean((2, 3), keepdim=True)).relu(),
    "a number added": lambda _b, y, _x: (y + 1).relu(),
    "input overwritten before the relu": lambda b, _y, x: (z := x * 1, c := b.conv(z), z.mul_(2), c.relu() + z)[-1],
    "the other side overwritten": lambda _b, y, x: (z := x * 1, s := y + z, z.mul_(2), s.relu() + z)[-1],
}


@pytest.mark.parametrize(
    ("name", "how"), [*product(FUSED, [{}]), *product(["relu", "a convolution added"], [{"bias": True}, PLAIN])]
)
def test_a_relu_after_a_convolution_becomes_one_kernel_with_it(name: str, how: dict[str, bool]) -> None:
    after, count = FUSED[name]
    program, module, x = exported(Block(after, **how))
    assert fuse_convolutions(program) == count
    assert error(program, module, x) < 0.02
    left = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not any(each.startswith(("aten.batch_norm", "aten.relu", "aten.add")) for each in left)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_one_kernel_cannot_compute_stays(name: str) -> None:
    program, module, x = exported(Block(LEFT_ALONE[name]))
    assert fuse_convolutions(program) == 0
    assert error(program, module, x) == 0


def test_grouped_convolutions_and_single_precision_stay() -> None:
    program, module, x = exported(Block(FUSED["relu"][0], grouped=True))
    assert fuse_convolutions(program) == 0
    assert error(program, module, x) == 0
    single = torch.export.export(Block(FUSED["relu"][0]).eval(), (x.float(),)).module()
    assert fuse_convolutions(single) == 0


def test_normalization_without_weights() -> None:
    program, module, x = exported(Block(FUSED["relu"][0], plain=True))
    assert fuse_convolutions(program) == 1
    assert error(program, module, x) < 0.02


@settings(max_examples=settings.default.max_examples // 4)
@given(some.lists(some.sampled_from(sorted(FUSED) + sorted(LEFT_ALONE)), min_size=2, max_size=4))
@pytest.mark.slow
def test_any_chain_of_blocks_computes_the_same(names: list[str]) -> None:
    chosen = [FUSED[name][0] if name in FUSED else LEFT_ALONE[name] for name in names]
    program, module, x = exported(nn.Sequential(*(Block(after) for after in chosen)))
    fuse_convolutions(program)
    assert error(program, module, x) < 0.05
