"""Operators of exported programs that become simpler ones before layers are read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optpipe.core import torch


def list_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The table for `ExportedProgram.run_decompositions`: convolutions whose padding is a word get it in elements."""
    aten = torch.ops.aten
    plain = {
        aten.conv1d.padding: aten.conv1d.default,
        aten.conv2d.padding: aten.conv2d.default,
        aten.conv3d.padding: aten.conv3d.default,
    }
    return {operator: _make_convolution(numbered) for operator, numbered in plain.items()}


def _make_convolution(convolve: Callable[..., Any]) -> Callable[..., Any]:
    def convolve_padded(
        given: Any,
        weight: Any,
        bias: Any = None,
        stride: Sequence[int] = (1,),
        padding: str = "valid",
        dilation: Sequence[int] = (1,),
        groups: int = 1,
    ) -> Any:
        axes = weight.dim() - 2
        strides, dilations = _repeat(stride, axes), _repeat(dilation, axes)
        whole = [0] * axes
        if padding == "same":
            whole = [
                step * (size - 1) for step, size in zip(dilations, weight.shape[2:], strict=True)
            ]
        if any(pad % 2 for pad in whole):  # the odd element comes last, as in torch
            last_axis_first = [side for pad in reversed(whole) for side in (0, pad % 2)]
            given = torch.ops.aten.constant_pad_nd.default(given, last_axis_first)
        sides = [pad // 2 for pad in whole]
        return convolve(given, weight, bias, strides, sides, dilations, groups)

    return convolve_padded


def _repeat(values: Sequence[int], axes: int) -> list[int]:
    return [*values] * axes if len(values) == 1 else [*values]
