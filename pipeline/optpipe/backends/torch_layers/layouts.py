"""One layout for a program's images: channels last, from the first convolution to the last operator that reads images.

torch's compiler decides on the layout of each tensor by what reads it, and an operator of ours pins its own, so that tensors between
the two are copied. Here, an image is a tensor (images, height, width, channels) whose memory is contiguous, which any compiler keeps
as it is. Elementwise operators, concatenation, reductions, resizing, and normalization work on it; whatever else reads an image gets
its view (images, channels, height, width). Tokens and images are views of each other, without copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from optpipe.backends.torch_graph import read_sizes
from optpipe.core import torch
from optpipe.kernels import steps
from optpipe.kernels.operators import register_operator

_ROWS_FROM_IMAGE = (0, 2, 3, 1)
_IMAGE_FROM_ROWS = (0, 3, 1, 2)
_AXES = {0: 0, 1: 3, 2: 1, 3: 2}
"""Axes of (images, height, width, channels) by those of (images, channels, height, width)."""


@dataclass(frozen=True, slots=True)
class Image:
    """Images in both orders; `view` shows the memory of `rows`."""

    rows: Any
    """(images, height, width, channels)"""
    view: Any
    """(images, channels, height, width)"""


@dataclass(frozen=True, slots=True)
class LayoutCopy:
    """A tensor that is copied because it is computed in another layout than it is read in."""

    node: str
    """The node of the program that reads it."""
    shape: tuple[int, ...]
    dtype: Any


def image_from_rows(rows: Any) -> Image:
    return Image(rows, rows.permute(_IMAGE_FROM_ROWS))


def image_from_view(view: Any) -> Image:
    return Image(view.permute(_ROWS_FROM_IMAGE), view)


def _is_tensor(value: Any, axes: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == axes


def _is_channels_last(value: Any) -> bool:
    """Whether a tensor has four axes and its memory is in the order of `Image.rows`, and in no other."""
    return (
        _is_tensor(value, 4)
        and value.is_contiguous(memory_format=torch.channels_last)
        and not value.is_contiguous()
    )


def make_arranger() -> Any:
    """The class of an interpreter of GraphModules, which runs, or lets torch trace, a program with its images channels last.

    It computes what the program computes. `copies` lists what it had to copy.
    """

    class Arranger(torch.fx.Interpreter):
        def __init__(self, program: Any) -> None:
            super().__init__(program)
            self.copies: list[LayoutCopy] = []
            self._node: Any = None

        def run_node(self, n: Any) -> Any:
            self._node = n
            return super().run_node(n)

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            arrange = _find_rule(target)
            if arrange is not None:
                arranged = arrange(self, target, args, kwargs)
                if arranged is not NotImplemented:
                    return arranged
            return wrap_images(super().call_function(target, show(args), show(kwargs)))

        def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
            value, *others = args
            if isinstance(value, Image) and target == "narrow" and not kwargs:
                axis, first, size = others
                return image_from_rows(value.rows.narrow(_AXES[axis % 4], first, size))
            if isinstance(value, Image) and target == "to":
                return image_from_rows(value.rows.to(*others, **kwargs))
            return wrap_images(super().call_method(target, show(args), show(kwargs)))

        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            return wrap_images(super().call_module(target, show(args), show(kwargs)))

        def output(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().output(target, show(args), kwargs)

        def demand_image(self, value: Any) -> Image:
            """`value`, with four axes, as an image, copied if its memory has another order."""
            if isinstance(value, Image):
                return value
            rows = value.permute(_ROWS_FROM_IMAGE)
            if not rows.is_contiguous():
                shape = tuple(read_sizes(value))
                self.copies.append(LayoutCopy(str(self._node), shape, value.dtype))
                rows = rows.contiguous()
            return image_from_rows(rows)

    return Arranger


def show(value: Any) -> Any:
    """Images in nested arguments as tensors (images, channels, height, width)."""
    if isinstance(value, Image):
        return value.view
    if isinstance(value, dict):
        return {key: show(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(show, value))
    return value


def wrap_images(value: Any) -> Any:
    """Tensors whose memory is channels last as images, also in a tuple or list."""
    if type(value) in (list, tuple):
        return type(value)(map(wrap_images, value))
    return image_from_view(value) if _is_channels_last(value) else value


Rule = Callable[[Any, Any, Any, Any], Any]
"""From an arranger, a target, and its arguments to the result; NotImplemented for arguments that it does not arrange."""


def _find_rule(target: Any) -> Rule | None:
    if (known := _list_rules().get(target)) is not None:
        return known
    tags = getattr(target, "tags", ())
    return _compute_elementwise if torch.Tag.pointwise in tags else None


@cache
def _list_rules() -> dict[Any, Rule]:
    from optpipe.backends.torch_layers.writing import quantize_tensor

    aten = torch.ops.aten
    return {
        register_operator(): _run_layer,
        quantize_tensor: _quantize,
        aten.conv2d.default: _convolve,
        aten.convolution.default: _convolve,
        aten.conv_transpose2d.input: _convolve,
        aten.clone.default: _copy,
        aten._to_copy.default: _copy,
        aten.contiguous.default: _copy,
        aten.to.dtype: _copy,
        aten.cat.default: _concatenate,
        aten.mean.dim: _reduce,
        aten.sum.dim_IntList: _reduce,
        aten.amax.default: _reduce,
        aten.adaptive_avg_pool2d.default: _average,
        aten._adaptive_avg_pool2d.default: _average,
        aten.permute.default: _permute,
        aten.view.default: _reshape,
        aten._unsafe_view.default: _reshape,
        aten.reshape.default: _reshape,
        aten.flatten.using_ints: _flatten,
        aten.slice.Tensor: _slice,
        aten.upsample_bilinear2d.vec: _resize_linearly,
        aten.upsample_nearest2d.vec: _resize_to_nearest,
        aten._native_batch_norm_legit_no_training.default: _normalize,
    }


def _has_image(values: Any) -> bool:
    return any(
        isinstance(value, Image) or (isinstance(value, list | tuple) and _has_image(value))
        for value in values
    )


def _align(value: Any) -> Any:
    """An operand in the order of `Image.rows`, which broadcasts as before; NotImplemented for more than four axes."""
    if isinstance(value, Image):
        return value.rows
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.dim() > 4:
        return NotImplemented
    whole = value.reshape((1,) * (4 - value.dim()) + tuple(value.shape))
    return whole.permute(_ROWS_FROM_IMAGE)


def _compute_elementwise(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    if not _has_image(args):
        return NotImplemented
    aligned = [_align(value) for value in args]
    named = {key: _align(value) for key, value in kwargs.items()}
    if any(value is NotImplemented for value in (*aligned, *named.values())):
        return NotImplemented
    return image_from_rows(target(*aligned, **named))


def _copy(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """A copy or a cast of an image keeps its layout, whatever layout the module asks for."""
    if not isinstance(args[0], Image):
        return NotImplemented
    kept = {key: value for key, value in kwargs.items() if key != "memory_format"}
    if target in (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default):
        return args[0]
    return image_from_rows(target(args[0].rows, *args[1:], **kept))


def _concatenate(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    tensors, axis = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not _has_image(tensors):
        return NotImplemented
    return image_from_rows(target([_align(tensor) for tensor in tensors], _AXES[axis % 4]))


def _reduce(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Over an axis or several; without `keepdim`, over height and width alone, so that (images, channels) are left."""
    value, axes, *others = args
    if not isinstance(value, Image) or axes is None:
        return NotImplemented
    mapped = sorted(_AXES[axis % 4] for axis in ([axes] if isinstance(axes, int) else axes))
    kept = bool(others[0] if others else kwargs.get("keepdim", False))
    if not kept and mapped != [1, 2]:
        return NotImplemented
    reduced = target(value.rows, mapped, *others, **kwargs)
    return image_from_rows(reduced) if kept else reduced


def _average(_: Any, __: Any, args: Any, ___: Any) -> Any:
    """Adaptive pooling to one pixel is a mean."""
    value, size = args
    if not isinstance(value, Image) or any(side != 1 for side in size):
        return NotImplemented
    return image_from_rows(value.rows.mean((1, 2), keepdim=True))


def _permute(_: Any, __: Any, args: Any, ___: Any) -> Any:
    value, order = args
    if isinstance(value, Image) and tuple(axis % 4 for axis in order) == _ROWS_FROM_IMAGE:
        return value.rows
    if _is_tensor(value, 4) and tuple(axis % 4 for axis in order) == _IMAGE_FROM_ROWS:
        return image_from_rows(value)
    return NotImplemented


def _reshape(_: Any, __: Any, args: Any, ___: Any) -> Any:
    """Tokens (images, channels, pixels) of an image, and images of tokens."""
    value, shape = args
    if isinstance(value, Image) and len(shape) == 3:
        images, channels = value.view.shape[:2]
        if shape[1] == channels and shape[0] in (images, -1):
            return value.rows.flatten(1, 2).transpose(1, 2)
        return NotImplemented
    if _is_tensor(value, 3) and len(shape) == 4 and value.stride(1) == 1 != value.stride(2):
        images, channels, pixels = value.shape
        height, width = shape[2:]
        same = shape[1] == channels and shape[0] in (images, -1)
        if same and -1 not in (height, width) and height * width == pixels:
            return image_from_rows(value.transpose(1, 2).unflatten(1, (height, width)))
    return NotImplemented


def _flatten(_: Any, __: Any, args: Any, ___: Any) -> Any:
    value, first, last = (*args, 0, -1)[:3] if len(args) < 3 else args
    if isinstance(value, Image) and first == 2 and last in (-1, 3):
        return value.rows.flatten(1, 2).transpose(1, 2)
    return NotImplemented


def _slice(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    value, *others = args
    if not isinstance(value, Image) or not others:
        return NotImplemented
    axis, *bounds = others
    return image_from_rows(target(value.rows, _AXES[axis % 4], *bounds, **kwargs))


def _convolve(arranger: Any, target: Any, args: Any, kwargs: Any) -> Any:
    value, *others = args
    if not isinstance(value, Image) and not _is_tensor(value, 4):
        return NotImplemented
    return image_from_view(target(arranger.demand_image(value).view, *others, **kwargs))


def _run_layer(arranger: Any, target: Any, args: Any, kwargs: Any) -> Any:
    output = target(*arrange_operands(arranger, args), **kwargs)
    return wrap_layer(output, args[5])


def arrange_operands(arranger: Any, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of an operator of ours as tensors; images that it reads channels last are channels last."""
    given, added, *others = arguments
    step = steps.step_from_text(arguments[5])
    if not _reads_tokens(step) and not isinstance(step, steps.Stem):
        given, added = (
            arranger.demand_image(tensor) if _is_tensor(tensor, 4) else tensor
            for tensor in (given, added)
        )
    return [show(given), show(added), *others]


def wrap_layer(output: Any, step: str) -> Any:
    """An output of our operator, which is channels last if it is an image; tokens may have four axes too."""
    image = _is_tensor(output, 4) and not _reads_tokens(steps.step_from_text(step))
    return image_from_view(output) if image else output


def _reads_tokens(step: steps.Step) -> bool:
    """Whether a step reads and writes (..., features)."""
    return isinstance(step, steps.Attention) or (isinstance(step, steps.Convolution) and step.flat)


def _quantize(_: Any, target: Any, args: Any, kwargs: Any) -> Any:
    value, inverse_scale, axis, spare = args
    if not isinstance(value, Image) or axis != 1:
        return NotImplemented
    return image_from_rows(target(value.rows, inverse_scale, -1, spare, **kwargs))


def _normalize(_: Any, __: Any, args: Any, ___: Any) -> Any:
    """Batch normalization with its statistics, in FP32; returns a tuple, as the operator does."""
    value, weight, bias, mean, variance, _momentum, epsilon = args
    if not isinstance(value, Image):
        return NotImplemented
    factor = (variance.float() + epsilon).rsqrt()
    factor = factor if weight is None else factor * weight.float()
    normalized = (value.rows.float() - mean.float()) * factor
    normalized = normalized if bias is None else normalized + bias.float()
    return (image_from_rows(normalized.to(value.rows.dtype)), None, None)


def _read_size(image: Image, size: Any, scales: Any) -> tuple[list[int], list[float | None]]:
    """Height and width after resizing, and the factors of both axes if they are given."""
    given = image.rows.shape[1:3]
    if size is not None:
        return list(size), [None, None]
    return [int(old * factor) for old, factor in zip(given, scales, strict=True)], list(scales)


def _resize_linearly(_: Any, __: Any, args: Any, kwargs: Any) -> Any:
    """Bilinear resizing with FP32 weights, as torch computes it on a GPU."""
    value, size, corners, scales = args
    if not isinstance(value, Image) or kwargs:
        return NotImplemented
    wanted, factors = _read_size(value, size, scales)
    rows = value.rows
    (top, below, down), (left, right, along) = (
        _find_neighbors(old, new, factor, corners=corners, device=rows.device)
        for old, new, factor in zip(rows.shape[1:3], wanted, factors, strict=True)
    )
    down, along = down[:, None, None], along[:, None]
    upper, lower = (
        (1 - along) * _pick(rows, line, left) + along * _pick(rows, line, right)
        for line in (top, below)
    )
    return image_from_rows(((1 - down) * upper + down * lower).to(rows.dtype))


def _pick(rows: Any, down: Any, along: Any) -> Any:
    """Pixels of `rows` in FP32 at the rows `down` and the columns `along`; indices are known to be inside."""
    return torch.ops.aten._unsafe_index.Tensor(rows, [None, down[:, None], along]).float()


def _find_neighbors(
    old: int, new: int, factor: float | None, *, corners: bool, device: Any
) -> tuple[Any, Any, Any]:
    """For each of `new` places on an axis with `old` pixels: the pixel before it, the one after it, and the weight of the latter."""
    places = torch.arange(new, device=device, dtype=torch.float32)
    if corners:
        position = places * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        pace = old / new if factor is None else 1.0 / factor
        position = ((places + 0.5) * pace - 0.5).clamp(min=0.0)
    first = position.to(torch.int64).clamp(max=old - 1)
    return first, (first + 1).clamp(max=old - 1), (position - first).clamp(0.0, 1.0)


def _resize_to_nearest(_: Any, __: Any, args: Any, kwargs: Any) -> Any:
    value, size, scales = args
    if not isinstance(value, Image) or kwargs:
        return NotImplemented
    wanted, factors = _read_size(value, size, scales)
    rows = value.rows
    down, along = (
        (
            torch.arange(new, device=rows.device, dtype=torch.float32)
            * (old / new if factor is None else 1.0 / factor)
        )
        .to(torch.int64)
        .clamp(max=old - 1)
        for old, new, factor in zip(rows.shape[1:3], wanted, factors, strict=True)
    )
    picked = torch.ops.aten._unsafe_index.Tensor(rows, [None, down[:, None], along])
    return image_from_rows(picked)
