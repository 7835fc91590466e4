"""A transform executed on the CPU: the output that every faster pipeline is compared with."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Interpolation,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
    TransformStep,
    compute_crop_start,
    compute_resized_sides,
)

_PILLOW: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


def apply_transform(transform: Transform, pixels: NDArray[np.uint8]) -> NDArray[np.generic]:
    """Applies every step after decoding to (height, width, channels) pixels."""
    return list(iterate_steps(transform, pixels))[-1][1]


def iterate_steps(
    transform: Transform, pixels: NDArray[np.uint8]
) -> Iterator[tuple[TransformStep, NDArray[np.generic]]]:
    """Yields each step after decoding with what it made; images are (height, width, channels) until packed."""
    value: NDArray[np.generic] = pixels
    for step in transform.steps:
        if not isinstance(step, Decode):
            value = apply_step(step, value)
            yield step, value


def apply_step(step: TransformStep, value: NDArray[np.generic]) -> NDArray[np.generic]:
    """Applies one step after decoding, in float32 and in torchvision's order of operations, so results are equal.

    Floats lie in memory as planes, where arithmetic per channel is several times faster; their axes stay the same.
    """
    match step:
        case Resize():
            return _resize(step, value)
        case CenterCrop():
            return _center_crop(step, value)
        case Rescale():
            planes = np.ascontiguousarray(np.moveaxis(value, -1, 0)).astype(np.float32)
            planes /= np.float32(step.divisor)
            if step.offset:
                planes += np.float32(step.offset)
            return np.moveaxis(planes, 0, -1)
        case Normalize():
            planes = np.moveaxis(value, -1, 0).astype(np.float32)
            planes -= np.asarray(step.mean, np.float32)[:, np.newaxis, np.newaxis]
            planes /= np.asarray(step.std, np.float32)[:, np.newaxis, np.newaxis]
            return np.moveaxis(planes, 0, -1)
        case Pack():
            ordered = np.moveaxis(value, -1, 0) if step.order == "CHW" else value
            return np.ascontiguousarray(ordered, dtype=np.dtype(step.dtype))
        case Decode():
            return value


def _resize(step: Resize, value: NDArray[np.generic]) -> NDArray[np.generic]:
    height, width = compute_resized_sides(step, value.shape[0], value.shape[1])
    if value.shape[:2] == (height, width):
        return value
    if step.kernel == "pillow":
        picture = Image.fromarray(value[:, :, 0] if value.shape[2] == 1 else value)
        scaled = np.asarray(picture.resize((width, height), _PILLOW[step.interpolation]))
        return scaled.reshape(height, width, value.shape[2])
    return _resize_by_torch(step, value, height, width)


def _resize_by_torch(step: Resize, value: NDArray[np.generic], height: int, width: int) -> NDArray[np.generic]:
    import torch
    from torchvision.transforms.v2 import InterpolationMode, functional

    levels = torch.from_numpy(np.moveaxis(value, -1, 0).copy())
    scaled = functional.resize(
        levels.float() if step.kernel == "float" else levels,
        [height, width],
        interpolation=InterpolationMode(step.interpolation),
        antialias=step.antialias,
    )
    back: NDArray[np.generic] = np.moveaxis(scaled.numpy(), 0, -1)
    return back


def _center_crop(step: CenterCrop, value: NDArray[np.generic]) -> NDArray[np.generic]:
    height, width = value.shape[:2]
    top, left = (
        compute_crop_start(height, step.height, step.rounding),
        compute_crop_start(width, step.width, step.rounding),
    )
    result = np.full((step.height, step.width, value.shape[2]), step.fill, value.dtype)
    inside = value[max(top, 0) : max(top, 0) + step.height, max(left, 0) : max(left, 0) + step.width]
    result[max(-top, 0) : max(-top, 0) + inside.shape[0], max(-left, 0) : max(-left, 0) + inside.shape[1]] = inside
    return result
