"""A model's preprocessing as values, which the CPU reference executes and a DALI pipeline is derived from.

A transform is written in model cards and manifests as a list of tables, one per step:

    [[preprocessing.steps]]
    step = "resize"
    size = [256]

Fields that are left out have the defaults below, which are those of torchvision's presets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_value
from optpipe.core.records import plain_from_record, record_from_plain

Channels = Literal["RGB", "BGR", "L"]
Fit = Literal["short", "long", "exact"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
ResizeKernel = Literal["pillow", "torch", "float"]
Rounding = Literal["half-even", "floor"]
Order = Literal["CHW", "HWC"]
Dtype = Literal["float32", "float16", "uint8"]


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="step"):
    """One table of `preprocessing.steps`."""


class Decode(_Step, frozen=True, tag="decode"):
    """Decodes a file into 8-bit pixels. `exif` turns it upright, as transformers' loader does and others do not."""

    channels: Channels = "RGB"
    exif: bool = False


class Resize(_Step, frozen=True, tag="resize"):
    """Scales to `size`: one side for `short` and `long`, height and width for `exact`; other sides round down.

    `max_size` limits the long side of a `short` fit. `kernel` selects the arithmetic: Pillow's, torch's on uint8
    tensors, or torch's on float tensors, which does not round to 8 bits. With `antialias` they differ by a few levels
    at most.
    """

    size: tuple[int, ...]
    fit: Fit = "short"
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    max_size: int | None = None
    kernel: ResizeKernel = "pillow"

    def __post_init__(self) -> None:
        sides = 2 if self.fit == "exact" else 1
        if len(self.size) != sides or min(self.size) < 1:
            raise BadInputError(
                f"resize: fit {self.fit!r} requires {sides} positive size value(s); got {list(self.size)}"
            )
        if self.kernel == "pillow" and not self.antialias:
            raise BadInputError(
                "resize: Pillow always antialiases; antialias = false requires kernel 'torch' or 'float'"
            )
        if self.max_size is not None and (self.fit != "short" or self.max_size <= self.size[0]):
            raise BadInputError(
                f"resize: max_size {self.max_size} requires fit 'short' and a smaller size; got {self.fit!r} {self.size}"
            )


class CenterCrop(_Step, frozen=True, tag="center_crop"):
    """Crops `height` × `width` from the center; a smaller image is padded with `fill` first.

    `rounding` places an odd margin: torchvision rounds half to even, transformers rounds down.
    """

    height: int
    width: int
    rounding: Rounding = "half-even"
    fill: int = 0

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or not 0 <= self.fill <= 255:
            raise BadInputError(
                f"center_crop: {self.height}×{self.width} with fill {self.fill} is not a valid crop of an 8-bit image"
            )


class Rescale(_Step, frozen=True, tag="rescale"):
    """Maps 8-bit levels to `value / divisor + offset` in float32."""

    divisor: float = 255.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.divisor > 0:
            raise BadInputError(f"rescale: divisor must be positive, got {self.divisor}")


class Normalize(_Step, frozen=True, tag="normalize"):
    """Maps each channel to `(value - mean) / std` in float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            len(self.mean) != len(self.std)
            or len(self.mean) not in (1, 3)
            or not all(std > 0 for std in self.std)
        ):
            raise BadInputError(
                f"normalize: expected 1 or 3 means and the same number of positive stds; got mean {self.mean}, std {self.std}"
            )


class Pack(_Step, frozen=True, tag="pack"):
    """Axis order and type of the tensor that the model takes."""

    order: Order = "CHW"
    dtype: Dtype = "float32"


TransformStep = Decode | Resize | CenterCrop | Rescale | Normalize | Pack
_FORM = "steps are decode, resize, center_crop, rescale, normalize and pack; models/README.md has their fields"
_RANK = {Decode: 0, Resize: 1, CenterCrop: 1, Rescale: 2, Normalize: 3, Pack: 4}


@dataclass(frozen=True, slots=True)
class Transform:
    """Decode, any resizes and crops, at most one rescale and one normalize, pack. Raises BadInputError for another order."""

    steps: tuple[TransformStep, ...]

    def __post_init__(self) -> None:
        names = [get_step_name(step) for step in self.steps]
        ranks = [_RANK[type(step)] for step in self.steps]
        alone = all(ranks.count(rank) == 1 for rank in (0, 4)) and all(
            ranks.count(rank) <= 1 for rank in (2, 3)
        )
        if not alone or ranks != sorted(ranks):
            raise BadInputError(
                "a transform must be decode, any resize and center_crop, one rescale, one normalize, pack, in this order;"
                f" got {', '.join(names) or 'no step'}"
            )
        normalize = self.normalize
        if normalize and len(normalize.mean) not in (1, self.channels):
            raise BadInputError(
                f"normalize: {len(normalize.mean)} means for {self.channels} channel(s)"
            )
        if self.pack.dtype == "uint8" and (self.rescale or normalize):
            raise BadInputError(f"pack: uint8 cannot hold the result of {names[-2]}; use float32")

    @property
    def decode(self) -> Decode:
        return next(step for step in self.steps if isinstance(step, Decode))

    @property
    def normalize(self) -> Normalize | None:
        return next((step for step in self.steps if isinstance(step, Normalize)), None)

    @property
    def rescale(self) -> Rescale | None:
        return next((step for step in self.steps if isinstance(step, Rescale)), None)

    @property
    def pack(self) -> Pack:
        return next(step for step in self.steps if isinstance(step, Pack))

    @property
    def geometry(self) -> tuple[Resize | CenterCrop, ...]:
        return tuple(step for step in self.steps if isinstance(step, Resize | CenterCrop))

    @property
    def channels(self) -> int:
        return 1 if self.decode.channels == "L" else 3

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of every result; None if it depends on the image."""
        for step in reversed(self.geometry):
            if isinstance(step, CenterCrop):
                return step.height, step.width
            if step.fit == "exact":
                return step.size[0], step.size[1]
        return None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of every result in packed order; -1 for sides that depend on the image."""
        height, width = self.size or (-1, -1)
        return (
            (self.channels, height, width)
            if self.pack.order == "CHW"
            else (height, width, self.channels)
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hash_value(self.to_dict())

    def to_dict(self) -> Mapping[str, Any]:
        """Plain tables for TOML and JSON, without absent fields, since TOML has no null."""
        steps = plain_from_record(self.steps)
        return {
            "steps": [
                {name: value for name, value in step.items() if value is not None} for step in steps
            ]
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Transform":
        """Raises BadInputError that names the step and the field."""
        if set(table) != {"steps"}:
            raise BadInputError(
                "transform: expected the single key 'steps' with a list of tables such as {step = \"resize\", size = [256]}"
            )
        try:
            steps = record_from_plain(
                table["steps"], tuple[TransformStep, ...], "preprocessing.steps"
            )
        except BadInputError as error:
            raise BadInputError(error.message + "\n" + _FORM) from None
        return cls(steps)


def get_step_name(step: TransformStep) -> str:
    """`resize`, `center_crop`, …, as in a card."""
    return str(type(step).__struct_config__.tag)


def compute_resized_sides(resize: Resize, height: int, width: int) -> tuple[int, int]:
    """(height, width) after `resize`; sides round down to at least 1, as torchvision's do."""
    if resize.fit == "exact":
        return resize.size[0], resize.size[1]
    short, long = sorted((height, width))
    side = resize.size[0]
    new_short, new_long = (
        (side, side * long // short) if resize.fit == "short" else (side * short // long, side)
    )
    if resize.max_size is not None and new_long > resize.max_size:
        new_short, new_long = resize.max_size * new_short // new_long, resize.max_size
    new_short = max(new_short, 1)
    return (new_short, new_long) if height <= width else (new_long, new_short)


def compute_crop_start(length: int, wanted: int, rounding: Rounding) -> int:
    """Start of a centered crop of `wanted` pixels on a side of `length`; negative if the image is smaller."""
    margin = length - wanted
    if margin < 0:
        return -(-margin // 2)
    return round(margin / 2) if rounding == "half-even" else margin // 2


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: input position = source position × `scale` + `offset`, in pixels from the edge of the first pixel."""

    source: int
    scale: float
    offset: float


def compute_geometry(transform: Transform, height: int, width: int) -> tuple[Axis, Axis]:
    """(rows, columns) for a source of `height` × `width` pixels: resizes scale, crops and padding shift."""
    sides, scales, offsets = [height, width], [1.0, 1.0], [0.0, 0.0]
    for step in transform.geometry:
        if isinstance(step, Resize):
            for axis, side in enumerate(compute_resized_sides(step, sides[0], sides[1])):
                factor = side / sides[axis]
                scales[axis], offsets[axis], sides[axis] = (
                    scales[axis] * factor,
                    offsets[axis] * factor,
                    side,
                )
        else:
            for axis, wanted in enumerate((step.height, step.width)):
                offsets[axis] -= compute_crop_start(sides[axis], wanted, step.rounding)
                sides[axis] = wanted
    return Axis(height, scales[0], offsets[0]), Axis(width, scales[1], offsets[1])
