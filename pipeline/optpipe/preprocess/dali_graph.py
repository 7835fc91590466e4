"""Each step of a transform as DALI operators that reproduce the arithmetic of the model's library.

Measured against Pillow and torchvision:

- Pillow and torch resize horizontally, round to 8 bits, then vertically. One DALI resize keeps floats in between and
  differs in 13% of the levels, two resizes in 1%. Pillow 13 begins vertically if an image loses far more rows than
  columns (one taller than 2:1, made smaller); the other order differs in 27% of the levels, by up to 13.
- At the border Pillow and torch (antialiased) ignore the pixels outside the image and renormalize; DALI repeats the
  edge, which differs by up to 14 levels. A zero-padded image divided by an equally resized row of ones is exactly the
  renormalized filter. If a crop cuts that border off, the two resizes suffice.
- Sides and margins are integers computed in the graph, as the library computes them: DALI rounds `resize_shorter` and
  relative crop positions differently.
- torch's `nearest` takes the pixel at floor(x·scale), DALI the one at floor((x + ½)·scale). torch computes that in
  float32, which puts an exact tie one pixel lower in 2% of all pairs of sides up to 400; DALI's column or row is exact.
- On a GPU the many small operators on sides, not the kernels, are the limit: each costs 60 to 200 µs per batch on the CPU.
  So both sides go through arithmetic as one vector, and nothing is computed that the transform already fixes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optpipe.core import LazyModule
from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Interpolation, Resize, Transform, compute_crop_start
from optpipe.core.transform import compute_resized_sides as resized_sides

fn, math, types = map(LazyModule, ("nvidia.dali.fn", "nvidia.dali.math", "nvidia.dali.types"))

# A DALI DataNode: an output of an operator in the graph. DALI ships no types.
Node = Any
Sides = Any
"""Height and width in pixels: a tuple if the transform fixes them, otherwise a node with a vector of two int32."""
Arguments = Mapping[str, Any]
SUPPORT: dict[Interpolation, int] = {"nearest": 1, "bilinear": 1, "bicubic": 2, "lanczos": 3}
"""Half the width of each filter in pixels of the smaller scale; DALI has no other filters."""
_TIE = 5e-5
"""Levels added before rounding half up: fixed-point coefficients put exact halves above, float32 may put them below."""
PILLOW_CHOOSES = 13
"""The first version of Pillow that chooses which side it resizes first."""
RESIZE_MINIBATCH = 128
"""Images per kernel of a resize, instead of DALI's 32: next to a model every launch waits for the GPU."""
_NEAREST_TIE = 1e-3
"""The same as `_TIE`, in pixels, for positions on a pixel's edge."""


@dataclass(frozen=True, slots=True)
class GraphImage:
    """Pixels in the graph. Their sides stay on the CPU, since operators take them as arguments."""

    pixels: Node
    sides: Sides
    at_least: int = 1
    """Lower bound of both sides, as far as the transform tells."""
    floats: bool = False
    """Whether levels are floats, not rounded to 8 bits."""


def require_translatable(transform: Transform) -> None:
    """Raises BadInputError with every step that DALI cannot reproduce."""
    reasons = []
    for number, step in enumerate(transform.steps, 1):
        if isinstance(step, Resize) and step.interpolation not in SUPPORT:
            reasons.append(f"step {number}, resize: DALI has no {step.interpolation} filter")
        if isinstance(step, Resize) and step.interpolation == "bicubic" and not step.antialias:
            why = "torch's bicubic without antialias uses a = -0.75, DALI uses a = -0.5"
            reasons.append(f"step {number}, resize: {why}")
    if reasons:
        raise BadInputError(
            f"DALI cannot reproduce this model's preprocessing: {'; '.join(reasons)}"
        )


def resize_image(image: GraphImage, step: Resize, *, border_hidden: bool = False) -> GraphImage:
    """Resizes as `step.kernel` does; see the module's docstring."""
    new = _compute_new_sides(step, image.sides)
    floats = step.kernel == "float"
    if step.interpolation == "nearest":
        pixels = _resize_nearest(image, step, new)
    elif step.antialias and not border_hidden:
        first, second = _choose_pass_order(image.sides, new, step)
        half, now = _resize_renormalized(
            image.pixels, first, second, image.sides, new, step, rounded=not floats
        )
        pixels, _ = _resize_renormalized(half, second, first, now, new, step, rounded=not floats)
    else:
        filtering = _get_filtering(step, floats=floats)
        first, _ = _choose_pass_order(image.sides, new, step)
        pixels = fn.resize(
            image.pixels, size=_as_floats(_node(new) * first), **filtering
        )  # a side of 0 stays as it is
        pixels = fn.resize(pixels, size=_as_floats(new), **filtering)
    low = min(step.size) if step.fit != "long" and step.max_size is None else 1
    return GraphImage(pixels, new, low, floats or image.floats)


def crop_image(image: GraphImage, step: CenterCrop) -> GraphImage:
    pixels = fn.slice(
        image.pixels,
        start=_compute_crop_start(image, step),
        shape=[step.height, step.width],
        axes=[0, 1],
        out_of_bounds_policy="pad",
        fill_values=[float(step.fill)],
    )
    return GraphImage(pixels, (step.height, step.width), min(step.height, step.width), image.floats)


def pack_image(image: GraphImage, transform: Transform, crop: CenterCrop | None = None) -> Node:
    """Cuts `crop` out, rescales, normalizes and reorders in one operator; 8-bit results are only reordered."""
    pack, rescale, normalize = transform.pack, transform.rescale, transform.normalize
    if pack.dtype == "uint8":
        return fn.transpose(image.pixels, perm=[2, 0, 1]) if pack.order == "CHW" else image.pixels
    divisor, offset = (rescale.divisor, rescale.offset) if rescale else (1.0, 0.0)
    mean = normalize.mean if normalize else (0.0,)
    std = normalize.std if normalize else (1.0,)
    wide = transform.channels if len(mean) == 1 else 1
    return fn.crop_mirror_normalize(
        image.pixels,
        dtype=types.FLOAT if pack.dtype == "float32" else types.FLOAT16,
        output_layout=pack.order,
        mean=[(value - offset) * divisor for value in mean] * wide,
        std=[value * divisor for value in std] * wide,
        **(_get_crop_window(image, crop) if crop else {}),
    )


def _get_crop_window(image: GraphImage, crop: CenterCrop) -> Arguments:
    """`crop` as an operator's arguments: the start as a share of the margin, which the operator rounds back."""
    start, size = _compute_crop_start(image, crop), [float(crop.height), float(crop.width)]
    if isinstance(image.sides, tuple):
        # DALI's autograph runs this, and its zip has no `strict`
        margins = [side - cut for side, cut in zip(image.sides, (crop.height, crop.width))]  # noqa: B905
        along = [offset / max(margin, 1) for offset, margin in zip(start, margins)]  # noqa: B905
    else:
        margin = math.max(image.sides - _vector(crop.height, crop.width), 1)
        along = _as_floats(start) / _as_floats(margin)
    return {"crop": size, "crop_pos_y": along[0], "crop_pos_x": along[1], "rounding": "round"}


def apply_each_step(image: GraphImage, transform: Transform) -> Iterator[GraphImage]:
    geometry = transform.geometry
    for index, step in enumerate(geometry):
        if isinstance(step, Resize):
            after = geometry[index + 1] if index + 1 < len(geometry) else None
            image = resize_image(image, step, border_hidden=is_border_hidden(step, after))
        else:
            image = crop_image(image, step)
        yield image


def process_image(image: GraphImage, transform: Transform) -> Node:
    last = image
    steps = apply_each_step(image, transform)
    for _ in transform.geometry[:-1]:
        last = next(steps)
    crop = find_crop_to_pack(transform, last)
    return pack_image(last, transform, crop) if crop else pack_image(next(steps, last), transform)


def find_crop_to_pack(transform: Transform, before: GraphImage) -> CenterCrop | None:
    """The last step if it is a crop that the normalizing operator can do too, which saves a pass over the pixels.

    That operator makes floats, and does not pad as `crop_image` does.
    """
    last = transform.geometry[-1] if transform.geometry else None
    if not isinstance(last, CenterCrop) or transform.pack.dtype == "uint8":
        return None
    return last if before.at_least >= max(last.height, last.width) else None


def is_border_hidden(step: Resize, after: Resize | CenterCrop | None) -> bool:
    """Whether the next crop cuts off the pixels that the border's treatment affects.

    Scaling down, the filter crosses the border in the outermost 1 pixel (bilinear) or 2 (bicubic). Scaling up, repeating
    the edge equals renormalizing for bilinear; bicubic differs in 2 pixels times the scale, so with a margin of 4 an image
    that is scaled up more than three times keeps up to 8 levels at its edge.
    """
    margin = {"bilinear": 1, "bicubic": 4}.get(step.interpolation)
    if not isinstance(after, CenterCrop) or margin is None or step.fit == "long" or step.max_size:
        return False
    sides = ((step.size[0], after.height), (step.size[-1], after.width))
    return all(compute_crop_start(side, cut, "floor") >= margin for side, cut in sides)


def _compute_new_sides(step: Resize, sides: Sides) -> Sides:
    """`compute_resized_sides` on a vector of both sides: size · sides // (the shorter or the longer)."""
    if step.fit == "exact":
        return step.size[0], step.size[1]
    if isinstance(sides, tuple):
        return resized_sides(step, *sides)
    measured = fn.reductions.min(sides) if step.fit == "short" else fn.reductions.max(sides)
    new = sides * step.size[0] // measured
    if step.max_size is not None:
        long = fn.reductions.max(new)
        limited = step.max_size * new // long
        over = long > step.max_size
        new = over * limited + (over == 0) * new
    return math.max(new, 1)


def _compute_crop_start(image: GraphImage, step: CenterCrop) -> Any:
    """`compute_crop_start` on a vector of both sides."""
    if isinstance(image.sides, tuple):
        wanted = (step.height, step.width)
        return [
            compute_crop_start(side, cut, step.rounding)
            for side, cut in zip(image.sides, wanted, strict=True)
        ]
    margin = image.sides - _vector(step.height, step.width)
    missing = None
    if image.at_least < max(step.height, step.width):
        missing = math.max(0 - margin, 0) // 2
        margin = math.max(margin, 0)
    # half of an odd margin goes to even: add one before halving where the lower half is odd
    start = (margin + ((margin // 2) & 1)) // 2 if step.rounding == "half-even" else margin // 2
    return start if missing is None else start - missing


def _vector(first: float, second: float) -> Any:
    """Two numbers as a constant operand, int32 if both are integers, otherwise float32."""
    whole = isinstance(first, int) and isinstance(second, int)
    return np.array([first, second], dtype=np.int32 if whole else np.float32)


def _choose_pass_order(sides: Sides, new: Sides, step: Resize) -> tuple[Any, Any]:
    """The axes of the first and the second pass, (1, 0) for the vertical and (0, 1) for the horizontal one.

    Pillow resizes horizontally first; since version 13 vertically if that removes more than twice as many rows as columns
    (python-pillow/Pillow#9549). torch always resizes horizontally first.
    """
    from PIL import __version__

    horizontal, vertical = _vector(0, 1), _vector(1, 0)
    if step.kernel != "pillow" or int(__version__.split(".")[0]) < PILLOW_CHOOSES:
        return horizontal, vertical
    if isinstance(sides, tuple) and isinstance(new, tuple):
        rows, columns = (max(before - after, 0) for before, after in zip(sides, new))  # noqa: B905
        return (vertical, horizontal) if rows > 2 * columns else (horizontal, vertical)
    weighed = math.max(_node(sides) - _node(new), 0) * _vector(1, -2)
    tall = fn.cast(fn.reductions.sum(weighed) > 0, dtype=types.INT32)
    first = tall * _vector(1, -1) + horizontal
    return first, 1 - first


def _as_floats(sides: Sides) -> Any:
    """Sides in the type that operators take for sizes and positions."""
    return (
        [float(side) for side in sides]
        if isinstance(sides, tuple)
        else fn.cast(sides, dtype=types.FLOAT)
    )


def _get_filtering(step: Resize, *, floats: bool) -> Arguments:
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
        "minibatch_size": RESIZE_MINIBATCH,
        **({"dtype": types.FLOAT} if floats else {}),
    }


def _resize_renormalized(
    pixels: Node, along: Any, across: Any, sides: Sides, new: Sides, step: Resize, *, rounded: bool
) -> tuple[Node, Sides]:
    """Resizes along one axis with the filter renormalized at the border; also returns the new sides."""
    now, then = _node(sides), _node(new)
    # beyond the filter's reach in input pixels, and three more for its rounding; nothing across
    support = SUPPORT[step.interpolation]
    reach = (support * now // then + (support + 3)) * along
    after = now * across + then * along
    filtering = _get_filtering(step, floats=True)
    levels = _resize_padded(pixels, now, after, reach, filtering)
    row, new_row = (extent * along + across for extent in (now, after))
    pixel = types.Constant(1.0, dtype=types.FLOAT, shape=[1, 1, 1], layout="HWC")
    ones = fn.slice(pixel, start=[0, 0], shape=row, axes=[0, 1], out_of_bounds_policy="edge")
    inside = _resize_padded(ones, row, new_row, reach, filtering)
    levels = levels / (inside.gpu() if pixels.device == "gpu" else inside)
    if rounded:
        levels = fn.cast(math.floor(levels + (0.5 + _TIE)), dtype=types.UINT8)
    return levels, after


def _resize_padded(
    pixels: Node, sides: Node, new: Node, reach: Node, filtering: Mapping[str, Any]
) -> Node:
    """Resizes as if zeros lay outside the image."""
    padded = fn.slice(
        pixels, start=0 - reach, shape=sides + 2 * reach, axes=[0, 1], out_of_bounds_policy="pad"
    )
    start = _as_floats(reach)
    return fn.resize(
        padded,
        size=_as_floats(new),
        roi_start=start,
        roi_end=start + _as_floats(sides),
        **filtering,
    )


def _node(sides: Sides) -> Node:
    return types.Constant(_vector(*sides)) if isinstance(sides, tuple) else sides


def _resize_nearest(image: GraphImage, step: Resize, new: Sides) -> Node:
    """Pillow takes the pixel at floor((x + ½)·scale), as DALI does; torch the one at floor(x·scale)."""
    filtering = {"interp_type": types.INTERP_NN, "subpixel_scale": False, "mode": "stretch"}
    size = _as_floats(new)
    if step.kernel == "pillow":
        return fn.resize(image.pixels, size=size, **filtering)
    length = fn.cast(_node(image.sides), dtype=types.FLOAT)
    start = _NEAREST_TIE - 0.5 * (length / fn.cast(_node(new), dtype=types.FLOAT))
    return fn.resize(image.pixels, size=size, roi_start=start, roi_end=start + length, **filtering)
