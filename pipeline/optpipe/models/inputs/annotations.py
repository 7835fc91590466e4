"""Masks of image sets: PNG files beside the images, checked before anything runs."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from optpipe.core.errors import BadInputError
from optpipe.core.transform import Transform
from optpipe.models.inputs.image_set import ImageSet
from optpipe.models.inputs.images import IMAGES, MASKS

IGNORED = 255
"""The level of pixels that are not judged."""
_ROTATED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""


class NothingJudgedError(BadInputError):
    """Annotations that fit, with nothing in them to judge."""


def read_image_size(path: Path, transform: Transform) -> tuple[int, int]:
    """Height and width of an image as `transform` decodes it; only the file's head is read."""
    with Image.open(path) as opened:
        width, height = opened.size  # of a TIFF file as it is turned: Pillow does that in any case
        turned = transform.decode.exif and opened.format != "TIFF" and opened.getexif().get(0x0112) in _ROTATED
    return (width, height) if turned else (height, width)


def find_mask(samples: ImageSet, path: str) -> Path | None:
    """The mask of `images/NAME`: `masks/NAME.png` beside the folder of the images."""
    parts = Path(path).parts
    if IMAGES not in parts:
        return None
    place = parts.index(IMAGES)
    return samples.root.joinpath(*parts[:place], MASKS, *parts[place + 1 :]).with_suffix(".png")


def read_mask(path: Path) -> NDArray[np.uint8]:
    """The class of every pixel (height, width). Raises BadInputError for a file that is not a mask."""
    try:
        with Image.open(path) as opened:
            if opened.mode not in ("L", "P", "1"):
                raise BadInputError(
                    f"{path}: a mask must be 8-bit gray or palette PNG with class indices; its mode is {opened.mode}"
                )
            return np.asarray(opened, np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadInputError(f"{path}: the mask cannot be read ({type(error).__name__})") from error


def require_masks(samples: ImageSet, transform: Transform, classes: int | None) -> list[Path] | None:
    """The masks of all images, or None where there is no folder of masks.

    Raises BadInputError for a mask that is missing, of another size than its image, or with a class that the model has not.
    """
    paths = [find_mask(samples, each.path) for each in samples.files]
    if not any(path is not None and path.parent.is_dir() for path in paths):
        return None
    found = []
    for image, path in zip(samples.paths, paths, strict=True):
        if path is None or not path.is_file():
            raise BadInputError(f"{samples.name}: {image.name} has no mask{f' ({path})' if path else ''}")
        mask, size = read_mask(path), read_image_size(image, transform)
        if mask.shape != size:
            sides = [f"{width}×{height}" for height, width in (mask.shape, size)]
            raise BadInputError(f"{path}: the mask is {sides[0]} pixels, but its image is {sides[1]}")
        largest = int(mask[mask != IGNORED].max(initial=0))
        if classes is not None and largest >= classes:
            raise BadInputError(
                f"{path}: class {largest}, but the model has {classes} classes (0 to {classes - 1}; {IGNORED} is ignored)"
            )
        found.append(path)
    return found
