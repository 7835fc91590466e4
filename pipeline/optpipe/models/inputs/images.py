"""Decodes image files with Pillow and transforms them as the models' own loaders do."""

import io
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from optpipe.core.errors import BadInputError
from optpipe.core.files import open_user_file
from optpipe.core.transform import (
    CenterCrop,
    Decode,
    Normalize,
    Pack,
    Rescale,
    Resize,
    Transform,
    TransformStep,
    compute_crop_start,
    compute_resized_sides,
)


def apply_transform(transform: Transform, pixels: NDArray[np.uint8]) -> NDArray[np.generic]:
    return list(iterate_steps(transform, pixels))[-1][1]


def iterate_steps(
    transform: Transform, pixels: NDArray[np.uint8]
) -> Iterator[tuple[TransformStep, NDArray[np.generic]]]:
    """Yields each step after decoding with its result; images are (height, width, channels) until packed."""
    value: NDArray[np.generic] = pixels
    for step in transform.steps:
        if not isinstance(step, Decode):
            value = apply_step(step, value)
            yield step, value


def apply_step(step: TransformStep, value: NDArray[np.generic]) -> NDArray[np.generic]:
    """Applies one step after decoding, in float32 and in torchvision's order of operations, so that results are equal.

    Floats are stored as planes, where arithmetic per channel is several times faster; their axes stay the same.
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
        scaled = np.asarray(
            picture.resize((width, height), Image.Resampling[step.interpolation.upper()])
        )
        return scaled.reshape(height, width, value.shape[2])
    return _resize_by_torch(step, value, height, width)


def _resize_by_torch(
    step: Resize, value: NDArray[np.generic], height: int, width: int
) -> NDArray[np.generic]:
    import torch
    from torchvision.transforms.v2 import InterpolationMode, functional

    levels = torch.from_numpy(np.moveaxis(value, -1, 0).copy())
    scaled = functional.resize(
        levels.float() if step.kernel == "float" else levels,
        [height, width],
        interpolation=InterpolationMode(step.interpolation),
        antialias=step.antialias,
    )
    return np.asarray(np.moveaxis(scaled.numpy(), 0, -1))


def _center_crop(step: CenterCrop, value: NDArray[np.generic]) -> NDArray[np.generic]:
    height, width = value.shape[:2]
    top = compute_crop_start(height, step.height, step.rounding)
    left = compute_crop_start(width, step.width, step.rounding)
    result = np.full((step.height, step.width, value.shape[2]), step.fill, value.dtype)
    inside = value[
        max(top, 0) : max(top, 0) + step.height, max(left, 0) : max(left, 0) + step.width
    ]
    result[
        max(-top, 0) : max(-top, 0) + inside.shape[0],
        max(-left, 0) : max(-left, 0) + inside.shape[1],
    ] = inside
    return result


FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "GIF")
"""The formats that are decoded, whatever the name of a file. No other is tried, since Pillow runs Ghostscript for EPS."""
MAX_IMAGE_BYTES = 2**30
MAX_PIXELS = 2**27
"""The limits of an image file and of the pixels that it declares. Pillow takes 4 bytes for one."""
MAX_SCANNED_PIXELS = 2**32
"""Of all scans of a JPEG file: each passes over all pixels, and a file of 200 kB can hold 20,000 of them. Usual are 1 to 10."""
LARGE_PIXELS = 2**24
_LARGE = RLock()
"""Images of more than LARGE_PIXELS are decoded and transformed one after the other, so that threads do not multiply their memory."""

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # `open_image` decides
_REASONS = (
    UnidentifiedImageError,
    BadInputError,
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
)
"""Errors for a file that is damaged, empty, too large, special, or not an image."""


@contextmanager
def open_image(source: Path | bytes) -> Iterator[Image.Image]:
    """Opens an image, of which Pillow has read only the head.

    Raises BadInputError for a special file, and for more than MAX_IMAGE_BYTES or MAX_PIXELS; what Pillow raises for others.
    """
    with ExitStack() as stack:
        file = (
            io.BytesIO(source)
            if isinstance(source, bytes)
            else stack.enter_context(open_user_file(source, MAX_IMAGE_BYTES))
        )
        name = source if isinstance(source, Path) else "an image"
        try:
            opened = stack.enter_context(Image.open(file, formats=FORMATS))
        except Image.DecompressionBombError as error:
            raise BadInputError(
                f"{name} declares too many pixels; at most {MAX_PIXELS:,}"
            ) from error
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise BadInputError(
                f"{name} declares too many pixels, {width:,}×{height:,}; at most {MAX_PIXELS:,}"
            )
        if (
            opened.format == "JPEG"
            and (scans := _count_scans(file)) * width * height > MAX_SCANNED_PIXELS
        ):
            raise BadInputError(f"{name} has {scans:,} scans of {width:,}×{height:,} pixels")
        yield opened


def _count_scans(file: BinaryIO) -> int:
    """Of a JPEG file, whose place stays the same; a thumbnail inside counts too."""
    place = file.tell()
    file.seek(0)
    scans = file.read().count(b"\xff\xda")  # data of a scan have no such bytes
    file.seek(place)
    return scans


def decode_image(source: Path | bytes, step: Decode) -> NDArray[np.uint8]:
    """Decodes a file as torchvision's, timm's and transformers' loaders do: (height, width, channels) in 8 bits.

    Raises BadInputError that names the file and Pillow's reason.
    """
    try:
        return _decode_pixels(source, step)
    except BadInputError:
        raise
    except _REASONS as error:
        name = source if isinstance(source, Path) else f"{len(source)} bytes"
        raise BadInputError(f"{name}: cannot be decoded: {_format_reason(error)}") from None


def preprocess_file(source: Path | bytes, transform: Transform) -> NDArray[np.generic]:
    """Decodes one file and applies `transform` on the CPU, without batch axis."""
    with _LARGE if _is_large(source) else nullcontext():
        return apply_transform(transform, decode_image(source, transform.decode))


def _is_large(source: Path | bytes) -> bool:
    """False for a file that cannot be opened, which decoding reports."""
    try:
        with open_image(source) as opened:
            return opened.width * opened.height > LARGE_PIXELS
    except _REASONS:
        return False


def preprocess_batches(
    paths: Iterable[Path], transform: Transform, batch_size: int, threads: int = 1
) -> Iterator[NDArray[np.generic]]:
    """Preprocesses files into arrays of (batch, channels, height, width), or as `transform.pack` orders them.

    The last batch may be smaller. Raises BadInputError if the transform does not fix the size of its result.
    """
    if transform.size is None:
        problem = "images of different sizes cannot share a batch"
        raise BadInputError(f"{problem}: end the transform with a center_crop or an exact resize")
    if batch_size < 1:
        raise BadInputError(f"batch size must be at least 1, got {batch_size}")
    pending = list(paths)
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(pending), batch_size):
            chunk = pending[start : start + batch_size]
            yield np.stack(list(pool.map(lambda path: preprocess_file(path, transform), chunk)))


def _decode_pixels(source: Path | bytes, step: Decode) -> NDArray[np.uint8]:
    with open_image(source) as opened:
        large = opened.width * opened.height > LARGE_PIXELS
        with _LARGE if large else nullcontext():
            rgb = (ImageOps.exif_transpose(opened) if step.exif else opened).convert("RGB")
    if step.channels == "L":
        return np.asarray(rgb.convert("L"))[:, :, np.newaxis]
    pixels = np.asarray(rgb)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if step.channels == "BGR" else pixels


def find_read_error(path: Path) -> str | None:
    """The reason for refusing a file, on one line; None if it decodes."""
    try:
        _decode_pixels(path, Decode())
    except _REASONS as error:
        return _format_reason(error)
    return None


def _format_reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image format that optpipe reads"
    return (str(error).splitlines() or [type(error).__name__])[0]
