"""A layer of a program with what is fused with it, and what the kernels can take."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.backends.onnx_quantized import QuantizedLayer
from optpipe.backends.torch_graph import read_arguments
from optpipe.backends.torch_layers.attention import get_only
from optpipe.backends.torch_layers.overflow import WIDENED
from optpipe.backends.torch_products import type_name_from_torch
from optpipe.core import torch

ALIGNED = 16
"""TMA strides are multiples of 16 bytes, so INT8 tensors have zero-padded channels in multiples of 16."""
ALIGNED_HALVES = 8
"""The same for FP16 channels."""
_MOST_DENSE = 512
"""Most input channels of a convolution whose groups fit no kernel and become one, with zeros."""
_LEAST_DEPTH = 32
"""Bytes of the smallest block of input channels."""
_MOST_COLUMNS = 31
"""Columns of the largest depthwise kernel, whose loop over them is unrolled."""
_STEM_CHANNELS = 4
_STEM_OUTPUTS = (16, 32, 64, 128)
_STEM_KERNELS = {2: range(1, 8), 4: range(5, 17)}
"""Sizes of a stem's kernel by its stride; one of 4x4 with stride 4 reads patches."""
_LARGEST_HALF = 65504.0
_TOLERANCE = 0.6
"""In steps of a weight: covers rounding, and scales that the graph stores in FP16."""


@dataclass(eq=False, slots=True)
class Layer:
    """A layer of the program with the nodes that are fused with it."""

    node: Any
    given: Any
    weight: Any
    """FP32, (outputs, input channels of a group, kernel …), with batch normalization."""
    bias: Any
    """FP32, (outputs)."""
    last: Any
    """The last fused node, which the step replaces."""
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    floating: bool = False
    """A convolution in FP16, or a linear layer before an activation."""
    computed_bias: Any = None
    """A node that computes the bias of a linear layer."""
    table: QuantizedLayer | None = None
    added: Any = None
    activation: str = ""
    pool: Any = None
    output_scale: float | None = None
    """Scale of an INT8 output."""
    parts: tuple["Layer", ...] = ()
    """Linear layers of one tensor that are computed as this one."""

    @property
    def flat(self) -> bool:
        return not self.stride

    @property
    def fits_half(self) -> bool:
        kind = type_name_from_torch(self.given.meta["val"].dtype)
        reader = get_only(self.last.users)
        bent = (
            self.computed_bias is None
            and reader is not None
            and name_activation(reader) is not None
        )
        if (
            not (len(self.stride) == 2 or (self.flat and bent))
            or kind != "fp16"
            or find_obstacle(self)
        ):
            return False
        outputs, depth = self.weight.shape[:2]
        return bool(outputs % ALIGNED_HALVES == depth * self.groups % ALIGNED_HALVES == 0)

    @property
    def line(self) -> bool:
        return len(self.stride) == 1


def have_same_weights(values: NDArray[Any], layer: QuantizedLayer) -> bool:
    if values.shape != layer.weight.shape:
        return False
    rows, whole, scale = (
        array.reshape(len(values), -1) for array in (values, layer.weight, layer.weight_scale)
    )
    some = (1, len(values))  # the first row rejects most layers
    return all(bool(np.abs(rows[:n] / scale[:n] - whole[:n]).max() < _TOLERANCE) for n in some)


def find_obstacle(layer: Layer) -> str | None:
    if layer.flat:
        return None
    if len(set(layer.stride)) > 1 or len(set(layer.dilation)) > 1:
        return "its stride or its dilation differs by axis"
    outputs, depth = layer.weight.shape[:2]
    if layer.groups == 1:
        return None
    if depth == 1 and layer.weight.shape[-1] > _MOST_COLUMNS:
        return f"its depthwise kernel of {layer.weight.shape[-1]} columns is too large to unroll"
    merged = choose_merge(layer.groups, outputs, depth)
    if merged is None or (merged < layer.groups and depth * layer.groups % ALIGNED):
        return f"{layer.groups} groups of {depth} input channels fit no kernel"
    return None


def find_overflow(layer: Layer) -> str | None:
    """Why kernels with FP16 weights and outputs do not fit: values or weights beyond FP16's range."""
    if WIDENED in layer.node.meta or WIDENED in layer.last.meta:
        return "fp16 cannot hold its values"
    largest = float(layer.weight.abs().max()) if layer.weight.numel() else 0.0
    return None if largest < _LARGEST_HALF else "fp16 cannot hold its weights"


def is_patches(layer: Layer) -> bool:
    if len(layer.stride) != 2 or layer.groups > 1 or len(set(layer.stride)) > 1:
        return False
    _, channels, *kernel = layer.weight.shape
    plain = tuple(kernel) == layer.stride and not any(layer.padding) and set(layer.dilation) == {1}
    return (
        bool(plain)
        and channels <= _STEM_CHANNELS
        and find_input(layer.given) is not None
        and not is_stem(layer)
    )


def is_depthwise(layer: Layer) -> bool:
    """One input and one output for each group."""
    regular = len(layer.stride) == 2 and len(set(layer.stride)) == 1 and set(layer.dilation) == {1}
    if not regular or layer.weight.shape[-1] > _MOST_COLUMNS:
        return False
    return layer.groups > 1 and tuple(layer.weight.shape[:2]) == (layer.groups, 1)


def is_stem(layer: Layer) -> bool:
    """Whether it convolves an input of the network that has few channels, with stride 2 or 4."""
    if len(layer.stride) != 2 or layer.groups > 1 or find_input(layer.given) is None:
        return False
    outputs, channels, height, width = layer.weight.shape
    fits = channels <= _STEM_CHANNELS and height == width and outputs in _STEM_OUTPUTS
    return (
        fits
        and len(set(layer.stride)) == len(set(layer.padding)) == 1
        and width in _STEM_KERNELS.get(layer.stride[0], ())
        and set(layer.dilation) == {1}
    )


def find_input(node: Any) -> Any:
    """The program's FP32 input if a node is one or casts one; None for any other."""
    aten = torch.ops.aten
    while node.op == "call_function" and node.target in (
        aten._to_copy.default,
        aten.clone.default,
        aten.to.dtype,
    ):
        node = node.args[0]
    given = node.meta.get("val")
    return (
        node
        if node.op == "placeholder" and given is not None and given.dtype == torch.float32
        else None
    )


def name_activation(node: Any) -> str | None:
    aten = torch.ops.aten
    if node.target is aten.gelu.default:
        return "gelu" if read_arguments(node)["approximate"] == "none" else None
    if node.target in (aten.hardtanh.default, aten.clamp.default):
        given = read_arguments(node)
        bounds = [
            given.get(low, given.get(high))
            for low, high in (("min_val", "min"), ("max_val", "max"))
        ]
        return "relu6" if bounds == [0, 6] else None
    named = {aten.relu6: "relu6", aten.relu: "relu", aten.silu: "silu", aten.hardswish: "hardswish"}
    return named.get(getattr(node.target, "overloadpacket", None))


def is_plain_pool(node: Any) -> bool:
    if node.target is not torch.ops.aten.max_pool2d.default:
        return False
    given = read_arguments(node)
    even = all(
        len(set(list_sides(given[name]))) == 1
        for name in ("kernel_size", "stride", "padding", "dilation")
    )
    return (
        even
        and bool(given["stride"])
        and list_sides(given["dilation"])[0] == 1
        and not given["ceil_mode"]
    )


def list_sides(values: Any) -> list[int]:
    sides = [values] if isinstance(values, int) else list(values)
    return sides * 2 if len(sides) == 1 else sides


def get_shape(node: Any) -> tuple[Any, ...]:
    """The shape of a node's tensor; symbolic sizes become text, so that equal ones compare equal."""
    return tuple(size if isinstance(size, int) else str(size) for size in node.meta["val"].shape)


def merge_groups(weight: NDArray[Any], groups: int) -> tuple[NDArray[Any], int]:
    """Weights (output channels, rows, columns, input channels of a group) in fewer groups, with zeros, and their number."""
    outputs, *kernel, depth = weight.shape
    merged = 1 if groups == 1 else choose_merge(groups, outputs, depth) or 1
    wide = np.zeros((groups, outputs // groups, *kernel, merged, depth), weight.dtype)
    for group, part in enumerate(weight.reshape(groups, -1, *kernel, depth)):
        wide[group, ..., group % merged, :] = part
    return wide.reshape(outputs, *kernel, merged * depth), groups // merged


def choose_merge(groups: int, outputs: int, depth: int) -> int | None:
    """The number of groups to merge into one, so that its outputs are a multiple of ALIGNED and, if possible, its inputs fill a block.

    `depth` is the number of input channels of a group. None if no number fits.
    """
    fitting = [
        merged
        for merged in (1, 2, 4, 8)
        if groups % merged == 0 and outputs // groups * merged % ALIGNED == 0
    ]
    dense = groups if groups * depth <= _MOST_DENSE else None
    return next(
        (merged for merged in fitting if depth * merged >= _LEAST_DEPTH),
        fitting[-1] if fitting else dense,
    )
