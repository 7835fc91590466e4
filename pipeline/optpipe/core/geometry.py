"""Where the pixels of a source image lie in the model's input, so that masks and boxes are judged at the source's geometry."""

from dataclasses import dataclass

from optpipe.core.transform import Resize, Transform, compute_crop_start, compute_resized_sides


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: input position = source position × `scale` + `offset`, in pixels from the edge of the first pixel."""

    source: int
    """Pixels of the source."""
    scale: float
    offset: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """Both axes of one image."""

    rows: Axis
    columns: Axis


def compute_geometry(transform: Transform, height: int, width: int) -> Geometry:
    """The geometry of `transform` for a source of `height` × `width` pixels: resizes scale, crops and padding shift."""
    sides, scales, offsets = [height, width], [1.0, 1.0], [0.0, 0.0]
    for step in transform.geometry:
        if isinstance(step, Resize):
            resized = compute_resized_sides(step, sides[0], sides[1])
            for axis, side in enumerate(resized):
                factor = side / sides[axis]
                scales[axis], offsets[axis], sides[axis] = scales[axis] * factor, offsets[axis] * factor, side
        else:
            for axis, wanted in enumerate((step.height, step.width)):
                offsets[axis] -= compute_crop_start(sides[axis], wanted, step.rounding)
                sides[axis] = wanted
    return Geometry(Axis(height, scales[0], offsets[0]), Axis(width, scales[1], offsets[1]))
