"""The layers of an INT8 program that one of optpipe's kernels computes: values that an operator carries as text.

Images are (images, channels, height, width), stored channels last; linear layers take (..., features). An INT8 tensor with
`scale` stands for `integer * scale`.
"""

from dataclasses import dataclass, fields
from functools import cache
from math import ceil, prod
from typing import Any, get_origin

ACTIVATIONS = ("", "relu", "silu", "hardswish", "relu6", "gelu")
"""What a layer may end in."""
BEFORE_SCALING = ACTIVATIONS[:2]
"""Those that a layer with INT8 outputs takes in steps of the output; the others are taken of the value itself, which is then scaled."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """An INT8 convolution, or with `flat` a linear layer over the last axis, with all that is fused with it.

    With `sum` the INT32 sum of products: value = sum * scale + bias + added * added_scale, then the activation; in FP16 with `half`,
    else rounded half to even and clamped to [-128, 127]. In front of the rounding an activation outside of BEFORE_SCALING is
    multiplied by the inverse of the output's scale, and for the others scale and bias are in steps of the output.
    """

    outputs: int
    kernel: tuple[int, int]
    """Its rows and columns."""
    depth: int
    """Input channels of a group."""
    macs: int
    """Multiply-adds of one output pixel in all channels, without those of zeros that only fill up."""
    stride: int = 1
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Zeros above, left, below and right of an image."""
    dilation: int = 1
    groups: int = 1
    activation: str = ""
    """One of ACTIVATIONS."""
    half: bool = False
    added: bool = False
    flat: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is one matrix product over all pixels."""
        return self.kernel == (1, 1) and self.stride == self.groups == 1 and not any(self.padding)

    @property
    def is_plain(self) -> bool:
        """Whether its kernel is square and dense, over all channels, with as many zeros on every side."""
        return self.kernel[0] == self.kernel[1] and self.dilation == self.groups == 1 and len(set(self.padding)) == 1


@dataclass(frozen=True, slots=True)
class Stem:
    """The first convolution, in FP16 with FP32 sums on few channels and stride 2, with bias and activation: FP16 out with `half`,
    else INT8.
    """

    outputs: int
    channels: int
    kernel: tuple[int, int]
    """Twice the same."""
    padding: tuple[int, int, int, int]
    """Four times the same."""
    activation: str = ""
    half: bool = True
    stride: int = 2
    dilation: int = 1

    @property
    def macs(self) -> int:
        return self.outputs * self.channels * prod(self.kernel)

    def count_cells(self) -> tuple[int, int]:
        """Cells of 2x2 pixels that the kernel spans, a power of two, and the zero rows ahead of it: cells start at even pixels."""
        lead = self.padding[0] % 2
        spanned = ceil((self.kernel[0] + lead) / 2)
        return 1 << (spanned - 1).bit_length(), lead


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A depthwise convolution in FP16 with FP32 sums, bias and activation: FP16 out with `half`, else INT8."""

    channels: int
    outputs: int
    """With channels of zeros behind the others."""
    kernel: tuple[int, int]
    """Its rows and columns."""
    stride: int
    padding: tuple[int, int, int, int]
    """Zeros above, left, below and right of an image."""
    activation: str = ""
    half: bool = True
    dilation: int = 1

    @property
    def macs(self) -> int:
        return self.channels * prod(self.kernel)


@dataclass(frozen=True, slots=True)
class MaxPool:
    """Max pooling of INT8 that is never negative."""

    outputs: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int, int, int]
    half: bool = False
    dilation: int = 1
    macs: int = 0


Step = Convolution | Stem | Depthwise | MaxPool
_KINDS: dict[str, type[Step]] = {each.__name__: each for each in (Convolution, Stem, Depthwise, MaxPool)}


def text_from_step(step: Step) -> str:
    """`MaxPool outputs=64 kernel=3,3 …`"""
    words = [type(step).__name__]
    for each in fields(step):
        value = getattr(step, each.name)
        words.append(f"{each.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join(words)


@cache
def step_from_text(text: str) -> Step:
    """Reads what `text_from_step` wrote."""
    name, *words = text.split(" ")
    kind = _KINDS[name]
    types = {each.name: each.type for each in fields(kind)}
    pairs = (word.split("=", 1) for word in words)
    return kind(**{key: _parse(value, types[key]) for key, value in pairs})


def _parse(text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return tuple(map(int, text.split(",")))
    return text == "True" if kind is bool else kind(text)


def make_output(step: Step, given: Any) -> Any:
    """The tensor that a step fills from `given`, uninitialized; images channels last in memory."""
    import torch

    dtype = torch.float16 if step.half else torch.int8
    if isinstance(step, Convolution) and step.flat:
        return torch.empty((*given.shape[:-1], step.outputs), dtype=dtype, device=given.device)
    top, left, below, right = step.padding
    spans = (step.dilation * (each - 1) + 1 for each in step.kernel)
    wide = (given.shape[2] + top + below, given.shape[3] + left + right)
    size = [(each - span) // step.stride + 1 for each, span in zip(wide, spans, strict=True)]
    shape = (given.shape[0], step.outputs, *size)
    return torch.empty(shape, dtype=dtype, device=given.device, memory_format=torch.channels_last)
