"""ONNX operators that stay in floating point, computed by torch: FP16 on a GPU; in an emulation FP32, rounded to FP16 after each."""

from collections.abc import Callable, Mapping
from typing import Any

from optpipe.errors import StageError

_Attributes = Mapping[str, Any]
_FLOAT = 1
"""`TensorProto.FLOAT`."""


def compute_operator(operator: str, inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    """The output of one operator: torch tensors in, channels first by index, and one out."""
    return FLOATING[operator](inputs, attributes)


def _convolve(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, weight, *bias = inputs
    pads = attributes.get("pads", [0, 0, 0, 0])
    half = len(pads) // 2
    if list(pads[:half]) != list(pads[half:]):
        given = torch.nn.functional.pad(given, [pads[1], pads[3], pads[0], pads[2]])
        pads = [0] * len(pads)
    return torch.nn.functional.conv2d(
        given,
        weight,
        bias[0] if bias else None,
        stride=tuple(attributes.get("strides", [1] * half)),
        padding=tuple(pads[:half]),
        dilation=tuple(attributes.get("dilations", [1] * half)),
        groups=attributes.get("group", 1),
    )


def _pool(inputs: tuple[Any, ...], attributes: _Attributes, *, largest: bool) -> Any:
    import torch

    pads = attributes.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:] or any(each != 1 for each in attributes.get("dilations", [1, 1])):
        raise StageError("the torch backend's INT8 takes pooling with the same padding on both sides and no dilation")
    settings = {
        "kernel_size": tuple(attributes["kernel_shape"]),
        "stride": tuple(attributes.get("strides", [1, 1])),
        "padding": tuple(pads[:2]),
        "ceil_mode": bool(attributes.get("ceil_mode", 0)),
    }
    if largest:
        return torch.nn.functional.max_pool2d(inputs[0], **settings)
    counted = bool(attributes.get("count_include_pad", 0))
    return torch.nn.functional.avg_pool2d(inputs[0], count_include_pad=counted, **settings)


def _average(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    axes = attributes.get("axes") or [int(each) for each in inputs[1].reshape(-1)]
    return inputs[0].mean(dim=tuple(axes), keepdim=bool(attributes.get("keepdims", 1)))


def _reshape(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given, shape = inputs[0], [int(each) for each in inputs[1].reshape(-1)]
    if not attributes.get("allowzero", 0):
        shape = [given.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return given.reshape(shape)


def _gemm(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    left = inputs[0].t() if attributes.get("transA", 0) else inputs[0]
    right = inputs[1].t() if attributes.get("transB", 0) else inputs[1]
    product = attributes.get("alpha", 1.0) * (left @ right)
    return product + attributes.get("beta", 1.0) * inputs[2] if len(inputs) > 2 else product


def _clip(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    bounds = [None if each is None else float(each) for each in (*inputs[1:3], *[None] * (3 - len(inputs)))]
    low, high = attributes.get("min", bounds[0]), attributes.get("max", bounds[1])
    return inputs[0].clamp(low, high)


def _hard_sigmoid(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    return (inputs[0] * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5)).clamp(0, 1)


def _hard_swish(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    return inputs[0] * (inputs[0] / 6 + 0.5).clamp(0, 1)


def _squeeze(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    axes = attributes.get("axes") or [int(each) for each in inputs[1].reshape(-1)]
    return inputs[0].squeeze(tuple(axes))


def _unsqueeze(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    given = inputs[0]
    axes = attributes.get("axes") or [int(each) for each in inputs[1].reshape(-1)]
    rank = given.dim() + len(axes)
    for axis in sorted(each % rank for each in axes):
        given = given.unsqueeze(axis)
    return given


def _scale_and_shift(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    """A BatchNormalization lowered to its scale and shift, (channels,) each."""
    import torch

    given, scale, shift = inputs
    per_channel = (-1, *[1] * (given.dim() - 2))
    return torch.addcmul(shift.view(per_channel), given, scale.view(per_channel))


def _concatenate(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.cat(inputs, dim=attributes["axis"])


FLOATING: dict[str, Callable[[tuple[Any, ...], _Attributes], Any]] = {
    "Add": lambda inputs, _: inputs[0] + inputs[1],
    "AveragePool": lambda inputs, attributes: _pool(inputs, attributes, largest=False),
    "BatchNormalization": _scale_and_shift,
    "Cast": lambda inputs, attributes: inputs[0].float() if attributes["to"] == _FLOAT else inputs[0].half(),
    "Clip": _clip,
    "Concat": _concatenate,
    "Conv": _convolve,
    "Flatten": lambda inputs, attributes: inputs[0].flatten(attributes.get("axis", 1)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda inputs, _: inputs[0].mean(dim=(2, 3), keepdim=True),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Identity": lambda inputs, _: inputs[0],
    "MatMul": lambda inputs, _: inputs[0] @ inputs[1],
    "MaxPool": lambda inputs, attributes: _pool(inputs, attributes, largest=True),
    "Mul": lambda inputs, _: inputs[0] * inputs[1],
    "ReduceMean": _average,
    "Relu": lambda inputs, _: inputs[0].relu(),
    "Reshape": _reshape,
    "Sigmoid": lambda inputs, _: inputs[0].sigmoid(),
    "Split": lambda inputs, attributes: inputs[0].narrow(attributes["axis"], attributes["start"], attributes["length"]),
    "Squeeze": _squeeze,
    "Sub": lambda inputs, _: inputs[0] - inputs[1],
    "Transpose": lambda inputs, attributes: inputs[0].permute(tuple(attributes["perm"])),
    "Unsqueeze": _unsqueeze,
}
