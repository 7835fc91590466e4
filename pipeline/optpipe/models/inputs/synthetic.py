"""Seeded stand-ins for real inputs, for when there are none; whoever uses them must say so."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

SMALLEST_VOCABULARY = 1000
"""Every vocabulary has as many."""


def make_synthetic_tensor(
    shape: Sequence[int], dtype: DTypeLike = np.float32, seed: int = 0, below: int | None = None
) -> NDArray[np.generic]:
    """Makes a tensor like a model's real input, different in every row of the batch.

    Four axes with 1 or 3 channels: images with the spectrum of photographs, zero mean, unit variance. Integers:
    uniform below `below`, or below TOKENS, as token identifiers are. Truth values: either. Everything else: standard normal.
    """
    kind = np.dtype(dtype)
    random = np.random.default_rng(seed)
    if kind.kind in "iu":
        return random.integers(0, min(below or SMALLEST_VOCABULARY, int(np.iinfo(kind).max) + 1), tuple(shape)).astype(
            kind
        )
    if kind.kind == "b":
        return random.integers(0, 2, tuple(shape)).astype(kind)
    if len(shape) == 4 and shape[1] in (1, 3):
        rows = [_make_photograph_noise(random, shape[2], shape[3], shape[1]) for _ in range(shape[0])]
        values = np.stack([np.moveaxis(row, -1, 0) for row in rows]) if rows else np.zeros(tuple(shape))
        return values.astype(kind)
    return random.standard_normal(tuple(shape)).astype(kind)


def make_synthetic_image(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Makes an 8-bit RGB image (height, width, 3): a photograph's spectrum, with edges of flat shapes in it."""
    random = np.random.default_rng(seed)
    levels = 127 + 48 * _make_photograph_noise(random, height, width, 3)
    rows, columns = np.ogrid[:height, :width]
    for _ in range(6):
        centre, radius = random.uniform(0, 1, 2) * (height, width), random.uniform(0.05, 0.25, 2) * (height, width)
        inside = ((rows - centre[0]) / max(radius[0], 1)) ** 2 + ((columns - centre[1]) / max(radius[1], 1)) ** 2 < 1
        levels[inside] = 0.4 * levels[inside] + 0.6 * random.uniform(0, 255, 3)
    return np.ascontiguousarray(np.clip(levels, 0, 255).astype(np.uint8))


def _make_photograph_noise(random: np.random.Generator, height: int, width: int, channels: int) -> NDArray[np.float64]:
    """Noise with amplitude 1/f, as natural scenes have (Field 1987); channels share most of their luminance."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    planes = np.fft.irfft2(
        np.fft.rfft2(random.standard_normal((channels + 1, height, width))) / frequency, s=(height, width)
    )
    mixed = 0.85 * planes[:1] + 0.35 * planes[1:]
    spread = mixed.std()
    return np.moveaxis((mixed - mixed.mean()) / (spread if spread > 0 else 1.0), 0, -1)
