"""Image files of a folder, and image sets with provenance: files, hashes, how they were drawn, masks, and boxes.

The format is in `calibration/README.md`. Masks and boxes are checked before anything runs.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.events import UNWATCHED, ProgressStep
from optpipe.core.files import (
    MAX_LIST_BYTES,
    hash_file,
    read_user_bytes,
    read_user_text,
    require_regular_file,
)
from optpipe.core.records import group_pairs
from optpipe.core.transform import Transform
from optpipe.models.inputs.images import find_read_error, open_image
from optpipe.models.inputs.sample_set import (
    GROUPS_FILE,
    MAX_UNREADABLE_SHARE,
    SampleSet,
    SetFile,
    Unusable,
    draw_subset,
    format_unreadable,
    read_groups_file,
    stratify_indices,
)

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"}
)
IMAGES, MASKS, LABELS, COCO = "images", "masks", "labels", "annotations.json"
ANNOTATIONS = (MASKS, LABELS, COCO)
CHECKED_AT_ONCE = 64
DOCUMENTATION_PREFIXES = (".", "README", "LICENSE", "LICENCE", "NOTICE")


def find_images(folder: Path) -> tuple[Path, ...]:
    """Image files below `folder` in natural order (`2.jpg` before `10.jpg`); opens none.

    An annotated folder has its images in `images/`. Raises BadInputError without such a folder, or without images.
    """
    if not folder.is_dir():
        if folder.exists():
            require_regular_file(folder)
        problem = "is a file; give its folder" if folder.exists() else "no such file or folder"
        raise BadInputError(f"{folder}: {problem}")
    files = walk_files(folder / IMAGES if is_annotated(folder) else folder)
    paths = [path for path in files if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not paths:
        kinds = " ".join(sorted(suffix.lstrip(".") for suffix in SUFFIXES))
        raise BadInputError(f"{folder}: no images in this folder or below it (looked for {kinds})")
    return tuple(sorted(paths, key=_split_numbers))


def _split_numbers(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", str(path).lower())
    return [
        (0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts
    ]


def is_annotated(folder: Path) -> bool:
    """Whether a folder has `images/` with masks, YOLO labels or COCO annotations."""
    return (folder / IMAGES).is_dir() and any((folder / name).exists() for name in ANNOTATIONS)


def walk_files(folder: Path) -> Iterator[Path]:
    """All files below `folder`, following links as torchvision's folder datasets do, but visiting no folder twice."""
    seen: set[Path] = set()
    for name, below, files in os.walk(folder, followlinks=True):
        here = Path(name)
        if (real := here.resolve()) in seen:
            below.clear()
            continue
        seen.add(real)
        below.sort()
        yield from map(here.joinpath, files)


@dataclass(frozen=True)
class ImageSet(SampleSet):
    format: ClassVar[str] = "optpipe.image-set/1"
    kind: ClassVar[str] = "images"

    annotations: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.root / file.path for file in self.files)


def check_image_set(samples: ImageSet) -> ImageSet:
    for file, path in zip(samples.files, samples.paths, strict=True):
        if not path.is_file() or hash_file(path) != file.sha256:
            problem = "has changed" if path.is_file() else "is missing"
            raise BadInputError(f"image set {samples.name}: {path} {problem}; draw the set again")
    return samples


def image_set_from_path(
    source: Path, count: int | None = None, seed: int = 0, step: ProgressStep = UNWATCHED
) -> tuple[ImageSet, tuple[Unusable, ...]]:
    """The set that `source` names: a manifest, a COCO file, or `count` images drawn from a folder; and unusable files.

    Only `images/` of a folder with annotations is read. If all images lie in class folders, these are the labels, and
    the sample is stratified by them. Raises BadInputError for an empty folder, or too many unusable files.
    """
    if is_coco(source):
        with read_as_user_file(source, "COCO annotations"):
            return image_set_from_coco(source, count, seed), ()
    if source.is_file():
        samples = ImageSet.from_manifest(source)
        return check_image_set(samples if count is None else draw_subset(samples, count, seed)), ()
    annotated = is_annotated(source)
    paths = find_images(source)
    labels = [None] * len(paths) if annotated else _labels_from_folders(source, paths)
    wanted = len(paths) if count is None else min(count, len(paths))
    order = stratify_indices(labels, wanted, seed)
    kept, bad = _select_readable([paths[index] for index in order], wanted, source, step)
    others = () if annotated else _find_other_files(source, len(paths))
    by_path = dict(zip(paths, labels, strict=True))
    drawn = [path.relative_to(source).as_posix() for path in sorted(kept)]
    groups = read_groups_file(source, drawn)
    files = tuple(
        SetFile(name, hash_file(path), by_path[path], group)
        for path, name, group in zip(sorted(kept), drawn, groups, strict=True)
    )
    names = tuple(sorted({label for label in labels if label is not None}))
    return ImageSet(source.resolve().name, source, seed, files, names), (*bad, *others)


def _find_other_files(source: Path, pictures: int) -> tuple[Unusable, ...]:
    """Files that are neither images nor usual documentation. Raises BadInputError if they outnumber the images."""
    others = tuple(
        (path, "not an image file extension")
        for path in sorted(walk_files(source))
        if path.is_file()
        and path.suffix.lower() not in SUFFIXES
        and path != source / GROUPS_FILE
        and not path.name.upper().startswith(DOCUMENTATION_PREFIXES)
    )
    if len(others) > pictures:
        problem = f"{len(others)} of {len(others) + pictures} files are not images"
        raise BadInputError(
            f"{source}: {problem}: {format_unreadable(others, 3)}\ngive a folder of images"
        )
    return others


def _labels_from_folders(root: Path, paths: Sequence[Path]) -> list[str | None]:
    """The first folder below `root` of every image; all None unless there are at least two folders and no loose image."""
    parts = [path.relative_to(root).parts for path in paths]
    names = {part[0] for part in parts if len(part) > 1}
    if len(names) < 2 or any(len(part) == 1 for part in parts):
        return [None] * len(paths)
    return [part[0] for part in parts]


def _select_readable(
    paths: Sequence[Path], wanted: int, source: Path, step: ProgressStep
) -> tuple[list[Path], tuple[Unusable, ...]]:
    kept: list[Path] = []
    bad: list[Unusable] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting = list(paths)
        while waiting and len(kept) < wanted:
            size = min(CHECKED_AT_ONCE, wanted - len(kept))
            chunk, waiting = waiting[:size], waiting[size:]
            for path, reason in zip(chunk, pool.map(_find_defect, chunk), strict=True):
                kept += [] if reason else [path]
                bad += [(path, reason)] if reason else []
            step.advance(len(chunk))
    if not kept or len(bad) > max(1, MAX_UNREADABLE_SHARE * (len(kept) + len(bad))):
        problem = f"{source}: {len(bad)} of {len(kept) + len(bad)} images cannot be read; at most 5% allowed"
        raise BadInputError(f"{problem}\n{format_unreadable(bad, 3)}")
    return kept, tuple(bad)


def _find_defect(path: Path) -> str | None:
    try:
        str(path).encode()  # manifests and tables hold names as UTF-8
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return find_read_error(path)


IGNORED = 255
_ROTATED = (5, 6, 7, 8)


class NothingJudgedError(BadInputError):
    """Valid annotations without anything to judge."""


def read_image_size(path: Path, transform: Transform) -> tuple[int, int]:
    """(height, width) of an image as `transform` decodes it; reads only the file's head."""
    with open_image(path) as opened:
        width, height = opened.size  # Pillow always rotates TIFF files upright
        turned = (
            transform.decode.exif
            and opened.format != "TIFF"
            and opened.getexif().get(0x0112) in _ROTATED
        )
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
        with open_image(path) as opened:
            if opened.mode not in ("L", "P", "1"):
                problem = f"{path}: a mask must be 8-bit gray or palette PNG with class indices"
                raise BadInputError(f"{problem}; its mode is {opened.mode}")
            return np.asarray(opened, np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadInputError(f"{path}: the mask cannot be read ({type(error).__name__})") from error


def require_masks(
    samples: ImageSet, transform: Transform, classes: int | None
) -> list[Path] | None:
    """The masks of all images; None without a folder of masks.

    Raises BadInputError for a mask that is missing, of another size than its image, or with an unknown class.
    """
    paths = [find_mask(samples, file.path) for file in samples.files]
    if not any(path is not None and path.parent.is_dir() for path in paths):
        return None
    masks = []
    for image, path in zip(samples.paths, paths, strict=True):
        if path is None or not path.is_file():
            raise BadInputError(
                f"{samples.name}: {image.name} has no mask{f' ({path})' if path else ''}"
            )
        mask, size = read_mask(path), read_image_size(image, transform)
        if mask.shape != size:
            sides = [f"{width}×{height}" for height, width in (mask.shape, size)]
            raise BadInputError(
                f"{path}: the mask is {sides[0]} pixels, but its image is {sides[1]}"
            )
        largest = int(mask[mask != IGNORED].max(initial=0))
        if classes is not None and largest >= classes:
            problem = f"{path}: class {largest}, but the model has {classes} classes"
            raise BadInputError(f"{problem} (0 to {classes - 1}; {IGNORED} is ignored)")
        masks.append(path)
    return masks


OUTSIDE = 1.0
Box = tuple[float, float, float, float, int, float, bool]
"""An annotated object: left, top, width, height in pixels of the source image, its class, its area, and whether it is a crowd."""


def read_boxes(
    samples: ImageSet, transform: Transform, labels: Sequence[str], classes: int | None
) -> list[list[Box]] | None:
    """The boxes of every image from `annotations.json` (COCO) or `labels/*.txt` (YOLO); None without either.

    Raises BadInputError for an image without annotations, an unknown class, a box outside its image, and annotations of
    crowds only.
    """
    sizes = [read_image_size(path, transform) for path in samples.paths]
    path = samples.annotations or samples.root / COCO
    if path.is_file():
        boxes_of = _read_coco(path, samples, sizes, labels, classes)
    elif (samples.root / LABELS).is_dir():
        names = (Path(file.path).relative_to(IMAGES).with_suffix(".txt") for file in samples.files)
        boxes_of = [
            _read_yolo(samples.root / LABELS / name, size)
            for name, size in zip(names, sizes, strict=True)
        ]
    else:
        return None
    for file, boxes, (height, width) in zip(samples.files, boxes_of, sizes, strict=True):
        for box in boxes:
            _require_valid(box, file.path, width, height, classes)
    if all(box[6] for boxes in boxes_of for box in boxes):
        others = " other than crowds" if any(boxes_of) else ""
        raise NothingJudgedError(
            f"{samples.name}: none of the {len(boxes_of)} images has an annotated box{others}"
        )
    return boxes_of


def _require_valid(
    annotation: Box, image: str, width: int, height: int, classes: int | None
) -> None:
    left, top, wide, high, label = annotation[:5]
    inside = (
        min(left, top) >= -OUTSIDE
        and left + wide <= width + OUTSIDE
        and top + high <= height + OUTSIDE
    )
    if not inside or min(wide, high) <= 0:  # NaN is not inside
        box = ", ".join(f"{value:g}" for value in annotation[:4])
        raise BadInputError(
            f"{image}: box ({box}) is empty or outside the image of {width}×{height} pixels"
        )
    if classes is not None and not 0 <= label < classes:
        raise BadInputError(
            f"{image}: class {label}, but the model has {classes} classes (0 to {classes - 1})"
        )


def is_coco(path: Path) -> bool:
    """Whether `path` is a COCO file. Raises BadInputError for a special file, and for more than MAX_LIST_BYTES."""
    if path.suffix != ".json":
        return False
    try:
        return {"images", "annotations", "categories"} <= set(_read_json(path))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read_json(path: Path) -> Any:
    return json.loads(read_user_bytes(path, MAX_LIST_BYTES))


def list_coco_images(path: Path) -> tuple[Path, list[str]]:
    """Folder and names of a COCO file's images: in its folder, in `images/` there, or in `../NAME/` for `instances_NAME.json`."""
    document, name = _read_json(path), path.stem.rpartition("_")[2]
    places = (
        path.parent / IMAGES,
        path.parent,
        path.parent.parent / name,
        path.parent.parent / IMAGES,
    )
    names = sorted(str(image["file_name"]) for image in document["images"])
    return next(
        (place for place in places if names and (place / names[0]).is_file()), places[0]
    ), names


def image_set_from_coco(path: Path, count: int | None, seed: int) -> ImageSet:
    """The images of a COCO file. Raises BadInputError if one is missing, or a drawn one cannot be read."""
    root, names = list_coco_images(path)
    _require_images(path, root, names)
    groups = read_groups_file(root, names)
    files = tuple(
        SetFile(name, hash_file(root / name), group=group)
        for name, group in zip(names, groups, strict=True)
    )
    whole = ImageSet(path.name, root, seed, files, annotations=path)
    drawn = whole if count is None else draw_subset(whole, count, seed)
    with ThreadPoolExecutor(2) as pool:
        for image, reason in zip(drawn.paths, pool.map(find_read_error, drawn.paths), strict=True):
            if reason is not None:
                raise BadInputError(f"{image}: cannot be decoded: {reason}")
    return drawn


def _require_images(path: Path, root: Path, names: Sequence[str]) -> None:
    if missing := [name for name in names if not (root / name).is_file()]:
        problem = f"{path}: {len(missing)} of its {len(names)} images are missing"
        raise BadInputError(f"{problem} (such as {root / missing[0][:200]})")


def _read_coco(
    path: Path,
    samples: ImageSet,
    sizes: Sequence[tuple[int, int]],
    labels: Sequence[str],
    classes: int | None,
) -> list[list[Box]]:
    with read_as_user_file(path, "COCO annotations"):
        document = _read_json(path)
        for part in ("categories", "images"):
            _require_single(
                path, f"the id {{}} of {part}", (int(record["id"]) for record in document[part])
            )
        _require_single(
            path, "the image {}", (str(image["file_name"]) for image in document["images"])
        )
        names = {int(category["id"]): str(category["name"]) for category in document["categories"]}
        by_image = group_pairs(
            (int(annotation["image_id"]), annotation) for annotation in document["annotations"]
        )
        _require_listed(path, by_image, [int(image["id"]) for image in document["images"]])
        index = _index_classes(names, labels, classes, path)
        if samples.annotations is None:  # otherwise checked when the set was read
            _require_images(
                path,
                samples.root / IMAGES,
                [str(image["file_name"]) for image in document["images"]],
            )
        images = _match_images(path, samples, document["images"])
        for file, image, size in zip(samples.files, images, sizes, strict=True):
            high, wide = said = image.get("height"), image.get("width")
            if None not in said and said not in (size, size[::-1]):  # EXIF may rotate it
                there = f"{str(wide)[:20]}×{str(high)[:20]}"
                problem = f"{path}: {file.path} is {there} pixels there"
                raise BadInputError(f"{problem}, but the image has {size[1]}×{size[0]}")
        drawn = (by_image.get(int(image["id"]), ()) for image in images)
        return [[_box_from_coco(annotation, index) for annotation in boxes] for boxes in drawn]


def _require_single(path: Path, what: str, values: Iterable[Any]) -> None:
    """Raises BadInputError for a value that occurs twice; `what` has its place."""
    if doubled := [value for value, count in Counter(values).items() if count > 1]:
        raise BadInputError(f"{path} lists {what.format(str(doubled[0])[:80])} twice")


def _require_listed(path: Path, annotated: Iterable[int], listed: Sequence[int]) -> None:
    """Raises BadInputError for annotations of an image that the file does not list.

    They are boxes that no image would have: identifiers that are shifted by one lose the truth of an image.
    """
    if lost := sorted(set(annotated) - set(listed)):
        problem = (
            f"{path}: annotations of the image id {str(lost[0])[:80]}, which 'images' does not list"
        )
        raise BadInputError(
            f"{problem} ({len(lost)} such ids)\nlist these images, or remove their annotations"
        )


def _match_images(
    path: Path, samples: ImageSet, images: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The record of each file of the set: by its path, or by its name alone where only one image has it.

    Raises BadInputError for a file without a record.
    """
    by_path = {os.path.normpath(str(image["file_name"])): image for image in images}
    by_name = group_pairs((Path(name).name, image) for name, image in by_path.items())
    records, missing = [], []
    for file in samples.files:
        place = os.path.normpath(file.path)
        inner = os.path.relpath(place, IMAGES)
        named = by_name.get(Path(place).name, ())
        record = by_path.get(place if samples.annotations else inner) or by_path.get(place)
        if record is None and len(named) == 1:
            record = named[0]
        if record is None:
            missing.append(file.path)
        else:
            records.append(record)
    if missing:
        raise BadInputError(
            f"{path}: {len(missing)} images of the set are not in it (such as {missing[0]})"
        )
    return records


def _index_classes(
    names: Mapping[int, str], labels: Sequence[str], classes: int | None, path: Path
) -> dict[int, int]:
    """Class indices by category: by name if the model's labels are known, otherwise in the order of categories."""
    if labels:
        if unknown := [name for name in names.values() if name not in labels]:
            known = ", ".join(labels[:8]) + (", …" if len(labels) > 8 else "")
            raise BadInputError(
                f"{path}: category '{unknown[0][:80]}' is not one of the model's classes ({known})"
            )
        if several := [name for name in names.values() if labels.count(name) > 1]:
            problem = f"{path}: category '{several[0][:80]}' names several of the model's classes"
            raise BadInputError(f"{problem}\ngive them different labels in the model card")
        return {category: labels.index(name) for category, name in names.items()}
    if classes is not None and len(names) != classes:
        problem = f"{path}: {len(names)} categories, but the model has {classes} classes"
        raise BadInputError(f"{problem}\nname its classes in a model card: labels = [...]")
    return {category: place for place, category in enumerate(sorted(names))}


def _box_from_coco(annotation: Mapping[str, Any], index: Mapping[int, int]) -> Box:
    left, top, wide, high = map(float, annotation["bbox"])
    area = float(annotation.get("area", wide * high))
    return (
        left,
        top,
        wide,
        high,
        index[int(annotation["category_id"])],
        area,
        bool(annotation.get("iscrowd", 0)),
    )


def _read_yolo(path: Path, size: tuple[int, int]) -> list[Box]:
    """Reads `class x y width height` per line, with center and sides as shares of the image; empty if the file is missing."""
    if not path.is_file():
        return []
    boxes: list[Box] = []
    height, width = size
    for number, line in enumerate(read_user_text(path, errors="replace").splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            label, (x, y, wide, high) = int(parts[0]), (float(number) for number in parts[1:5])
        except ValueError:
            label = x = y = wide = high = math.nan  # type: ignore[assignment]
        if len(parts) != 5 or not math.isfinite(x + y + wide + high):
            raise BadInputError(
                f"{path}, line {number}: expected `class x y width height`, got {line[:60]!r}"
            )
        box = ((x - wide / 2) * width, (y - high / 2) * height, wide * width, high * height)
        boxes.append((*box, label, box[2] * box[3], False))
    return boxes
