"""Inputs for a build's verification and for benchmarks: real ones first, then seeded variations of them."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import InputSpec, ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.files import hash_arrays, hash_file, hash_value
from optpipe.core.measurement import InputPool
from optpipe.core.transform import CenterCrop, Transform
from optpipe.models.inputs.images import find_images, pick_evenly, preprocess_batches
from optpipe.models.inputs.rows import compute_padding, count_rows
from optpipe.models.inputs.synthetic import make_synthetic_tensor
from optpipe.models.inputs.tensor_set import FORMS, holds_tensors, read_tensor_set
from optpipe.models.inputs.text_set import SENTENCES, compute_max_tokens, encode_texts, pad_tokens
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.shipped import find_shipped_folder

SAMPLE_COUNT = 8
"""Samples per verification."""
TENSOR_ROWS = 64
"""Of tensors that are given, at most as many."""
LABELED_BYTES = 16 << 20
"""A labelled validation set is used up to this size of input tensors, so that a build can say how accurate it is."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Where a model's verification inputs come from."""

    kind: str
    """`images`, `texts`, `tensors` or `synthetic`."""
    files: tuple[Path, ...]
    """The images; for texts the tokenizer's file; for tensors the file or folder that holds them."""
    sha256: str
    """Over the files' bytes, or over the seed and shapes of synthetic tensors."""
    labels: tuple[int, ...] = ()
    """Class of each file, where the files are a model's own validation images, or of each row of tensors with labels."""
    count: int = 0
    """Rows of tensors; 0 for what is counted by its files."""


def choose_samples(card: ModelCard, images: Path | None, tokenizer: Path | None = None) -> Samples:
    """`images`, else the card's validation images, else the photographs that optpipe ships, else seeded tensors.

    `images` may hold tensors, which any model takes: their names, types and shapes are checked here. A text model with its
    `tokenizer` is verified on sentences.

    Raises `BadInputError` where `images` are given for a model that takes none.
    """
    if images is not None and holds_tensors(images):
        tensors = read_tensor_set(images, card.inputs)
        rows = tensors.first_rows(TENSOR_ROWS, card.batch_range[0])
        marked = tensors.files[: count_rows(rows)]
        labels = tuple(int(each.label) for each in marked if each.label is not None)
        return Samples("tensors", (images,), tensors.sha256, labels, count_rows(rows))
    if card.transform is None:
        if images is not None:
            reason = (
                f"--data: builds of {card.name} are verified on sentences of optpipe's own, not on texts"
                " (`optpipe evaluate MODEL --data PATH` judges them on yours)"
                if card.tokenization
                else f"--images: {card.name} has no image preprocessing in its card, so it cannot be verified on images"
            )
            raise BadInputError(f"{reason}\ngive its inputs as tensors: {FORMS}")
        if tokenizer is not None and card.tokenization is not None and get_package_version("tokenizers") is not None:
            known = {"sentences": list(SENTENCES), "tokenization": card.tokenization.to_dict()}
            return Samples("texts", (tokenizer,), hash_value(known))
        seed = {"synthetic": 0, "inputs": [each.to_dict() for each in card.inputs]}
        return Samples("synthetic", (), hash_value(seed))
    if images is None and "validation" in card.data:
        return _choose_labeled(card, Path(card.data["validation"]))
    files = find_images(images or find_shipped_folder("calibration") / "samples", SAMPLE_COUNT).paths
    return Samples("images", files, _hash_files(files))


def can_verify_on(card: ModelCard, data: Path) -> bool:
    """Whether `choose_samples` takes `data`: a folder of images for a model that takes images, or tensors."""
    return holds_tensors(data) or (card.transform is not None and data.is_dir())


def _choose_labeled(card: ModelCard, manifest: Path) -> Samples:
    image = card.inputs[0]
    count = max(SAMPLE_COUNT, LABELED_BYTES // (4 * math.prod(image.sample)))
    pairs = pick_evenly(tuple(read_labeled_files(manifest)), count)
    files = tuple(path for path, _ in pairs)
    labels = tuple(card.labels.index(label) for _, label in pairs if label in card.labels)
    return Samples("images", files, _hash_files(files), labels if len(labels) == len(files) else ())


def _hash_files(files: tuple[Path, ...]) -> str:
    return hash_value([hash_file(path) for path in files])


def read_labeled_files(manifest: Path) -> Iterator[tuple[Path, str]]:
    """The files of an image-set manifest with their labels; raises `BadInputError` where it cannot be read."""
    try:
        value = json.loads(manifest.read_text(encoding="utf-8"))
        for each in value["files"]:
            yield manifest.parent / value["root"] / each["path"], str(each.get("label") or "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{manifest} is not a readable image-set manifest ({type(error).__name__})") from error


def load_sample_inputs(card: ModelCard, samples: Samples) -> dict[str, np.ndarray]:
    """A row per file, or `COUNT` rows of synthetic tensors; repeated in turn until they fill the smallest batch."""
    if samples.kind == "texts":
        tokens = encode_texts(SENTENCES, samples.files[0], compute_max_tokens(card))
        least = card.batch_range[0]
        return pad_tokens(card, [tokens[index % len(tokens)] for index in range(max(len(tokens), least))])
    if samples.kind == "tensors":
        return read_tensor_set(samples.files[0], card.inputs).first_rows(TENSOR_ROWS, card.batch_range[0])
    count = max(len(samples.files) or SAMPLE_COUNT, card.batch_range[0])
    if samples.kind == "synthetic" or card.transform is None:
        return {each.name: _make_synthetic(each, count, index, card) for index, each in enumerate(card.inputs)}
    image = card.inputs[0]
    transform = _crop_transform(card.transform, image.opt[2], image.opt[3])
    rows = np.concatenate(list(preprocess_batches(samples.files, transform, SAMPLE_COUNT, threads=2)))
    return {image.name: np.ascontiguousarray(rows[np.arange(count) % len(rows)])}


def _make_synthetic(spec: InputSpec, count: int, seed: int, card: ModelCard) -> np.ndarray:
    shared = spec.batch is None and card.batched
    rows = make_synthetic_tensor((1 if shared else count, *spec.sample), spec.dtype, seed=seed, below=spec.below)
    return np.repeat(rows, count, axis=0) if shared else rows


def _crop_transform(transform: Transform, height: int, width: int) -> Transform:
    """A transform that leaves the image's own shape, cut to the shape at hand so that images share a batch."""
    if transform.size is not None:
        return transform
    before = (transform.decode, *transform.geometry)
    return Transform((*before, CenterCrop(height, width), *transform.steps[len(before) :]))


POOL_SIZE = 64


def vary_inputs(
    real: Mapping[str, NDArray[Any]], size: int, seed: int, shared: frozenset[str] = frozenset()
) -> dict[str, NDArray[Any]]:
    """`size` rows per input: the real ones, then copies of them rolled along their last axis by a seeded step.

    Inputs in `shared` have one value for a whole batch, and keep it.
    A rolled image has the same values, hence the same power draw and rounding, and no cache has seen it.
    """
    count = min(len(array) for array in real.values())
    steps = np.random.default_rng(seed).integers(1, 1 << 16, size)
    rows: dict[str, NDArray[Any]] = {}
    for name, array in real.items():
        made = [array[row] for row in range(min(count, size))]
        for row in range(count, size):
            same = name in shared or array.ndim < 2
            step = 1 + int(steps[row]) % max(array.shape[-1] - 1, 1)
            made.append(array[row % count] if same else np.roll(array[row % count], step, axis=-1))
        rows[name] = np.ascontiguousarray(np.stack(made))
    return rows


def load_image_pool(card: ModelCard, folder: Path) -> dict[str, NDArray[Any]]:
    """Up to SIZE images of `folder` as the model's first input, preprocessed as its card says; or rows of tensors."""
    if holds_tensors(folder):
        return read_tensor_set(folder, card.inputs).first_rows(POOL_SIZE, card.batch_range[0])
    if card.transform is None:
        raise BadInputError(
            f"--images: {card.name} has no image preprocessing in its card\n"
            f"omit --images to measure on the inputs that it was verified on, or give tensors ({FORMS})"
        )
    found = find_images(folder, POOL_SIZE)
    return {card.inputs[0].name: np.concatenate(list(preprocess_batches(found.paths, card.transform, 16, threads=2)))}


def save_pool(directory: Path, prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Writes each array to `directory`; returns name → file. Raises OSError with ENOSPC where the disk is full."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for index, (name, array) in enumerate(arrays.items()):
        path = directory / f"{prefix}{index}.npy"
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            if error.errno is None:  # NumPy's own, of fewer bytes written than there are
                raise OSError(ENOSPC, os.strerror(ENOSPC), str(path)) from error
            raise
        files[name] = str(path)
    return files


def describe_pool(
    kind: str, real: int, arrays: Mapping[str, NDArray[Any]], seed: int, lengths: tuple[int, int] | None = None
) -> InputPool:
    """How the pool is described in a measurement; `lengths` are those that the build takes, where its inputs are sequences."""
    size = min(len(array) for array in arrays.values())
    padding = 0.0 if lengths is None else compute_padding(arrays)
    known = 0 if kind == "synthetic" else real
    return InputPool(kind, size, known, seed, hash_arrays(dict(arrays)), padding=padding, lengths=lengths)
