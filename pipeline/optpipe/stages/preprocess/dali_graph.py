"""One step of a transform as DALI operators that reproduce the arithmetic of the model's own library.

What had to be found out, each by measurement against Pillow and torchvision:

- Pillow and torch resize horizontally, round to 8 bits, then vertically. One DALI resize keeps floats in between and
  differs in 13 % of the levels, two resizes in 1 %.
- At the border Pillow and torch (antialiased) leave out what lies outside the picture and renormalize; DALI repeats the
  edge, which differs by up to 14 levels. A zero-padded picture divided by an equally resized row of ones is the
  renormalized filter exactly.
- Sides and margins are integers computed in the graph, as the library computes them: DALI's own rounding of
  `resize_shorter` and of relative crop positions is another one.
- Pillow clips 16-bit grayscale at 255 where DALI scales it to 8 bits.
- torch's `nearest` takes the pixel at floor(x·scale), DALI the one at floor((x + ½)·scale).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Interpolation,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
    crop_start,
)
from optpipe.core.transform import resized as resized_sides
from optpipe.errors import BadInputError

# A DALI DataNode: an output of an operator in the graph. DALI ships no types.
Node = Any
Side = Any
"""A side in pixels: an int where the transform fixes it, a DataNode where it depends on the picture."""

Arithmetic = Literal["exact", "two-pass", "fused"]
"""How resizing is computed: as the module's text says; without renormalizing the border; by one DALI operator."""

SUPPORT: dict[Interpolation, int] = {"nearest": 1, "bilinear": 1, "bicubic": 2, "lanczos": 3}
"""Half the width of each filter in pixels of the smaller scale; filters that are not here DALI does not have."""
_TIE = 5e-5
"""Levels added before rounding half up: fixed-point coefficients put exact halves above, float32 may put them below."""
_NEAREST_TIE = 1e-3
"""The same for positions that fall on a pixel's edge, in pixels."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels in the graph with their sides, which stay on the CPU so that they can be arguments of operators."""

    pixels: Node
    height: Side
    width: Side
    floats: bool = False
    """Whether levels are floats, not rounded to 8 bits."""


def untranslatable(transform: Transform) -> tuple[str, ...]:
    """The steps that DALI cannot reproduce, each with the reason; empty where all can be."""
    reasons = []
    for index, step in enumerate(transform.steps):
        if isinstance(step, Resize) and step.interpolation not in SUPPORT:
            reasons.append(f"step {index + 1}, resize: DALI has no {step.interpolation} filter")
        if isinstance(step, Resize) and step.interpolation == "bicubic" and not step.antialias:
            reasons.append(f"step {index + 1}, resize: torch's bicubic without antialias uses a = -0.75, DALI a = -0.5")
    return tuple(reasons)


def require_translatable(transform: Transform) -> None:
    """Raises BadInputError that names every step DALI cannot reproduce."""
    if reasons := untranslatable(transform):
        msg = f"no DALI pipeline gives this model's pictures: {'; '.join(reasons)}"
        raise BadInputError(msg)


def decoded(encoded: Node, step: Decode, device: str, options: Mapping[str, Any], *, wide_gray: bool) -> Picture:
    """Decodes to 8 bits; `device` is `cpu` or `mixed`. `wide_gray` adds a branch that clips 16-bit grayscale PNG.

    The branch is a Python `if` on a graph node, which DALI rewrites: call this under `enable_conditionals` then.
    """
    from nvidia.dali import fn, math, types

    kinds = {"RGB": types.RGB, "BGR": types.BGR, "L": types.GRAY}
    settings = {
        "device": device,
        "output_type": kinds[step.channels],
        "adjust_orientation": step.exif,
        **(options if device == "mixed" else {}),
    }
    shape = fn.peek_image_shape(encoded, adjust_orientation=step.exif)
    if wide_gray:
        # bytes 24 and 25 of a PNG are its bit depth and its colour type, 0 for grayscale (PNG specification, 11.2.1)
        if (encoded[0] == 137) & (encoded[1] == 80) & (encoded[24] == 16) & (encoded[25] == 0):
            levels = fn.decoders.image(encoded, dtype=types.UINT16, **settings)
            pixels = fn.cast(math.min(levels, 255), dtype=types.UINT8)
        else:
            pixels = fn.decoders.image(encoded, **settings)
    else:
        pixels = fn.decoders.image(encoded, **settings)
    return Picture(pixels, shape[0], shape[1])


def resized(picture: Picture, step: Resize, arithmetic: Arithmetic) -> Picture:
    """Resizes as `step.kernel` does; see the module's text for what that takes."""
    height, width = _sides(step, picture.height, picture.width)
    if step.interpolation == "nearest":
        pixels = _nearest(picture, step, height, width)
        return Picture(pixels, height, width, picture.floats)
    from nvidia.dali import fn

    floats = step.kernel == "float"
    if arithmetic == "exact":
        across = _along(picture.pixels, 1, picture.height, picture.width, width, step, rounded=not floats)
        pixels = _along(across, 0, width, picture.height, height, step, rounded=not floats)
    else:
        filtering = _filtering(step, floats=floats)
        across = picture.pixels
        if arithmetic == "two-pass":
            across = fn.resize(across, size=_floats(picture.height, width), **filtering)
        pixels = fn.resize(across, size=_floats(height, width), **filtering)
    return Picture(pixels, height, width, floats or picture.floats)


def cropped(picture: Picture, step: CenterCrop) -> Picture:
    """Cuts or pads to a fixed size, with the start computed in integers."""
    from nvidia.dali import fn

    start = _pair(
        _crop_start(picture.height, step.height, step.rounding), _crop_start(picture.width, step.width, step.rounding)
    )
    pixels = fn.slice(
        picture.pixels,
        start=start,
        shape=[step.height, step.width],
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[float(step.fill)],
    )
    return Picture(pixels, step.height, step.width, picture.floats)


def packed(picture: Picture, rescale: Rescale | None, normalize: Normalize | None, pack: Pack, channels: int) -> Node:
    """Rescales, normalizes and reorders in one operator; 8-bit results are only reordered."""
    from nvidia.dali import fn, types

    if pack.dtype == "uint8":
        return fn.transpose(picture.pixels, perm=[2, 0, 1]) if pack.order == "CHW" else picture.pixels
    divisor, offset = (rescale.divisor, rescale.offset) if rescale else (1.0, 0.0)
    mean = normalize.mean if normalize else (0.0,)
    std = normalize.std if normalize else (1.0,)
    wide = channels if len(mean) == 1 else 1
    return fn.crop_mirror_normalize(
        picture.pixels,
        dtype=types.FLOAT if pack.dtype == "float32" else types.FLOAT16,
        output_layout=pack.order,
        mean=[(value - offset) * divisor for value in mean] * wide,
        std=[value * divisor for value in std] * wide,
    )


def applied(picture: Picture, step: Resize | CenterCrop, arithmetic: Arithmetic) -> Picture:
    """One geometric step."""
    return resized(picture, step, arithmetic) if isinstance(step, Resize) else cropped(picture, step)


def finished(picture: Picture, transform: Transform, arithmetic: Arithmetic) -> Node:
    """Everything after decoding."""
    for step in transform.geometry:
        picture = applied(picture, step, arithmetic)
    return packed(picture, transform.rescale, transform.normalize, transform.pack, transform.channels)


def _sides(step: Resize, height: Side, width: Side) -> tuple[Side, Side]:
    """`core.transform.resized` on graph nodes."""
    if step.fit == "exact":
        return step.size[0], step.size[1]
    if isinstance(height, int) and isinstance(width, int):
        return resized_sides(step, height, width)
    from nvidia.dali import math

    wide = width > height
    short, long, side = math.min(height, width), math.max(height, width), step.size[0]
    new_short, new_long = (side, side * long // short) if step.fit == "short" else (side * short // long, side)
    if step.max_size is not None:
        over = new_long > step.max_size
        new_short = _either(over, step.max_size * new_short // new_long, new_short)
        new_long = math.min(new_long, step.max_size)
    return _either(wide, new_short, new_long), _either(wide, new_long, new_short)


def _either(condition: Node, yes: Side, no: Side) -> Node:
    return condition * yes + (condition == 0) * no


def _crop_start(length: Side, wanted: int, rounding: str) -> Side:
    """`core.transform.crop_start` on graph nodes."""
    if isinstance(length, int):
        return crop_start(length, wanted, rounding)  # type: ignore[arg-type]
    from nvidia.dali import math

    margin = math.max(length - wanted, 0)
    missing = math.max(wanted - length, 0)
    half, odd = margin // 2, margin & 1
    up = odd * (half & 1) if rounding == "half-even" else 0
    return half + up - missing // 2


def _along(pixels: Node, axis: int, other: Side, length: Side, wanted: Side, step: Resize, *, rounded: bool) -> Node:
    """Resizes along one axis, with the filter renormalized at the border where `step` antialiases."""
    from nvidia.dali import fn, math, types

    filtering = _filtering(step, floats=True)
    levels: Node
    if not step.antialias:
        levels = fn.resize(pixels, size=_in_order(axis, wanted, other), **filtering)
    else:
        # beyond the filter's reach in input pixels, and three more for its rounding
        reach = SUPPORT[step.interpolation] * length // wanted + SUPPORT[step.interpolation] + 3
        levels = _padded_resize(pixels, axis, length, other, wanted, reach, filtering)
        ones = fn.slice(
            types.Constant(1.0, dtype=types.FLOAT, shape=[1, 1, 1], layout="HWC"),
            start=[0],
            shape=_one(length),
            axes=[axis],
            out_of_bounds_policy="edge",
        )
        inside = _padded_resize(ones, axis, length, 1, wanted, reach, filtering)
        levels = levels / (inside.gpu() if pixels.device == "gpu" else inside)
    return fn.cast(math.floor(levels + (0.5 + _TIE)), dtype=types.UINT8) if rounded else levels


def _filtering(step: Resize, *, floats: bool) -> dict[str, Any]:
    from nvidia.dali import types

    filters = {
        "bilinear": types.INTERP_LINEAR,
        "bicubic": types.INTERP_CUBIC,
        "lanczos": types.INTERP_LANCZOS3,
    }
    return {
        "interp_type": filters[step.interpolation],
        "antialias": step.antialias,
        "subpixel_scale": False,
        "mode": "stretch",
        **({"dtype": types.FLOAT} if floats else {}),
    }


def _padded_resize(
    pixels: Node, axis: int, length: Side, other: Side, wanted: Side, reach: Side, filtering: Mapping[str, Any]
) -> Node:
    """Resizes along `axis` as if zeros lay beyond the picture."""
    from nvidia.dali import fn

    padded = fn.slice(
        pixels, start=_one(-reach), shape=_one(length + 2 * reach), axes=[axis], out_of_bounds_policy="pad"
    )
    return fn.resize(
        padded,
        size=_in_order(axis, wanted, other),
        roi_start=_in_order(axis, reach, 0),
        roi_end=_in_order(axis, reach + length, other),
        **filtering,
    )


def _nearest(picture: Picture, step: Resize, height: Side, width: Side) -> Node:
    """Pillow takes the pixel at floor((x + ½)·scale), as DALI does; torch that at floor(x·scale)."""
    from nvidia.dali import fn, types

    filtering = {"interp_type": types.INTERP_NN, "subpixel_scale": False, "mode": "stretch"}
    size = _floats(height, width)
    if step.kernel == "pillow":
        return fn.resize(picture.pixels, size=size, **filtering)
    up = _NEAREST_TIE - 0.5 * _scale(picture.height, height)
    left = _NEAREST_TIE - 0.5 * _scale(picture.width, width)
    start = _floats(up, left)
    end = _floats(up + picture.height, left + picture.width)
    return fn.resize(picture.pixels, size=size, roi_start=start, roi_end=end, **filtering)


def _scale(length: Side, wanted: Side) -> Side:
    return length * 1.0 / wanted


def _in_order(axis: int, along: Side, across: Side) -> Any:
    return _floats(along, across) if axis == 0 else _floats(across, along)


def _one(side: Side) -> Any:
    """One integer side as the argument of an operator that takes a list."""
    from nvidia.dali import fn, types

    return [side] if isinstance(side, int) else fn.reshape(fn.cast(side, dtype=types.INT32), shape=[1])


def _pair(first: Side, second: Side) -> Any:
    """Two integer sides as the argument of an operator."""
    from nvidia.dali import types

    return _stacked(first, second, types.INT32)


def _floats(first: Side, second: Side) -> Any:
    """Two sides or positions as floats, as `resize` takes them."""
    from nvidia.dali import types

    return _stacked(first, second, types.FLOAT)


def _stacked(first: Side, second: Side, dtype: Any) -> Any:
    from nvidia.dali import fn, types

    fixed = isinstance(first, int | float) and isinstance(second, int | float)
    if fixed:
        return [float(first), float(second)] if dtype == types.FLOAT else [int(first), int(second)]
    return fn.stack(
        *[
            types.Constant(float(side) if dtype == types.FLOAT else int(side), dtype=dtype, shape=[])
            if isinstance(side, int | float)
            else fn.cast(side, dtype=dtype)
            for side in (first, second)
        ]
    )
