"""Random steps of INT8 programs, and small networks with their Q/DQ graphs."""

from pathlib import Path

import numpy as np
import onnx
import torch
from tests.fakes.fp8_models import draw, export_quickly, measure_ranges
from torch.nn import functional

from optpipe.backends.base import BuildRequest
from optpipe.core.card import InputSpec
from optpipe.core.precision import Precision
from optpipe.kernels import steps
from optpipe.kernels.tactics import (
    Operands,
    arrange_convolution,
    arrange_depthwise,
    arrange_stem,
)
from optpipe.quantize.qdq import place_qdq, qdq_from_onnx


def upload(arrays):
    return [torch.from_numpy(np.array(each)) for each in arrays]


def random_convolution(
    channels=32, outputs=32, kernel=3, size=8, images=2, seed=0, given=None, **end
):
    """A step and what it reads; values of about a third of the INT8 range, so that few are clamped, smooth ones of about 1."""
    rng = np.random.default_rng(seed)
    rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
    end = {
        "padding": (rows // 2, columns // 2, rows // 2, columns // 2),
        "activation": "relu",
        **end,
    }
    step = steps.Convolution(
        outputs, (rows, columns), channels, rows * columns * channels * outputs, **end
    )
    scale = (rng.random(outputs, np.float32) + np.float32(0.5)) / np.float32(
        50 * rows * np.sqrt(channels)
    )
    bias = rng.standard_normal(outputs, np.float32) * 10
    if step.activation not in steps.BEFORE_SCALING:
        scale, bias = scale / 20, bias / 20
    weight = rng.integers(-127, 128, (outputs, rows, columns, channels)).astype(np.int8)
    if step.floating:
        weight, scale, bias = (
            (weight / (80 * rows * np.sqrt(channels))).astype(np.float16),
            np.ones_like(scale),
            bias / 20,
        )
    data = (
        random_int8(seed + 1, images, channels * step.groups, size, size)
        if given is None
        else given
    )
    if step.flat and data.dim() == 4:
        data = data.permute(0, 2, 3, 1).contiguous()
    added = random_int8(seed + 2, *steps.make_output(step, data).shape) if step.added else None
    if step.floating:
        data, added = data.half() / 40, None if added is None else added.half() / 40
    added_scale, inverse_scale = 1.0 if step.floating else 0.37, 40.0
    if step.activation in steps.BEFORE_SCALING:
        inverse_scale = 1.0
    return step, Operands(
        data, added, upload(arrange_convolution(weight, scale, bias)), added_scale, inverse_scale
    )


def random_block(middle=64, wide=256, following=64, size=16, images=2, stride=1):
    """A residual block and what it reads."""
    step = steps.Block(middle, wide, following, stride)
    given, out = [], size // stride
    sizes = ((middle, middle, 3, stride), (middle, wide, 1, 1), (wide, following, 1, 1))
    for seed, (channels, outputs, kernel, pace) in enumerate(sizes[: 3 if following else 2]):
        end = {"stride": pace, "added": seed == 1}
        given.append(
            random_convolution(
                channels, outputs, kernel, out if seed else size, images, seed, **end
            )[1]
        )
    constants = [each for one in given for each in one.constants]
    return step, Operands(given[0].data, given[1].added, constants, given[1].added_scale)


def random_depthwise(channels=48, kernel=3, stride=1, size=9, images=2, seed=0, spare=0, **end):
    """Sums of about 1."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((channels, 1, kernel, kernel)) / kernel).astype(np.float16)
    sides = (
        (kernel // 2,) * 4
        if stride == 1
        else (kernel // 2 - 1, kernel // 2 - 1, kernel // 2, kernel // 2)
    )
    step = steps.Depthwise(channels, channels + spare, (kernel, kernel), stride, sides, **end)
    constants = arrange_depthwise(weight, rng.standard_normal(channels).astype(np.float32))
    data = torch.from_numpy(rng.standard_normal((images, channels, size, size)).astype(np.float16))
    return step, Operands(
        data.contiguous(memory_format=torch.channels_last), None, upload(constants), 0.0, 30.0
    )


def random_stem(
    outputs=16, channels=3, kernel=3, padding=1, shape=(33, 32), images=2, seed=0, **end
):
    """Sums of about 1."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outputs, channels, kernel, kernel)) / (kernel * channels**0.5)
    weight = weight.astype(np.float16)
    step = steps.Stem(outputs, channels, (kernel, kernel), (padding,) * 4, **end)
    constants = arrange_stem(step, weight, rng.standard_normal(outputs).astype(np.float32))
    images = torch.from_numpy(rng.standard_normal((images, channels, *shape)).astype(np.float32))
    return step, Operands(images, None, upload(constants), 0.0, 9.0)


def random_attention(heads=3, features=32, tokens=49, windows=4, images=2, seed=0):
    """In windows with a bias, with masked scores among others, as at the edge of an image."""
    rng = np.random.default_rng(seed)
    step = steps.Attention(heads * features, heads, tokens, features**-0.5, biased=True)
    padded = step.padded
    bias = np.zeros((windows, heads, padded, padded), np.float16)
    bias[..., :tokens, :tokens] = rng.standard_normal((windows, heads, tokens, tokens))
    bias[-1, ..., : tokens // 2, tokens // 2 : tokens] -= 100
    bias[..., tokens:] = -np.inf
    data = torch.from_numpy(
        rng.standard_normal((images * windows, tokens, 3 * step.outputs)).astype(np.float16)
    )
    return step, Operands(data, None, [torch.from_numpy(bias)])


def random_sequences(
    heads=3,
    features=32,
    tokens=70,
    sequences=3,
    mask=None,
    kind=torch.float16,
    least=0,
    seed=0,
    **end,
):
    """Torch's attention; the mask bars the last keys of each sequence but `least`, or is added to all scores."""
    generator = torch.Generator().manual_seed(seed)
    step = steps.Attention(
        heads * features, heads, tokens, features**-0.5, added=mask is not None, **end
    )
    data, added = (
        torch.randn(sequences, tokens, 3 * step.outputs, generator=generator).to(kind),
        None,
    )
    if mask is torch.bool:
        kept = (torch.arange(sequences) * tokens // sequences).clamp(min=least)
        added = (torch.arange(tokens) < kept[:, None])[:, None, None]
    elif mask is not None:
        added = torch.randn(1, heads, tokens, tokens, generator=generator).to(mask)
    return step, Operands(data, added, [], 0.0, 1.0 if step.half else 64.0 if step.e4m3 else 40.0)


def random_int8(seed, *shape):
    values = torch.from_numpy(
        np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)
    )
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def to_gpu(given):
    added = None if given.added is None else given.added.cuda()
    constants = [each.cuda() for each in given.constants]
    return Operands(given.data.cuda(), added, constants, given.added_scale, given.inverse_scale)


class Residual(torch.nn.Module):
    """A stem with max pooling, a block whose shortcut is a convolution, one whose shortcut is what it reads, mean, linear."""

    def __init__(self):
        super().__init__()
        self.stem = make_normalized(3, 32, 7, stride=2, padding=3)
        self.first, self.second = (
            make_normalized(32, 64, 3, padding=1),
            make_normalized(64, 64, 3, padding=1),
        )
        self.down, self.third = make_normalized(32, 64, 1), make_normalized(64, 64, 3, padding=1)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, image):
        value = functional.max_pool2d(self.stem(image).relu(), 3, 2, 1)
        value = (self.second(self.first(value).relu()) + self.down(value)).relu()
        value = (self.third(value) + value).relu()
        return self.head(value.mean((2, 3)))


class Bottleneck(torch.nn.Module):
    """A residual block of three convolutions whose shortcut is one, and one whose shortcut is what it reads."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = (
            make_normalized(3, 64, 3, stride=2, padding=1),
            make_normalized(64, 128, 1),
        )
        self.first, self.fourth = make_normalized(64, 64, 1), make_normalized(128, 64, 1)
        self.second, self.fifth = (make_normalized(64, 64, 3, padding=1) for _ in range(2))
        self.third, self.last = make_normalized(64, 128, 1), make_normalized(64, 128, 1)
        self.head = torch.nn.Linear(128, 10)

    def forward(self, image):
        value = self.stem(image).relu()
        value = (self.third(self.second(self.first(value).relu()).relu()) + self.down(value)).relu()
        value = (self.last(self.fifth(self.fourth(value).relu()).relu()) + value).relu()
        return self.head(value.mean((2, 3)))


class Narrow(torch.nn.Module):
    """Widths that fill no 16 channels: a shortcut, outputs that stay in FP16, concatenation ahead of batch normalization."""

    def __init__(self):
        super().__init__()
        self.first, self.one = (
            make_normalized(3, 24, 3, padding=1),
            make_normalized(24, 40, 3, padding=1),
        )
        self.two, self.down = make_normalized(40, 20, 3, padding=1), make_normalized(24, 20, 1)
        self.three, self.norm = torch.nn.Conv2d(20, 26, 3, 2, 1), torch.nn.BatchNorm2d(46)
        self.four, self.head = torch.nn.Conv2d(46, 72, 1), torch.nn.Linear(72, 10)

    def forward(self, image):
        value = self.first(image).relu_()
        value = self.two(self.one(value).relu()).add_(self.down(value)).relu_()
        joined = torch.cat(
            [functional.hardswish(self.three(value)), functional.avg_pool2d(value, 2)], 1
        )
        return self.head(self.four(self.norm(joined).relu()).mean((2, 3)))


class Varied(torch.nn.Module):
    """Kernels of one row and of one column, a dilated one, groups, three that become one, and strides that fit no kernel."""

    def __init__(self):
        super().__init__()
        make = torch.nn.Conv2d
        self.layers = torch.nn.Sequential(
            make(3, 32, 3, padding=1),
            make(32, 48, (1, 7), padding=(0, 3)),
            make(48, 32, (7, 1), padding=(3, 0)),
            torch.nn.ReLU(),
            make(32, 64, 3, padding=2, dilation=2),
            make(64, 128, 3, padding=1, groups=4),
            make(128, 96, 1, groups=4),
            make(96, 32, 3, (2, 1)),
            make(32, 48, 1, padding=1),
            make(48, 24, 1, groups=3),
        )
        self.head = torch.nn.Linear(24, 10)

    def forward(self, image):
        return self.head(self.layers(image).mean((2, 3)))


class Gated(torch.nn.Module):
    """A stem that ends in HardSwish and stays in FP16, depthwise layers, and a gate from its mean."""

    def __init__(self):
        super().__init__()
        self.first, self.deep = (
            make_normalized(3, 32, 3, stride=2, padding=1),
            make_normalized(32, 32, 3, 1, 1, 32),
        )
        self.wide, self.deeper = make_normalized(32, 40, 1), make_normalized(40, 40, 5, 2, 2, 40)
        self.reduce, self.expand = torch.nn.Conv2d(40, 16, 1), torch.nn.Conv2d(16, 40, 1)
        self.narrow, self.last, self.head = (
            make_normalized(40, 64, 1),
            make_normalized(32, 64, 1, 2),
            torch.nn.Linear(64, 10),
        )

    def forward(self, image):
        value = functional.hardswish(self.first(image))
        other = self.last(functional.relu6(self.deep(value)))
        value = functional.silu(self.deeper(functional.relu6(self.wide(value))))
        gate = self.expand(self.reduce(value.mean((2, 3), keepdim=True)).relu())
        return self.head((self.narrow(value * functional.hardsigmoid(gate)) + other).mean((2, 3)))


class Tokens(torch.nn.Module):
    """Patches as tokens, a hidden layer with GELU, one whose bias is computed, and a convolution over the sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(96),
            torch.nn.Linear(96, 64),
            torch.nn.Linear(64, 24, bias=False),
        )
        self.part = torch.nn.Parameter(torch.randn(12) / 4)
        self.mix, self.head = torch.nn.Conv1d(32, 48, 3, 2, 1), torch.nn.Linear(48, 10, bias=False)

    def forward(self, image):
        tokens = self.norm(image.reshape(-1, 32, 96))
        bias = torch.cat([self.part, -self.part])
        hidden = functional.linear(functional.gelu(self.up(tokens)), self.down.weight, bias)
        return self.head(self.mix(hidden.relu()).mean(2))


class Attending(torch.nn.Module):
    """Attention in two windows with a bias and a mask, torch's own, and one with separate layers for queries, keys, and values."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.head = (
            torch.nn.Linear(96, 48),
            torch.nn.Linear(48, 144),
            torch.nn.Linear(48, 10),
        )
        self.bias = torch.nn.Parameter(torch.randn(3, 16, 16))
        self.register_buffer(
            "mask",
            torch.stack([torch.zeros(16, 16), torch.randn(16, 16).sign().clamp(max=0) * 100]),
        )
        self.project, self.out = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)
        self.attention = torch.nn.MultiheadAttention(48, 3, batch_first=True)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(3))

    def forward(self, image):
        windows = self.embed(image.reshape(-1, 32, 96)).reshape(-1, 16, 48)
        queries, keys, values = self.qkv(windows).reshape(-1, 16, 3, 3, 16).permute(2, 0, 3, 1, 4)
        scores = queries * 0.25 @ keys.transpose(-2, -1) + self.bias.unsqueeze(0)
        scores = (scores.view(-1, 2, 3, 16, 16) + self.mask[None, :, None]).view(-1, 3, 16, 16)
        attended = scores.softmax(-1).clone() @ values  # dropout is a clone in torch 2.11
        tokens = (windows + self.project(attended.transpose(1, 2).reshape(-1, 16, 48))).reshape(
            -1, 32, 48
        )
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        parts = (part(tokens).unflatten(2, (3, 16)).transpose(1, 2) for part in self.parts)
        attended = functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return self.head((tokens + self.out(attended)).mean(1))


NETWORKS = {
    each.__name__.lower(): each
    for each in (Residual, Bottleneck, Narrow, Varied, Gated, Tokens, Attending)
}
SPEC = InputSpec("image", "float32", (1, 3, 32, 32), (4, 3, 32, 32), (64, 3, 32, 32), batch=0)


def make_normalized(channels, outputs, kernel, stride=1, padding=0, groups=1):
    norm = torch.nn.BatchNorm2d(outputs)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm.running_mean.normal_(0, 0.1)
    norm.running_var.uniform_(0.3, 1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, outputs, kernel, stride, padding, 1, groups, bias=False), norm
    )


def make_network(name):
    torch.manual_seed(0)
    return NETWORKS[name]().eval()


def make_int8_request(name: str, folder: Path, device="cpu", keep=()) -> BuildRequest:
    """A request for a network; its Q/DQ graph, with ranges of one batch, is `folder/int8.onnx`, beside it `model.onnx` in FP32.

    `keep` are layers that stay in floating point, by their place among those that need not.
    """
    card = export_quickly(make_network(name), SPEC, folder / "model.onnx")
    model = onnx.load(folder / "model.onnx")
    names = place_qdq(model, "tensorrt").layers
    placed = place_qdq(model, "tensorrt", [names[each] for each in keep].__contains__)
    ranges = measure_ranges(model, placed.tensors, draw(SPEC))
    onnx.save(qdq_from_onnx(model, placed, ranges), folder / "int8.onnx")
    return BuildRequest(
        card, Precision.INT8, folder / "int8.onnx", lambda: make_network(name), device, {}, folder
    )
