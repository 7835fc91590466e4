"""Image files of a folder, and image sets with provenance: files, hashes, and how they were drawn.

The format is in `calibration/README.md`.
"""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from optpipe.core.errors import BadInputError
from optpipe.core.events import UNWATCHED, ProgressStep
from optpipe.core.files import hash_file
from optpipe.models.inputs.sample_set import (
    MAX_UNREADABLE_SHARE,
    SampleSet,
    SetFile,
    Unusable,
    draw_subset,
    format_unreadable,
    stratify_indices,
)

SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"})
IMAGES, MASKS, LABELS, COCO = "images", "masks", "labels", "annotations.json"
ANNOTATIONS = (MASKS, LABELS, COCO)
CHECKED_AT_ONCE = 64
DOCUMENTATION_PREFIXES = (".", "README", "LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The images of a folder in natural order (`2.jpg` before `10.jpg`), and the omitted ones."""

    folder: Path
    paths: tuple[Path, ...]
    unreadable: tuple[Unusable, ...] = ()
    left_out: int = 0


def find_images(folder: Path, limit: int | None = None) -> ImageFolder:
    """Lists image files below `folder` by name, at most `limit` evenly spread ones; opens none.

    An annotated folder has its images in `images/`. Raises BadInputError without such a folder, or without images.
    """
    if not folder.is_dir():
        raise BadInputError(
            f"{folder}: no such file or folder" if not folder.exists() else f"{folder}: is a file; give its folder"
        )
    if limit is not None and limit < 1:
        raise BadInputError(f"the image limit must be at least 1, got {limit}")
    paths = sorted(
        (
            path
            for path in walk_files(folder / IMAGES if is_annotated(folder) else folder)
            if path.suffix.lower() in SUFFIXES and path.is_file()
        ),
        key=lambda path: [
            (0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part)
            for part in re.split(r"(\d+)", str(path).lower())
        ],
    )
    if not paths:
        kinds = " ".join(sorted(suffix.lstrip(".") for suffix in SUFFIXES))
        raise BadInputError(f"{folder}: no images in this folder or below it (looked for {kinds})")
    count = min(limit or len(paths), len(paths))
    kept = tuple(
        paths[index * len(paths) // count] for index in range(count)
    )  # keeps the mixture of a set that is sorted by class
    return ImageFolder(folder, kept, left_out=len(paths) - count)


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


def find_readable_images(
    folder: Path, limit: int | None = None, max_unreadable: int | None = None, threads: int = 2
) -> ImageFolder:
    """Finds the images below `folder` and decodes each once to find unreadable ones.

    Raises BadInputError if more than `max_unreadable` cannot be read, or none can.
    """
    from optpipe.models.inputs.images import find_read_error

    found = find_images(folder, limit)
    with ThreadPoolExecutor(threads) as pool:
        read = list(zip(found.paths, pool.map(find_read_error, found.paths), strict=True))
    bad = tuple((path, why) for path, why in read if why)
    good = tuple(path for path, why in read if not why)
    if not good or (max_unreadable is not None and len(bad) > max_unreadable):
        allowed = f"; at most {max_unreadable} allowed (--max-unreadable)" if good else ""
        raise BadInputError(
            f"{folder}: {len(bad)} of {len(found.paths)} images cannot be read{allowed}\n{format_unreadable(bad, 3)}"
        )
    return ImageFolder(folder, good, bad, found.left_out)


@dataclass(frozen=True)
class ImageSet(SampleSet):
    format: ClassVar[str] = "optpipe.image-set/1"
    kind: ClassVar[str] = "images"

    annotations: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.root / each.path for each in self.files)


def check_image_set(found: ImageSet) -> ImageSet:
    for each, path in zip(found.files, found.paths, strict=True):
        if not path.is_file() or hash_file(path) != each.sha256:
            problem = "has changed" if path.is_file() else "is missing"
            raise BadInputError(f"image set {found.name}: {path} {problem}; draw the set again")
    return found


def image_set_from_path(
    source: Path, count: int | None = None, seed: int = 0, step: ProgressStep = UNWATCHED
) -> tuple[ImageSet, tuple[Unusable, ...]]:
    """The set that `source` names: a manifest, or `count` images drawn from a folder; and unusable files.

    Only `images/` of a folder with annotations is read. If all images lie in class folders, these are the labels, and
    the sample is stratified by them. Raises BadInputError for an empty folder, or too many unusable files.
    """
    if source.is_file():
        found = ImageSet.from_manifest(source)
        if count is None or count >= len(found.files):
            return check_image_set(found), ()
        return check_image_set(draw_subset(found, count, seed)), ()
    annotated = is_annotated(source)
    paths = find_images(source).paths
    labels = [None] * len(paths) if annotated else _labels_from_folders(source, paths)
    wanted = len(paths) if count is None else min(count, len(paths))
    order = stratify_indices(labels, wanted, seed)
    kept, bad = _select_readable([paths[index] for index in order], wanted, source, step)
    others = () if annotated else _find_other_files(source, len(paths))
    by_path = dict(zip(paths, labels, strict=True))
    files = tuple(SetFile(path.relative_to(source).as_posix(), hash_file(path), by_path[path]) for path in sorted(kept))
    names = tuple(sorted({label for label in labels if label is not None}))
    return ImageSet(source.resolve().name, source, seed, files, names), (*bad, *others)


def _find_other_files(source: Path, pictures: int) -> tuple[Unusable, ...]:
    """Files that are neither images nor usual documentation. Raises BadInputError if they outnumber the images."""
    others = tuple(
        (path, "not an image file extension")
        for path in sorted(walk_files(source))
        if path.is_file()
        and path.suffix.lower() not in SUFFIXES
        and not path.name.upper().startswith(DOCUMENTATION_PREFIXES)
    )
    if len(others) > pictures:
        found = f"{len(others)} of {len(others) + pictures} files are not images"
        raise BadInputError(f"{source}: {found}: {format_unreadable(others, 3)}\ngive a folder of images")
    return others


def _labels_from_folders(root: Path, paths: Sequence[Path]) -> list[str | None]:
    """The first folder below `root` of every image; all None unless there are at least two folders and no loose image."""
    parts = [path.relative_to(root).parts for path in paths]
    names = {each[0] for each in parts if len(each) > 1}
    if len(names) < 2 or any(len(each) == 1 for each in parts):
        return [None] * len(paths)
    return [each[0] for each in parts]


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
        raise BadInputError(
            f"{source}: {len(bad)} of {len(kept) + len(bad)} images cannot be read; at most 5% allowed\n{format_unreadable(bad, 3)}"
        )
    return kept, tuple(bad)


def _find_defect(path: Path) -> str | None:
    from optpipe.models.inputs.images import find_read_error

    try:
        str(path).encode()  # manifests and tables hold names as UTF-8
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return find_read_error(path)
