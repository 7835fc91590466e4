"""The layers of an INT8 program that optpipe's kernels compute; the operator stores them as text.

Images are (images, channels, height, width), stored channels last; linear layers take (..., features). An INT8 tensor with
`scale` stands for `integer * scale`. `padding` is zeros above, left, below, and right of an image, `kernel` rows and columns.
"""

from dataclasses import dataclass, fields
from functools import cache
from math import ceil, prod
from typing import Any

from msgspec import convert

ACTIVATIONS = ("", "relu", "silu", "hardswish", "relu6", "gelu")
BEFORE_SCALING = ACTIVATIONS[:2]
"""Activations that a layer with INT8 outputs computes in steps of the output; the others take the value, which is scaled after them."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """An INT8 convolution, or with `flat` a linear layer over the last axis, and the operations fused with it.

    For the INT32 sum of products `sum`, value = sum * scale + bias + added * added_scale, followed by the activation. The output is
    FP16 with `half`; otherwise it is rounded half to even and clamped to [-128, 127]. The result of an activation that is not in
    BEFORE_SCALING is multiplied by the inverse of the output's scale first; for the others scale and bias are in steps of the output.
    """

    outputs: int
    kernel: tuple[int, int]
    depth: int
    """Input channels of a group."""
    macs: int
    """Multiply-adds of one output pixel in all channels, without padding."""
    stride: int = 1
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: int = 1
    groups: int = 1
    activation: str = ""
    half: bool = False
    added: bool = False
    flat: bool = False
    floating: bool = False
    """Inputs, weights, and `added` are FP16, and sums FP32; scale and added_scale are 1: cuDNN's kernels apply neither."""

    @property
    def is_product(self) -> bool:
        return self.kernel == (1, 1) and self.stride == self.groups == 1 and not any(self.padding)

    @property
    def is_plain(self) -> bool:
        """Whether its kernel is square, without dilation or groups, and its padding the same on all sides."""
        return (
            self.kernel[0] == self.kernel[1]
            and self.dilation == self.groups == 1
            and len(set(self.padding)) == 1
        )


@dataclass(frozen=True, slots=True)
class Stem:
    """The first convolution of few channels with a square kernel and stride 2 or 4: FP16 with FP32 sums, bias, and activation; the
    output is FP16 with `half`, otherwise INT8. It has stride 1 over cells of `stride` by `stride` pixels by 4 channels.
    """

    outputs: int
    channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int]
    activation: str = ""
    half: bool = True
    stride: int = 2
    dilation: int = 1
    floating: bool = True

    @property
    def macs(self) -> int:
        return self.outputs * self.channels * prod(self.kernel)

    @property
    def cell(self) -> int:
        """Numbers in a cell."""
        return 4 * self.stride**2

    def count_cells(self) -> tuple[int, int]:
        """Cells that the kernel spans along each axis, and the zero rows before it.

        Cells of 2x2 pixels start at even ones, and a power of two of them is multiplied at once.
        """
        lead = self.padding[0] % 2 if self.stride == 2 else 0
        spanned = ceil((self.kernel[0] + lead) / self.stride)
        return 1 << (spanned - 1).bit_length() if self.stride == 2 else spanned, lead


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A depthwise convolution in FP16 with FP32 sums, bias, and activation; the output is FP16 with `half`, otherwise INT8."""

    channels: int
    outputs: int
    """Channels with zero padding."""
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int, int, int]
    activation: str = ""
    half: bool = True
    dilation: int = 1
    floating: bool = True

    @property
    def macs(self) -> int:
        return self.channels * prod(self.kernel)


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(queries keysᵀ scale + bias) values of each head, with FP32 sums; `added` is a mask for torch's attention.

    The input is (sequences, tokens, queries, keys, and values of all heads), FP16 or E4M3, the output (sequences, tokens, outputs), FP16
    with `half`, E4M3 with `e4m3`, otherwise INT8. The product with the values is in FP16.
    """

    outputs: int
    heads: int
    tokens: int
    scale: float
    biased: bool = False
    added: bool = False
    half: bool = True
    e4m3: bool = False
    floating: bool = True

    @property
    def padded(self) -> int:
        """Tokens, rounded up to a power of two."""
        return max(16, 1 << (self.tokens - 1).bit_length())

    @property
    def macs(self) -> int:
        """Multiply-adds of one token."""
        return 2 * self.tokens * self.outputs


@dataclass(frozen=True, slots=True)
class MaxPool:
    """Max pooling of INT8 or FP16 values that are not negative."""

    outputs: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int, int, int]
    half: bool = False
    dilation: int = 1
    macs: int = 0

    @property
    def floating(self) -> bool:
        return self.half


@dataclass(frozen=True, slots=True)
class Block:
    """INT8 convolutions of a residual block: 3x3, then 1x1 with the residual addition, then optionally the next block's first, 1x1.

    All end in ReLU. The output is flat: all pixels of the second convolution, then those of the third, each channels last.
    """

    middle: int
    """Inputs and outputs of the 3x3 convolution."""
    wide: int
    following: int = 0
    """Outputs of the third convolution; 0 without one."""
    stride: int = 1
    half: bool = False
    floating: bool = False

    @property
    def outputs(self) -> int:
        return self.wide + self.following

    @property
    def macs(self) -> int:
        return self.middle * (9 * self.middle + self.wide) + self.wide * self.following


Step = Convolution | Stem | Depthwise | Attention | MaxPool | Block
_KINDS: dict[str, type[Step]] = {
    kind.__name__: kind for kind in (Convolution, Stem, Depthwise, Attention, MaxPool, Block)
}


def text_from_step(step: Step) -> str:
    """`MaxPool outputs=64 kernel=3,3 …`"""
    words = [type(step).__name__]
    for field in fields(step):
        value = getattr(step, field.name)
        words.append(
            f"{field.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        )
    return " ".join(words)


@cache
def step_from_text(text: str) -> Step:
    name, *words = text.split(" ")
    pairs = (word.split("=", 1) for word in words)
    values = {key: value.split(",") if "," in value else value for key, value in pairs}
    return convert(values, _KINDS[name], strict=False)  # which reads numbers and booleans


def approximate_gelu(value: Any) -> Any:
    """GELU of an FP32 tensor to 2.6e-5, by the logistic function of a polynomial: half of the instructions of the error function."""
    square = (value * value).clamp(max=36)
    return (
        value * (value * (1.59501573 + square * (0.0740113232 - 0.000703038082 * square))).sigmoid()
    )


def make_output(step: Step, given: Any) -> Any:
    """The uninitialized output of a step on `given`; images are channels last in memory."""
    import torch

    if isinstance(step, Block):
        pixels = given.numel() // step.middle // step.stride**2
        return torch.empty(pixels * step.outputs, dtype=torch.int8, device=given.device)
    dtype = torch.float16 if step.half else torch.int8
    if isinstance(step, Attention) or (isinstance(step, Convolution) and step.flat):
        dtype = torch.float8_e4m3fn if isinstance(step, Attention) and step.e4m3 else dtype
        return torch.empty((*given.shape[:-1], step.outputs), dtype=dtype, device=given.device)
    top, left, below, right = step.padding
    spans = (step.dilation * (side - 1) + 1 for side in step.kernel)
    wide = (given.shape[2] + top + below, given.shape[3] + left + right)
    size = [(side - span) // step.stride + 1 for side, span in zip(wide, spans, strict=True)]
    shape = (given.shape[0], step.outputs, *size)
    return torch.empty(shape, dtype=dtype, device=given.device, memory_format=torch.channels_last)
