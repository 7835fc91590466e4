"""Masks and boxes of image sets, checked before anything runs: PNG masks, COCO annotations, and YOLO text files."""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import hash_file
from optpipe.core.transform import Transform
from optpipe.models.inputs.image_set import COCO, IMAGES, LABELS, MASKS, ImageSet
from optpipe.models.inputs.images import find_read_error
from optpipe.models.inputs.sample_set import SetFile, draw_subset

IGNORED = 255
_ROTATED = (5, 6, 7, 8)


class NothingJudgedError(BadInputError):
    """Valid annotations without anything to judge."""


def read_image_size(path: Path, transform: Transform) -> tuple[int, int]:
    """(height, width) of an image as `transform` decodes it; reads only the file's head."""
    with Image.open(path) as opened:
        width, height = opened.size  # Pillow always rotates TIFF files upright
        turned = transform.decode.exif and opened.format != "TIFF" and opened.getexif().get(0x0112) in _ROTATED
    return (width, height) if turned else (height, width)


def find_mask(samples: ImageSet, path: str) -> Path | None:
    """`masks/NAME.png` for `images/NAME`."""
    parts = Path(path).parts
    if IMAGES not in parts:
        return None
    place = parts.index(IMAGES)
    return samples.root.joinpath(*parts[:place], MASKS, *parts[place + 1 :]).with_suffix(".png")


def read_mask(path: Path) -> NDArray[np.uint8]:
    """Class indices (height, width). Raises BadInputError for a file that is not a mask."""
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
    """The masks of all images; None without a folder of masks.

    Raises BadInputError for a mask that is missing, of another size than its image, or with an unknown class.
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


OUTSIDE = 1.0


@dataclass(frozen=True, slots=True)
class TrueBox:
    """An annotated object: (left, top, width, height) in pixels of the source image, and its class index."""

    box: tuple[float, float, float, float]
    label: int
    area: float
    crowd: bool = False


def read_boxes(
    samples: ImageSet, transform: Transform, labels: Sequence[str], classes: int | None
) -> list[list[TrueBox]] | None:
    """The boxes of every image from `annotations.json` (COCO) or `labels/*.txt` (YOLO); None without either.

    Raises BadInputError for an image without annotations, an unknown class, a box outside its image, and annotations of
    crowds only.
    """
    sizes = [read_image_size(path, transform) for path in samples.paths]
    path = samples.annotations or samples.root / COCO
    if path.is_file():
        found = _read_coco(path, samples, sizes, labels, classes)
    elif (samples.root / LABELS).is_dir():
        found = [
            _read_yolo(samples.root / LABELS / Path(each.path).relative_to(IMAGES).with_suffix(".txt"), size)
            for each, size in zip(samples.files, sizes, strict=True)
        ]
    else:
        return None
    for each, boxes, (height, width) in zip(samples.files, found, sizes, strict=True):
        for one in boxes:
            _require_valid(one, each.path, width, height, classes)
    if all(one.crowd for boxes in found for one in boxes):
        others = " other than crowds" if any(found) else ""
        raise NothingJudgedError(f"{samples.name}: none of the {len(found)} images has an annotated box{others}")
    return found


def _require_valid(one: TrueBox, image: str, width: int, height: int, classes: int | None) -> None:
    left, top, wide, high = one.box
    inside = (
        min(left, top) >= -OUTSIDE and left + wide <= width + OUTSIDE and top + high <= height + OUTSIDE
    )  # False for NaN
    if not inside or min(wide, high) <= 0:
        box = ", ".join(f"{value:g}" for value in one.box)
        raise BadInputError(f"{image}: box ({box}) is empty or outside the image of {width}×{height} pixels")
    if classes is not None and not 0 <= one.label < classes:
        raise BadInputError(f"{image}: class {one.label}, but the model has {classes} classes (0 to {classes - 1})")


def is_coco(path: Path) -> bool:
    try:
        return path.suffix == ".json" and {"images", "annotations", "categories"} <= set(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return False


def list_coco_images(path: Path) -> tuple[Path, list[str]]:
    """Folder and names of a COCO file's images: in its folder, in `images/` there, or in `../NAME/` for `instances_NAME.json`."""
    document, name = json.loads(path.read_bytes()), path.stem.rpartition("_")[2]
    places = (path.parent / IMAGES, path.parent, path.parent.parent / name, path.parent.parent / IMAGES)
    names = sorted(str(each["file_name"]) for each in document["images"])
    return next((place for place in places if names and (place / names[0]).is_file()), places[0]), names


def image_set_from_coco(path: Path, count: int | None, seed: int) -> ImageSet:
    """The images of a COCO file. Raises BadInputError if one is missing, or a drawn one cannot be read."""
    root, names = list_coco_images(path)
    _require_images(path, root, names)
    files = tuple(SetFile(each, hash_file(root / each)) for each in names)
    whole = ImageSet(path.name, root, seed, files, annotations=path)
    drawn = whole if count is None else draw_subset(whole, count, seed)
    with ThreadPoolExecutor(2) as pool:
        for each, reason in zip(drawn.paths, pool.map(find_read_error, drawn.paths), strict=True):
            if reason is not None:
                raise BadInputError(f"{each}: cannot be decoded: {reason}")
    return drawn


def _require_images(path: Path, root: Path, names: Sequence[str]) -> None:
    if missing := [each for each in names if not (root / each).is_file()]:
        raise BadInputError(
            f"{path}: {len(missing)} of its {len(names)} images are missing (such as {root / missing[0][:200]})"
        )


def _read_coco(
    path: Path, samples: ImageSet, sizes: Sequence[tuple[int, int]], labels: Sequence[str], classes: int | None
) -> list[list[TrueBox]]:
    with read_as_user_file(path, "COCO annotations"):
        document = json.loads(path.read_bytes())
        names = {int(each["id"]): str(each["name"]) for each in document["categories"]}
        ids = {Path(each["file_name"]).name: int(each["id"]) for each in document["images"]}
        by_image: dict[int, list[Mapping[str, Any]]] = {}
        for each in document["annotations"]:
            by_image.setdefault(int(each["image_id"]), []).append(each)
        index = _index_categories(names, labels, classes, path)
        if samples.annotations is None:  # otherwise checked when the set was read
            _require_images(path, samples.root / IMAGES, [str(each["file_name"]) for each in document["images"]])
        if missing := [each.path for each in samples.files if Path(each.path).name not in ids]:
            raise BadInputError(f"{path}: {len(missing)} images of the set are not in it (such as {missing[0]})")
        stated = {Path(each["file_name"]).name: (each.get("height"), each.get("width")) for each in document["images"]}
        for file, size in zip(samples.files, sizes, strict=True):
            high, wide = said = stated[Path(file.path).name]
            if None not in said and said not in (size, size[::-1]):  # EXIF may rotate it
                there = f"{str(wide)[:20]}×{str(high)[:20]}"
                raise BadInputError(
                    f"{path}: {file.path} is {there} pixels there, but the image has {size[1]}×{size[0]}"
                )
        return [
            [_box_from_coco(each, index) for each in by_image.get(ids[Path(file.path).name], ())]
            for file in samples.files
        ]


def _index_categories(
    names: Mapping[int, str], labels: Sequence[str], classes: int | None, path: Path
) -> dict[int, int]:
    """Class indices by category: by name if the model's labels are known, otherwise in the order of categories."""
    if labels:
        if unknown := [name for name in names.values() if name not in labels]:
            known = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
            raise BadInputError(f"{path}: category '{unknown[0][:80]}' is not one of the model's classes ({known})")
        return {category: labels.index(name) for category, name in names.items()}
    if classes is not None and len(names) > classes:
        raise BadInputError(f"{path}: {len(names)} categories, but the model has {classes} classes")
    return {category: place for place, category in enumerate(sorted(names))}


def _box_from_coco(each: Mapping[str, Any], index: Mapping[int, int]) -> TrueBox:
    left, top, wide, high = map(float, each["bbox"])
    area = float(each.get("area", wide * high))
    return TrueBox((left, top, wide, high), index[int(each["category_id"])], area, bool(each.get("iscrowd", 0)))


def _read_yolo(path: Path, size: tuple[int, int]) -> list[TrueBox]:
    """Reads `class x y width height` per line, with center and sides as shares of the image; empty if the file is missing."""
    if not path.is_file():
        return []
    height, width, boxes = *size, []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            label, (x, y, wide, high) = int(parts[0]), (float(each) for each in parts[1:5])
        except ValueError:
            label = x = y = wide = high = math.nan  # type: ignore[assignment]
        if len(parts) != 5 or not math.isfinite(x + y + wide + high):
            raise BadInputError(f"{path}, line {number}: expected `class x y width height`, got {line[:60]!r}")
        box = ((x - wide / 2) * width, (y - high / 2) * height, wide * width, high * height)
        boxes.append(TrueBox(box, label, box[2] * box[3]))
    return boxes
