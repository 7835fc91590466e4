"""The few inputs that a build verifies itself on: real ones wherever the model takes images."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.hashing import file_sha256, value_sha256
from optpipe.core.shipped import shipped
from optpipe.core.transform import CenterCrop, Transform
from optpipe.errors import BadInputError
from optpipe.inputs.images import batches, find_images
from optpipe.inputs.synthetic import synthetic_tensor

COUNT = 8
"""Samples per verification."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Where a model's verification inputs come from."""

    kind: str
    """`images` or `synthetic`."""
    files: tuple[Path, ...]
    sha256: str
    """Over the files' bytes, or over the seed and shapes of synthetic tensors."""


def samples_for(card: ModelCard, images: Path | None) -> Samples:
    """`images`, else the card's validation images, else the photographs that optpipe ships, else seeded tensors.

    Raises `BadInputError` where `images` are given for a model that takes none.
    """
    if card.transform is None:
        if images is not None:
            message = (
                f"--images: {card.name} has no image preprocessing on its card, so it cannot be verified on images"
            )
            raise BadInputError(message)
        seed = {"synthetic": 0, "inputs": [each.to_dict() for each in card.inputs]}
        return Samples("synthetic", (), value_sha256(seed))
    if images is None and "validation" in card.data:
        found = image_set_files(Path(card.data["validation"]))
    else:
        found = find_images(images or shipped("calibration") / "samples").paths
    files = tuple(found[index * len(found) // COUNT] for index in range(COUNT)) if len(found) > COUNT else found
    return Samples("images", files, value_sha256([file_sha256(path) for path in files]))


def image_set_files(manifest: Path) -> tuple[Path, ...]:
    """The files of an image-set manifest (`calibration/README.md`), in its order."""
    try:
        value = json.loads(manifest.read_text(encoding="utf-8"))
        return tuple(manifest.parent / value["root"] / each["path"] for each in value["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{manifest} is not a readable image-set manifest ({type(error).__name__})"
        raise BadInputError(message) from error


def sample_inputs(card: ModelCard, samples: Samples) -> dict[str, np.ndarray]:
    """`COUNT` rows of every input, or as many as a fixed batch needs; fewer files are repeated in turn."""
    count = max(min(COUNT, *(each.max[0] for each in card.inputs)), *(each.min[0] for each in card.inputs))
    if samples.kind == "synthetic" or card.transform is None:
        return {
            each.name: synthetic_tensor((count, *each.opt[1:]), each.dtype, seed=index).values
            for index, each in enumerate(card.inputs)
        }
    image = card.inputs[0]
    transform = _cropped(card.transform, image.opt[2], image.opt[3])
    rows = np.concatenate(list(batches(samples.files, transform, len(samples.files), threads=2)))
    return {image.name: np.ascontiguousarray(rows[np.arange(count) % len(rows)])}


def _cropped(transform: Transform, height: int, width: int) -> Transform:
    """A transform that leaves the picture's own shape, cut to the shape at hand so that pictures share a batch."""
    if transform.size is not None:
        return transform
    before = (transform.decode, *transform.geometry)
    return Transform((*before, CenterCrop(height, width), *transform.steps[len(before) :]))
