"""The arithmetic of the layers on the CPU: the reference for the GPU's kernels.

INT8 layers are exact up to the fused multiply-add at a layer's end, which is computed here in FP64 and rounded to FP32: a value
may differ from the kernel's by one step if it lies within FP32's resolution of the middle between two steps. Layers in FP16 sum
in another order and may differ by one step of the quantization after them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from optpipe.kernels import steps
from optpipe.kernels.launches import split_block
from optpipe.kernels.operators import register_operator
from optpipe.kernels.tactics import Operands

LOWEST, HIGHEST = -128, 127
_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "relu": lambda value: value.relu(),
    "silu": lambda value: value * value.sigmoid(),
    "hardswish": lambda value: value * (value + 3).clamp(0, 6) / 6,
    "relu6": lambda value: value.clamp(0, 6),
    "gelu": steps.approximate_gelu,
}


@cache
def register_emulation() -> Any:
    """Lets exported programs compute their layers on the CPU; torch forgets an operator when its library is garbage-collected."""
    register_operator()
    library = torch.library.Library("optpipe", "IMPL")
    library.impl("layer", compute_layer, "CPU")
    return library


def compute_layer(
    given: Any,
    added: Any,
    constants: Any,
    added_scale: float,
    inverse_scale: float,
    step: str,
    _: str,
) -> Any:
    return compute_step(
        steps.step_from_text(step), Operands(given, added, constants, added_scale, inverse_scale)
    )


def compute_step(step: steps.Step, given: Operands) -> torch.Tensor:
    """A step's output for tensors on the CPU: INT8 or FP16, (images, channels, height, width) or (..., features)."""
    output = steps.make_output(step, given.data)
    if isinstance(step, steps.Block):
        return _compute_block(step, given, output)
    match step:
        case steps.Convolution():
            found = _convolve(step, given)
        case steps.Stem():
            found = _end(
                step, _convolve_cells(step, given.data, *given.constants), given.inverse_scale
            )
        case steps.Depthwise():
            _, bias, weight = given.constants
            wide = torch.nn.functional.pad(given.data.float(), _order_padding(step.padding))
            value = torch.nn.functional.conv2d(
                wide, weight.float(), bias, step.stride, groups=step.channels
            )
            found = _end(step, value, given.inverse_scale)
            found = torch.nn.functional.pad(found, (0, 0, 0, 0, 0, step.outputs - step.channels))
        case steps.Attention():
            found = _attend(step, given)
        case steps.MaxPool():
            values = given.data.float()
            found = torch.nn.functional.max_pool2d(
                values, step.kernel, step.stride, step.padding[0]
            )
    return output.copy_(found)


def _convolve(step: steps.Convolution, given: Operands) -> Any:
    kernel, scale, bias, *_ = given.constants
    rows, columns = step.kernel
    weight = kernel.view(step.outputs, rows, columns, -1)[..., : step.depth].permute(0, 3, 1, 2)
    ahead = given.data.shape[:-1]
    data = given.data.reshape(-1, given.data.shape[-1], 1, 1) if step.flat else given.data
    # sums of INT8 products are whole numbers below 2**53: exact in FP64
    wide = torch.nn.functional.pad(data.double(), _order_padding(step.padding))
    total = torch.nn.functional.conv2d(
        wide, weight.double(), stride=step.stride, dilation=step.dilation, groups=step.groups
    )
    scale, bias = (each[: step.outputs].view(1, -1, 1, 1) for each in (scale, bias))
    value = _scale_and_add(total, scale, bias)
    if given.added is not None:
        added = given.added.reshape(value.shape) if step.flat else given.added
        value = _scale_and_add(
            added.double(), torch.tensor(given.added_scale, dtype=torch.float32), value
        )
    value = _end(
        step, value, given.inverse_scale if step.activation not in steps.BEFORE_SCALING else 1.0
    )
    return value.reshape(*ahead, -1) if step.flat else value


def split_convolutions(step: steps.Block) -> tuple[steps.Convolution, ...]:
    """The convolutions that a block joins."""
    middle, wide, third = step.middle, step.wide, step.following
    spatial = steps.Convolution(
        middle, (3, 3), middle, 9 * middle**2, step.stride, (1, 1, 1, 1), activation="relu"
    )
    sum_of = steps.Convolution(wide, (1, 1), middle, middle * wide, activation="relu", added=True)
    after = (
        (steps.Convolution(third, (1, 1), wide, wide * third, activation="relu"),) if third else ()
    )
    return spatial, sum_of, *after


def _compute_block(step: steps.Block, given: Operands, output: Any) -> Any:
    data, parts = given.data, []
    for at, each in enumerate(split_convolutions(step)):
        own = Operands(
            data,
            given.added if each.added else None,
            given.constants[3 * at : 3 * at + 3],
            given.added_scale,
        )
        data = compute_step(each, own)
        parts.append(data)
    for part, found in zip(split_block(step, output, given.data), parts[1:], strict=True):
        part.copy_(found)
    return output


def _attend(step: steps.Attention, given: Operands) -> Any:
    data = given.data.float()
    parts = data.unflatten(-1, (3, step.heads, -1)).permute(2, 0, 3, 1, 4)
    scores = parts[0] @ parts[1].mT * step.scale
    if step.biased:
        bias = given.constants[0].float()[..., : step.tokens, : step.tokens]
        scores = scores + bias.repeat(len(data) // len(bias), 1, 1, 1)
    if given.added is not None:
        bars = given.added.dtype == torch.bool
        scores = (
            scores.masked_fill(~given.added, -torch.inf) if bars else scores + given.added.float()
        )
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=1e-30)
    value = (weights.half().float() @ parts[2] / total).transpose(1, 2).flatten(2)
    if step.half:
        return value
    return (
        (value * given.inverse_scale).clamp(-448, 448)
        if step.e4m3
        else quantize(value, given.inverse_scale)
    )


def _end(
    step: steps.Convolution | steps.Stem | steps.Depthwise, value: Any, inverse_scale: float
) -> Any:
    bent = _ACTIVATIONS[step.activation](value)
    return bent.half() if step.half else quantize(bent, inverse_scale)


def quantize(value: Any, inverse_scale: float) -> Any:
    """Scales, rounds half to even, and clamps."""
    return (value.float() * inverse_scale).round().clamp(LOWEST, HIGHEST).to(torch.int8)


def _order_padding(padding: Sequence[int]) -> tuple[int, ...]:
    top, left, below, right = padding
    return left, right, top, below


def _scale_and_add(total: Any, scale: Any, bias: Any) -> Any:
    """A fused multiply-add in FP32: the INT32 sum is converted to FP32 first, and the product is not rounded."""
    return (total.float().double() * scale.double() + bias.double()).float()


def _convolve_cells(step: steps.Stem, given: Any, arranged: Any, bias: Any) -> Any:
    """A convolution with stride 1 over cells of pixels by 4 channels, as in the kernel."""
    (spanned, lead), pace = step.count_cells(), step.stride
    size = [(each + 2 * step.padding[0] - step.kernel[0]) // pace + 1 for each in given.shape[2:]]
    ahead, whole = step.padding[0] + lead, [pace * (each + spanned - 1) for each in size]
    behind = [to - ahead - each for to, each in zip(whole, given.shape[2:], strict=True)]
    sides = (ahead, behind[1], ahead, behind[0], 0, 4 - step.channels)
    pixels = torch.nn.functional.pad(given.half().float(), sides)
    cells = torch.nn.functional.pixel_unshuffle(pixels, pace)  # channel, row, column of a cell
    weight = arranged.float().view(step.outputs, spanned, spanned, pace**2, 4)
    weight = weight.permute(0, 4, 3, 1, 2).reshape(step.outputs, step.cell, spanned, spanned)
    return torch.nn.functional.conv2d(cells, weight, bias)
