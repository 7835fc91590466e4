"""ONNX operators that stay in floating point, computed by torch: FP16 on a GPU; on a CPU, in tests, FP32."""

from collections.abc import Callable, Mapping
from functools import reduce
from math import isclose
from typing import Any

from optpipe.backends.torch_int8.movements import MOVEMENTS, read_axes, refuse

_Attributes = Mapping[str, Any]
_Operator = Callable[[tuple[Any, ...], _Attributes], Any]


def compute_operator(operator: str, inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    """The output of one operator: torch tensors in, channels first by index, None for an optional one; and one out."""
    return FLOATING[operator](inputs, attributes)


def _convolve(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, weight, *bias = inputs
    axes = weight.dim() - 2
    strides, dilations = (tuple(attributes.get(name, [1] * axes)) for name in ("strides", "dilations"))
    pads = _find_pads(given, tuple(weight.shape[2:]), attributes)
    if pads[:axes] != pads[axes:]:
        given, pads = _pad_zeros(given, pads), [0] * len(pads)
    compute = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[axes - 1]
    groups = attributes.get("group", 1)
    return compute(given, weight, bias[0] if bias else None, strides, tuple(pads[:axes]), dilations, groups)


def _find_pads(given: Any, kernel: tuple[int, ...], attributes: _Attributes) -> list[int]:
    """What is put before each axis, then after each; source: ONNX, "Conv", `auto_pad`."""
    axes, kind = len(kernel), attributes.get("auto_pad", b"NOTSET")
    if kind in (b"NOTSET", b"VALID"):
        return list(attributes.get("pads", [0] * 2 * axes))
    strides, dilations = (attributes.get(name, [1] * axes) for name in ("strides", "dilations"))
    before, after = [], []
    for size, width, stride, dilation in zip(given.shape[2:], kernel, strides, dilations, strict=True):
        whole = max((-(-size // stride) - 1) * stride + dilation * (width - 1) + 1 - size, 0)
        less, more = whole // 2, whole - whole // 2
        before.append(less if kind == b"SAME_UPPER" else more)
        after.append(more if kind == b"SAME_UPPER" else less)
    return before + after


def _pad_zeros(given: Any, pads: list[int], value: float = 0.0) -> Any:
    import torch

    axes = len(pads) // 2
    order = [each for axis in reversed(range(axes)) for each in (pads[axis], pads[axes + axis])]
    return torch.nn.functional.pad(given, order, value=value)


def _convolve_transposed(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, weight, *bias = inputs
    axes = weight.dim() - 2
    strides, dilations = (tuple(attributes.get(name, [1] * axes)) for name in ("strides", "dilations"))
    pads, more = list(attributes.get("pads", [0] * 2 * axes)), tuple(attributes.get("output_padding", [0] * axes))
    if pads[:axes] != pads[axes:] or attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in attributes:
        raise refuse("transposed convolutions with other padding on one side than on the other")
    compute = (torch.nn.functional.conv_transpose1d, torch.nn.functional.conv_transpose2d)[axes - 1]
    groups = attributes.get("group", 1)
    return compute(given, weight, bias[0] if bias else None, strides, tuple(pads[:axes]), more, groups, dilations)


def _pool(inputs: tuple[Any, ...], attributes: _Attributes, *, largest: bool) -> Any:
    import torch

    given, kernel = inputs[0], tuple(attributes["kernel_shape"])
    axes, pads = len(kernel), _find_pads(given, kernel, attributes)
    counted = bool(attributes.get("count_include_pad", 0))
    if pads[:axes] != pads[axes:]:
        if not (largest or counted):  # zeros have no share in a mean
            plain = {**attributes, "count_include_pad": 1}
            total, share = (_pool((each,), plain, largest=False) for each in (given, given.new_ones(given.shape)))
            return total / share
        given, pads = _pad_zeros(given, pads, -torch.inf if largest else 0.0), [0] * len(pads)
    settings = {
        "kernel_size": kernel,
        "stride": tuple(attributes.get("strides", [1] * axes)),
        "padding": tuple(pads[:axes]),
        "ceil_mode": bool(attributes.get("ceil_mode", 0)),
    }
    if largest:
        compute = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d)[axes - 1]
        return compute(given, dilation=tuple(attributes.get("dilations", [1] * axes)), **settings)
    average = (torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d)[axes - 1]
    return average(given, count_include_pad=counted, **settings)


def _reduce(name: str) -> _Operator:
    """A reduction by torch's function `name`, over the given axes or all."""

    def compute(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
        import torch

        axes = read_axes(inputs, attributes)
        if axes is None and attributes.get("noop_with_empty_axes", 0):
            return inputs[0]
        over = tuple(range(inputs[0].dim())) if axes is None else axes
        return getattr(torch, name)(inputs[0], dim=over, keepdim=bool(attributes.get("keepdims", 1)))

    return compute


def _gemm(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    left = inputs[0].t() if attributes.get("transA", 0) else inputs[0]
    right = inputs[1].t() if attributes.get("transB", 0) else inputs[1]
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if len(inputs) > 2:
        return torch.addmm(inputs[2], left, right, beta=beta, alpha=alpha)
    return left @ right if alpha == 1.0 else alpha * (left @ right)


def _clip(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    bounds = [None if each is None else float(each) for each in (*inputs[1:3], *[None] * (3 - len(inputs)))]
    low, high = attributes.get("min", bounds[0]), attributes.get("max", bounds[1])
    return inputs[0].clamp(low, high)


def _hard_sigmoid(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    if isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:  # torch's own, in one kernel
        return torch.nn.functional.hardsigmoid(inputs[0])
    return (inputs[0] * alpha + beta).clamp(0, 1)


def _swish(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    alpha = attributes.get("alpha", 1.0)
    return torch.nn.functional.silu(inputs[0]) if alpha == 1.0 else inputs[0] * (alpha * inputs[0]).sigmoid()


def _scale_and_shift(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    """A BatchNormalization lowered to its scale and shift, (channels,) each."""
    import torch

    given, scale, shift = inputs
    per_channel = (-1, *[1] * (given.dim() - 2))
    return torch.addcmul(shift.view(per_channel), given, scale.view(per_channel))


def _normalize_layer(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, scale, bias = (*inputs, None, None)[:3]
    axis = attributes.get("axis", -1) % given.dim()
    return torch.nn.functional.layer_norm(given, given.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _normalize_instances(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    given, scale, bias = inputs
    return torch.nn.functional.instance_norm(given, weight=scale, bias=bias, eps=attributes.get("epsilon", 1e-5))


def _gelu(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    kind = attributes.get("approximate", b"none").decode()
    return torch.nn.functional.gelu(inputs[0], approximate=kind)


def _resize(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    """Of images by torch's rules, which are ONNX's for these coordinates (ONNX, "Resize")."""
    import torch

    given, _, scales, sizes = (*inputs, None, None, None)[:4]
    mode, where = attributes.get("mode", b"nearest"), attributes.get("coordinate_transformation_mode", b"half_pixel")
    factors = [1.0] * 4 if scales is None or not scales.numel() else [float(each) for each in scales]
    wanted = (
        [int(each) for each in sizes]
        if sizes is not None
        else [int(a * b) for a, b in zip(given.shape, factors, strict=True)]
    )
    known = (mode, where) in _RESIZES and attributes.get("nearest_mode", b"floor") in (b"floor", b"round_prefer_floor")
    if given.dim() != 4 or not known or attributes.get("antialias", 0) or wanted[:2] != list(given.shape[:2]):
        raise refuse(f"Resize with mode {mode.decode()} and {where.decode()} coordinates")
    name, corners = _RESIZES[mode, where]
    if (
        mode == b"nearest"
        and where != b"asymmetric"
        and any(b % a for a, b in zip(given.shape[2:], wanted[2:], strict=True))
    ):
        name = "nearest-exact"
    return torch.nn.functional.interpolate(given, size=wanted[2:], mode=name, align_corners=corners)


_RESIZES: dict[tuple[bytes, bytes], tuple[str, bool | None]] = {
    (b"nearest", b"asymmetric"): ("nearest", None),
    (b"nearest", b"half_pixel"): ("nearest", None),
    (b"nearest", b"pytorch_half_pixel"): ("nearest", None),
    (b"linear", b"half_pixel"): ("bilinear", False),
    (b"linear", b"pytorch_half_pixel"): ("bilinear", False),
    (b"linear", b"align_corners"): ("bilinear", True),
    (b"cubic", b"half_pixel"): ("bicubic", False),
    (b"cubic", b"pytorch_half_pixel"): ("bicubic", False),
    (b"cubic", b"align_corners"): ("bicubic", True),
}


def _pairwise(name: str) -> _Operator:
    """torch's function `name`, over two or more operands."""

    def compute(inputs: tuple[Any, ...], _: _Attributes) -> Any:
        import torch

        return reduce(getattr(torch, name), inputs)

    return compute


def _unary(name: str) -> _Operator:
    """torch's function `name` of one operand."""

    def compute(inputs: tuple[Any, ...], _: _Attributes) -> Any:
        import torch

        return getattr(torch, name)(inputs[0])

    return compute


def _functional(name: str) -> _Operator:
    """`torch.nn.functional`'s function `name` of one operand."""

    def compute(inputs: tuple[Any, ...], _: _Attributes) -> Any:
        import torch

        return getattr(torch.nn.functional, name)(inputs[0])

    return compute


def _divide(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    """Whole numbers toward zero."""
    import torch

    return torch.div(*inputs, rounding_mode=None if inputs[0].is_floating_point() else "trunc")


def _leak(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.nn.functional.leaky_relu(inputs[0], attributes.get("alpha", 0.01))


def _elu(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.nn.functional.elu(inputs[0], attributes.get("alpha", 1.0))


def _prelu(inputs: tuple[Any, ...], _: _Attributes) -> Any:
    given, slope = inputs
    return given.clamp(min=0) + slope * given.clamp(max=0)


def _einsum(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    import torch

    return torch.einsum(attributes["equation"].decode(), *inputs)


def _sum_so_far(inputs: tuple[Any, ...], attributes: _Attributes) -> Any:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise refuse("CumSum that is exclusive or runs backward")
    return inputs[0].cumsum(int(inputs[1]))


_UNARY = {
    "Abs": "abs", "Ceil": "ceil", "Cos": "cos", "Erf": "erf", "Exp": "exp", "Floor": "floor", "IsNaN": "isnan", "Log": "log",
    "Neg": "neg", "Not": "logical_not", "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid",
    "Sign": "sign", "Sin": "sin", "Sqrt": "sqrt", "Tanh": "tanh",
}  # fmt: skip
_PAIRWISE = {
    "Add": "add", "And": "logical_and", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le",
    "MatMul": "matmul", "Max": "maximum", "Min": "minimum", "Mul": "mul", "Or": "logical_or", "Pow": "pow", "Sub": "sub", "Sum": "add",
}  # fmt: skip
_REDUCTIONS = {"ReduceL2": "norm", "ReduceMax": "amax", "ReduceMean": "mean", "ReduceMin": "amin", "ReduceSum": "sum"}
FLOATING: dict[str, _Operator] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _pairwise(function) for name, function in _PAIRWISE.items()},
    **{name: _reduce(function) for name, function in _REDUCTIONS.items()},
    **MOVEMENTS,
    "AveragePool": lambda inputs, attributes: _pool(inputs, attributes, largest=False),
    "BatchNormalization": _scale_and_shift,
    "Clip": _clip,
    "Conv": _convolve,
    "ConvTranspose": _convolve_transposed,
    "CumSum": _sum_so_far,
    "Div": _divide,
    "Einsum": _einsum,
    "Elu": _elu,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda inputs, _: inputs[0].mean(dim=tuple(range(2, inputs[0].dim())), keepdim=True),
    "GlobalMaxPool": lambda inputs, _: inputs[0].amax(dim=tuple(range(2, inputs[0].dim())), keepdim=True),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _functional("hardswish"),
    "InstanceNormalization": _normalize_instances,
    "LayerNormalization": _normalize_layer,
    "LeakyRelu": _leak,
    "MaxPool": lambda inputs, attributes: _pool(inputs, attributes, largest=True),
    "LogSoftmax": lambda inputs, attributes: inputs[0].log_softmax(attributes.get("axis", -1)),
    "Mish": _functional("mish"),
    "PRelu": _prelu,
    "Resize": _resize,
    "Softmax": lambda inputs, attributes: inputs[0].softmax(attributes.get("axis", -1)),
    "Softplus": _functional("softplus"),
    "Swish": _swish,
}
