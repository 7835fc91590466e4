"""The integer arithmetic of a lowered network on the CPU: what the GPU's kernels have to give.

INT8 layers are exact up to the fused multiply-add of a layer's end, which is computed here in FP64 and rounded to FP32: a value
may differ from the kernel's by one step, and only where it lies within FP32's resolution of the middle between two steps. Steps
in FP16 sum in another order and may differ by one step of the quantization behind them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from optpipe.backends.torch_int8 import steps
from optpipe.backends.torch_int8.operators import compute_operator

if TYPE_CHECKING:
    import torch

LOWEST, HIGHEST = -128, 127
_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "relu": lambda value: value.relu(),
    "silu": lambda value: value * value.sigmoid(),
    "hardswish": lambda value: value * (value + 3).clamp(0, 6) / 6,
}
_GATES: Mapping[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "sigmoid": lambda value: value.sigmoid(),
    "hardsigmoid": lambda value: (value + 3).clamp(0, 6) / 6,
}


def emulate(network: steps.Network, inputs: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
    """The network's outputs, FP32 torch tensors on the CPU, from its inputs by name."""
    values = dict(inputs)
    for step in network.steps:
        values[step.output] = emulate_step(step, values)
    return {name: values[name].float() for name in network.outputs}


def emulate_step(step: steps.Step, values: Mapping[str, Any]) -> Any:
    """What one step gives: INT8, FP16 or FP32, (images, channels, height, width) or (..., features); of a shape whole numbers."""
    import torch

    match step:
        case steps.Convolution():
            return _convolve(step, values)
        case steps.Linear():
            total = values[step.given].double() @ torch.from_numpy(step.weight).double().t()
            return _scale_and_add(total, torch.from_numpy(step.scale), torch.from_numpy(step.bias))
        case steps.Stem():
            return _convolve_stem(step, values[step.given])
        case steps.Depthwise():
            return _convolve_depthwise(step, values[step.given])
        case steps.MaxPool():
            pooled = torch.nn.functional.max_pool2d(values[step.given].float(), step.kernel, step.stride, step.padding)
            return pooled.to(torch.int8)
        case steps.MeanPool():
            given = values[step.given].float()
            total = given.sum(dim=(2, 3), keepdim=step.keepdims)
            value = _quantize_values(total * (step.inverse_scale / given[0, 0].numel()), relu=False)
            return _pad_channels(value, step.spare)
        case steps.Quantize():
            value = values[step.given].float()
            value = value if step.gate is None else value * _GATES[step.gate_activation](values[step.gate].float())
            return _pad_channels(_quantize_values(value * step.inverse_scale, relu=False), step.spare)
        case steps.Dequantize():
            return (values[step.given].float() * step.scale).half()
        case steps.Floating():
            return _compute_floating(step, values)


def _convolve(step: steps.Convolution, values: Mapping[str, Any]) -> Any:
    import torch

    given = values[step.given]
    ahead = given.shape[:-1]
    given = given.reshape(-1, given.shape[-1], 1, 1) if step.flat else given
    weight = torch.from_numpy(step.weight).permute(0, 3, 1, 2)
    # sums of INT8 products are whole numbers below 2**53: exact in FP64
    top, left, below, right = step.padding
    wide = torch.nn.functional.pad(given.double(), (left, right, top, below))
    total = torch.nn.functional.conv2d(
        wide, weight.double(), stride=step.stride, dilation=step.dilation, groups=step.groups
    )
    per_channel = (1, -1, 1, 1)
    value = _scale_and_add(
        total, torch.from_numpy(step.scale).view(per_channel), torch.from_numpy(step.bias).view(per_channel)
    )
    if step.added is not None:
        value = _scale_and_add(values[step.added].double(), torch.tensor(step.added_scale, dtype=torch.float32), value)
    bent = _ACTIVATIONS[step.activation](value)
    value = bent.half() if step.half else _quantize_values(bent, relu=step.activation == "relu")
    return value.reshape(*ahead, -1) if step.flat else value


def _pad_channels(value: Any, spare: int) -> Any:
    import torch

    return torch.nn.functional.pad(value, (*(0, 0) * (value.dim() - 2), 0, spare))


def _convolve_depthwise(step: steps.Depthwise, given: Any) -> Any:
    import torch

    top, left, below, right = step.padding
    wide = torch.nn.functional.pad(given.float(), (left, right, top, below))
    weight, bias = torch.from_numpy(step.weight[:, None]).float(), torch.from_numpy(step.bias)
    value = torch.nn.functional.conv2d(wide, weight, bias, step.stride, groups=len(step.weight))
    value = _pad_channels(_ACTIVATIONS[step.activation](value), step.spare)
    return value.half() if step.half else _quantize_values(value * step.inverse_scale, relu=False)


def _scale_and_add(total: Any, scale: Any, bias: Any) -> Any:
    """A fused multiply-add in FP32: the INT32 sum becomes FP32 first, the product is not rounded."""
    return (total.float().double() * scale.double() + bias.double()).float()


def _quantize_values(value: Any, *, relu: bool) -> Any:
    import torch

    return value.clamp(0 if relu else LOWEST, HIGHEST).round().to(torch.int8)


def _convolve_stem(step: steps.Stem, given: Any) -> Any:
    import torch

    weight, bias = torch.from_numpy(step.weight).float(), torch.from_numpy(step.bias)
    value = torch.nn.functional.conv2d(given.half().float(), weight, bias, stride=2, padding=step.padding)
    value = _ACTIVATIONS[step.activation](value)
    return value.half() if step.half else _quantize_values(value * step.inverse_scale, relu=False)


def _compute_floating(step: steps.Floating, values: Mapping[str, Any]) -> Any:
    """In FP32, then rounded to the type that a GPU's result has: FP32 where an operand is, else FP16."""
    import torch

    operands = [
        values[each] if isinstance(each, str) else None if each is None else torch.from_numpy(each.copy())
        for each in step.inputs
    ]
    floats = [each for each in operands if each is not None and each.is_floating_point()]
    wide = tuple(each.float() if each is not None and each.is_floating_point() else each for each in operands)
    found = compute_operator(step.operator, wide, step.attributes)
    if step.operator == "Cast" or not found.is_floating_point():
        return found
    return found if any(each.dtype == torch.float32 and each.dim() for each in floats) else found.half()
