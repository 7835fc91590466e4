"""ONNX's operators in torch, so that an ONNX graph can be differentiated: one function of tensors for each operator.

A function takes its node, whose attributes are read once, and the values of the node's inputs, None for one that is left out.
Only operators that data flow through are here; `torch_graph` computes those of sizes and indices, which have no gradient, with
onnx's reference implementation. Semantics: https://onnx.ai/onnx/operators. What a graph computes in torch is compared with what
ONNX Runtime computes before anything is learned from it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from optpipe.backends.onnx_products import read_attributes
from optpipe.core import torch


class UnknownOperatorError(Exception):
    """An operator, or a form of it, that has no gradient here; the message names it."""


class Call(NamedTuple):
    """A node as its function sees it."""

    attributes: Mapping[str, Any]
    opset: int
    outputs: int

    def read(self, name: str, default: Any = None) -> Any:
        """An attribute; strings as text."""
        attribute = self.attributes.get(name, default)
        return attribute.decode() if isinstance(attribute, bytes) else attribute


def call_from_node(node: Any, opset: int) -> Call:
    return Call(read_attributes(node), opset, len(node.output))


Operator = Callable[..., Any]
"""A function of a `Call` and the inputs; its result is a tensor, or a tuple of them."""


def _apply(function: Callable[..., Any]) -> Operator:
    """An operator without attributes."""
    return lambda _call, *inputs: function(*inputs)


def _fold(function: Callable[[Any, Any], Any]) -> Operator:
    """An operator of any number of inputs."""
    return lambda _call, *inputs: reduce(function, inputs)


def _list(values: Any) -> list[int]:
    return [int(number) for number in values.reshape(-1)]


def _choose_axes(call: Call, given: Any, default: Sequence[int] | None) -> list[int] | None:
    """The axes of an attribute, as in early opsets, or of an input."""
    if given is not None:
        return _list(given)
    held = call.read("axes")
    return list(default) if held is None and default is not None else held


def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    low = call.read("min") if low is None else low
    high = call.read("max") if high is None else high
    if low is not None:
        x = torch.maximum(x, torch.as_tensor(low, dtype=x.dtype, device=x.device))
    if high is not None:
        x = torch.minimum(x, torch.as_tensor(high, dtype=x.dtype, device=x.device))
    return x


def _hard_sigmoid(call: Call, x: Any) -> Any:
    return (call.read("alpha", 0.2) * x + call.read("beta", 0.5)).clamp(0, 1)


def _gelu(call: Call, x: Any) -> Any:
    return torch.nn.functional.gelu(x, approximate=call.read("approximate", "none"))


def _prelu(_call: Call, x: Any, slope: Any) -> Any:
    return torch.where(x < 0, slope * x, x)


def _cast(call: Call, x: Any) -> Any:
    types = {
        1: torch.float32,
        6: torch.int32,
        7: torch.int64,
        9: torch.bool,
        11: torch.float64,
    }
    if (kind := types.get(call.read("to"))) is None:
        raise UnknownOperatorError(f"Cast to type {call.read('to')}")
    return x.to(kind)


def _divide(_call: Call, x: Any, y: Any) -> Any:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _softmax(call: Call, x: Any) -> Any:
    return _over_axis(call, x, torch.softmax)


def _log_softmax(call: Call, x: Any) -> Any:
    return _over_axis(call, x, torch.log_softmax)


def _over_axis(call: Call, x: Any, function: Any) -> Any:
    """Up to opset 12 all axes from `axis` on count as one."""
    if call.opset >= 13:
        return function(x, call.read("axis", -1))
    axis = call.read("axis", 1) % x.ndim
    return function(x.flatten(axis), -1).reshape(x.shape)


def _reduce(function: Callable[..., Any]) -> Operator:
    def run(call: Call, x: Any, given: Any = None) -> Any:
        axes = _choose_axes(call, given, None)
        if not axes:
            if call.read("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        return function(x, axes, bool(call.read("keepdims", 1)))

    return run


def _reshape(call: Call, x: Any, shape: Any) -> Any:
    wanted = _list(shape)
    if not call.read("allowzero", 0):
        wanted = [x.shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return x.reshape(wanted)


def _flatten(call: Call, x: Any) -> Any:
    axis = call.read("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    rows = int(torch.Size(x.shape[:axis]).numel())
    return x.reshape(rows, -1)


def _transpose(call: Call, x: Any) -> Any:
    return x.permute(call.read("perm") or list(range(x.ndim))[::-1])


def _squeeze(call: Call, x: Any, given: Any = None) -> Any:
    axes = _choose_axes(call, given, None)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(call: Call, x: Any, given: Any = None) -> Any:
    axes = _choose_axes(call, given, ()) or []
    rank = x.ndim + len(axes)
    for axis in sorted(place % rank for place in axes):
        x = x.unsqueeze(axis)
    return x


def _concatenate(call: Call, *inputs: Any) -> Any:
    return torch.cat(inputs, call.read("axis"))


def _split(call: Call, x: Any, given: Any = None) -> Any:
    axis = call.read("axis", 0)
    sizes = _list(given) if given is not None else call.read("split")
    equal = -(-x.shape[axis] // call.outputs)
    return torch.split(x, equal if sizes is None else list(sizes), axis)


def _slice(
    call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None
) -> Any:
    first = _list(starts) if starts is not None else list(call.read("starts"))
    last = _list(ends) if ends is not None else list(call.read("ends"))
    over = _list(axes) if axes is not None else call.read("axes") or range(len(first))
    by = _list(steps) if steps is not None else [1] * len(first)
    for start, end, axis, step in zip(first, last, over, by, strict=True):
        size = x.shape[axis]
        index = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
        chosen = torch.tensor(list(index), dtype=torch.int64, device=x.device)
        x = x.narrow(axis, index.start, len(index)) if step == 1 else x.index_select(axis, chosen)
    return x


def _gather(call: Call, x: Any, indices: Any) -> Any:
    axis = call.read("axis", 0) % x.ndim
    flat = indices.reshape(-1).long() % max(x.shape[axis], 1)
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, flat).reshape(shape)


def _gather_elements(call: Call, x: Any, indices: Any) -> Any:
    axis = call.read("axis", 0)
    return torch.gather(x, axis, indices.long() % max(x.shape[axis], 1))


def _expand(_call: Call, x: Any, shape: Any) -> Any:
    wanted = torch.broadcast_shapes(x.shape, tuple(_list(shape)))
    return x.expand(wanted)


def _tile(_call: Call, x: Any, repeats: Any) -> Any:
    return x.tile(tuple(_list(repeats)))


def _pad(call: Call, x: Any, given: Any = None, value: Any = None, axes: Any = None) -> Any:
    pads = _list(given) if given is not None else list(call.read("pads"))
    over = [place % x.ndim for place in _list(axes)] if axes is not None else list(range(x.ndim))
    sides = [(0, 0)] * x.ndim
    for at, axis in enumerate(over):
        sides[axis] = pads[at], pads[at + len(over)]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}.get(
        call.read("mode", "constant")
    )
    flat = [amount for pair in reversed(sides) for amount in pair]
    if mode == "constant":
        fill = float(value) if value is not None else float(call.read("value", 0.0))
        return torch.nn.functional.pad(x, flat, value=fill)
    if mode is None or any(flat[2 * (x.ndim - 2) :]):
        raise UnknownOperatorError(f"Pad in mode {call.read('mode')}")
    return torch.nn.functional.pad(x, flat[: 2 * (x.ndim - 2)], mode=mode)


class _Window(NamedTuple):
    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    pads: list[int]
    """All at the starts, then all at the ends."""

    def flatten_pads(self) -> list[int]:
        """As `torch.nn.functional.pad` takes them."""
        axes = len(self.kernel)
        return [
            amount
            for axis in reversed(range(axes))
            for amount in (self.pads[axis], self.pads[axis + axes])
        ]


def _read_window(call: Call, x: Any, kernel: Sequence[int]) -> _Window:
    """The window of a convolution or a pool, with the pads of `auto_pad`."""
    axes = len(kernel)
    stride = list(call.read("strides") or [1] * axes)
    dilation = list(call.read("dilations") or [1] * axes)
    pads = list(call.read("pads") or [0] * 2 * axes)
    auto = call.read("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        spans = [(size - 1) * by + 1 for size, by in zip(kernel, dilation, strict=True)]
        total = [
            max((-(-size // by) - 1) * by + span - size, 0)
            for size, by, span in zip(x.shape[2:], stride, spans, strict=True)
        ]
        less, more = [amount // 2 for amount in total], [amount - amount // 2 for amount in total]
        pads = less + more if auto == "SAME_UPPER" else more + less
    return _Window(list(kernel), stride, dilation, pads)


def _convolve(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    window = _read_window(call, x, weight.shape[2:])
    x = torch.nn.functional.pad(x, window.flatten_pads())
    function = getattr(torch.nn.functional, f"conv{len(window.kernel)}d")
    return function(x, weight, bias, window.stride, 0, window.dilation, int(call.read("group", 1)))


def _convolve_transposed(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    axes = weight.ndim - 2
    if call.read("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or call.read("output_shape"):
        raise UnknownOperatorError("ConvTranspose with automatic pads")
    pads = list(call.read("pads") or [0] * 2 * axes)
    if pads[:axes] != pads[axes:]:
        raise UnknownOperatorError("ConvTranspose with unequal pads")
    function = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    return function(
        x,
        weight,
        bias,
        call.read("strides") or [1] * axes,
        pads[:axes],
        call.read("output_padding") or [0] * axes,
        int(call.read("group", 1)),
        call.read("dilations") or [1] * axes,
    )


def _pool_largest(call: Call, x: Any) -> Any:
    window = _read_window(call, x, call.read("kernel_shape"))
    if call.read("ceil_mode", 0):
        raise UnknownOperatorError("MaxPool with ceil_mode")
    padded = torch.nn.functional.pad(x, window.flatten_pads(), value=float("-inf"))
    function = getattr(torch.nn.functional, f"max_pool{len(window.kernel)}d")
    return function(padded, window.kernel, window.stride, 0, window.dilation)


def _pool_mean(call: Call, x: Any) -> Any:
    window = _read_window(call, x, call.read("kernel_shape"))
    if call.read("ceil_mode", 0) or any(step != 1 for step in window.dilation):
        raise UnknownOperatorError("AveragePool with ceil_mode or dilations")
    function = getattr(torch.nn.functional, f"avg_pool{len(window.kernel)}d")
    pads = window.flatten_pads()
    mean = function(torch.nn.functional.pad(x, pads), window.kernel, window.stride)
    if not any(pads) or call.read("count_include_pad", 0):
        return mean
    ones = torch.nn.functional.pad(torch.ones_like(x[:1, :1]), pads)
    return mean / function(ones, window.kernel, window.stride)


def _multiply_general(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    a = a.transpose(0, 1) if call.read("transA", 0) else a
    b = b.transpose(0, 1) if call.read("transB", 0) else b
    product = call.read("alpha", 1.0) * (a @ b)
    return product if c is None else product + call.read("beta", 1.0) * c


def _normalize_batch(call: Call, x: Any, gain: Any, shift: Any, mean: Any, variance: Any) -> Any:
    if call.read("training_mode", 0):
        raise UnknownOperatorError("BatchNormalization in training mode")
    shape = [1, -1] + [1] * (x.ndim - 2)
    factor = gain / torch.sqrt(variance + call.read("epsilon", 1e-5))
    return x * factor.reshape(shape) + (shift - mean * factor).reshape(shape)


def _normalize_layer(call: Call, x: Any, gain: Any, shift: Any = None) -> Any:
    axes = list(range(call.read("axis", -1) % x.ndim, x.ndim))
    centered = x - x.mean(axes, keepdim=True)
    variance = centered.square().mean(axes, keepdim=True)
    normalized = centered * torch.rsqrt(variance + call.read("epsilon", 1e-5)) * gain
    return normalized if shift is None else normalized + shift


def _normalize_root(call: Call, x: Any, gain: Any) -> Any:
    axes = list(range(call.read("axis", -1) % x.ndim, x.ndim))
    square = x.square().mean(axes, keepdim=True)
    return x * torch.rsqrt(square + call.read("epsilon", 1e-5)) * gain


def _normalize_instance(call: Call, x: Any, gain: Any, shift: Any) -> Any:
    return torch.nn.functional.instance_norm(
        x, weight=gain, bias=shift, eps=call.read("epsilon", 1e-5)
    )


def _normalize_group(call: Call, x: Any, gain: Any, shift: Any) -> Any:
    groups = call.read("num_groups")
    if gain.numel() != x.shape[1]:  # before opset 21: one for each group
        gain, shift = (vector.repeat_interleave(x.shape[1] // groups) for vector in (gain, shift))
    return torch.nn.functional.group_norm(x, groups, gain, shift, call.read("epsilon", 1e-5))


def _space_from_depth(call: Call, x: Any) -> Any:
    n, channels, height, width = x.shape
    block = call.read("blocksize")
    inner = channels // block**2
    if call.read("mode", "DCR") == "CRD":
        split = x.reshape(n, inner, block, block, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        split = x.reshape(n, block, block, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    return split.reshape(n, inner, height * block, width * block)


def _depth_from_space(call: Call, x: Any) -> Any:
    if call.read("mode", "DCR") != "DCR":
        raise UnknownOperatorError("SpaceToDepth in another mode than DCR")
    n, channels, height, width = x.shape
    block = call.read("blocksize")
    split = x.reshape(n, channels, height // block, block, width // block, block)
    return split.permute(0, 3, 5, 1, 2, 4).reshape(
        n, channels * block**2, height // block, width // block
    )


def _resize(call: Call, x: Any, _roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    """Nearest and linear, as torch exports its own interpolation; other forms are refused."""
    mode, place = (
        call.read("mode", "nearest"),
        call.read("coordinate_transformation_mode", "half_pixel"),
    )
    if sizes is not None and sizes.numel():
        wanted = _list(sizes)[2:]
    elif scales is not None and scales.numel() == x.ndim:
        wanted = [int(size * float(by)) for size, by in zip(x.shape, scales.tolist(), strict=True)]
        wanted = wanted[2:]
    else:
        raise UnknownOperatorError("Resize without sizes")
    if call.read("axes") or x.ndim not in (3, 4) or call.read("antialias", 0):
        raise UnknownOperatorError("Resize of some axes, or with antialiasing")
    if mode == "nearest" and place == "asymmetric" and call.read("nearest_mode") == "floor":
        return torch.nn.functional.interpolate(x, wanted)
    if scales is not None and any(
        not (size * float(by)).is_integer()
        for size, by in zip(x.shape, scales.tolist(), strict=False)
    ):
        raise UnknownOperatorError("Resize by scales that give no whole sizes")
    if mode == "linear" and (
        place in ("half_pixel", "align_corners")
        or (place == "pytorch_half_pixel" and min(wanted) > 1)
    ):
        return torch.nn.functional.interpolate(
            x,
            wanted,
            mode="bilinear" if x.ndim == 4 else "linear",
            align_corners=place == "align_corners",
        )
    raise UnknownOperatorError(f"Resize in mode {mode}, {place}")


def _einsum(call: Call, *inputs: Any) -> Any:
    return torch.einsum(call.read("equation"), *inputs)


def _drop_nothing(_call: Call, x: Any, _ratio: Any = None, training: Any = None) -> Any:
    if training is not None and bool(training):
        raise UnknownOperatorError("Dropout in training mode")
    return x


def _accumulate(call: Call, x: Any, axis: Any) -> Any:
    if call.read("exclusive", 0) or call.read("reverse", 0):
        raise UnknownOperatorError("CumSum that is exclusive or reverse")
    return torch.cumsum(x, int(axis))


OPERATORS: Mapping[str, Operator] = {
    "Abs": _apply(lambda x: x.abs()),
    "Add": _apply(lambda x, y: x + y),
    "AveragePool": _pool_mean,
    "BatchNormalization": _normalize_batch,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concatenate,
    "Conv": _convolve,
    "ConvTranspose": _convolve_transposed,
    "Cos": _apply(lambda x: x.cos()),
    "CumSum": _accumulate,
    "DepthToSpace": _space_from_depth,
    "Div": _divide,
    "Dropout": _drop_nothing,
    "Einsum": _einsum,
    "Elu": lambda call, x: torch.where(
        x > 0, x, call.read("alpha", 1.0) * torch.expm1(x.clamp(max=0))
    ),
    "Erf": _apply(lambda x: x.erf()),
    "Exp": _apply(lambda x: x.exp()),
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gelu": _gelu,
    "Gemm": _multiply_general,
    "GlobalAveragePool": _apply(lambda x: x.mean(list(range(2, x.ndim)), keepdim=True)),
    "GlobalMaxPool": _apply(lambda x: x.amax(list(range(2, x.ndim)), keepdim=True)),
    "GroupNormalization": _normalize_group,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _apply(lambda x: x * (x / 6 + 0.5).clamp(0, 1)),
    "Identity": _apply(lambda x: x),
    "InstanceNormalization": _normalize_instance,
    "LayerNormalization": _normalize_layer,
    "LeakyRelu": lambda call, x: torch.nn.functional.leaky_relu(x, call.read("alpha", 0.01)),
    "Log": _apply(lambda x: x.log()),
    "LogSoftmax": _log_softmax,
    "MatMul": _apply(lambda x, y: x @ y),
    "Max": _fold(lambda x, y: torch.maximum(x, y)),
    "MaxPool": _pool_largest,
    "Mean": lambda _call, *inputs: reduce(lambda x, y: x + y, inputs) / len(inputs),
    "Min": _fold(lambda x, y: torch.minimum(x, y)),
    "Mish": _apply(lambda x: torch.nn.functional.mish(x)),
    "Mul": _apply(lambda x, y: x * y),
    "Neg": _apply(lambda x: -x),
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _apply(lambda x, y: x**y),
    "RMSNormalization": _normalize_root,
    "Reciprocal": _apply(lambda x: 1 / x),
    "ReduceL2": _reduce(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keep)),
    "Relu": _apply(lambda x: x.relu()),
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": _apply(lambda x: x.sigmoid()),
    "Sin": _apply(lambda x: x.sin()),
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": _apply(lambda x: torch.nn.functional.softplus(x, threshold=40)),
    "Softsign": _apply(lambda x: x / (1 + x.abs())),
    "SpaceToDepth": _depth_from_space,
    "Split": _split,
    "Sqrt": _apply(lambda x: x.sqrt()),
    "Squeeze": _squeeze,
    "Sub": _apply(lambda x, y: x - y),
    "Sum": _fold(lambda x, y: x + y),
    "Swish": lambda call, x: x * torch.sigmoid(call.read("alpha", 1.0) * x),
    "Tanh": _apply(lambda x: x.tanh()),
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _apply(lambda which, x, y: torch.where(which, x, y)),
}
"""By ONNX's name; data that need a gradient flow through these alone."""
