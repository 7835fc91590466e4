"""The inputs that a benchmark rotates through: real ones first, then seeded variations of them."""

import os
from collections.abc import Mapping
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.hashing import hash_arrays
from optpipe.core.measurement import InputPool
from optpipe.models.inputs.images import find_images, preprocess_batches
from optpipe.models.inputs.sequences import compute_padding
from optpipe.models.inputs.tensor_set import FORMS, holds_tensors, read_tensor_set

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
