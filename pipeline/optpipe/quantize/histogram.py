"""A histogram of magnitudes whose bins need no range: the leading bits of the float itself.

The bits of a positive float, read as an integer, grow with its value; dropping the last 14 leaves the exponent and nine
bits of mantissa: 512 bins per octave, each 0.2 % of its value wide or less. So one pass over the data is enough, bins
never have to be rescaled, and histograms of parts add up exactly, whatever the order. INT8 at full scale has 64 levels
in its top octave, eight times coarser than these bins.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIFT = 14
PER_OCTAVE = 1 << (23 - SHIFT)
BINS = 1 << (31 - SHIFT)
LOWEST = (127 - 32) * PER_OCTAVE
"""Magnitudes below 2**-32 count as zero."""
_CHUNK = 1 << 20
"""Elements per step on the CPU: the temporaries stay in the cache and memory does not depend on the tensor."""


Bins = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Lower edges, upper edges and counts of bins, in rising order."""


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Counts of |x| by bin, of values without and with a minus sign: (2, BINS) int64."""

    counts: NDArray[np.int64]

    @property
    def total(self) -> int:
        """How many elements were counted, zeros included."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """How many of them were zero, or too small to matter."""
        return int(self.counts[:, :LOWEST].sum())

    def nonzero(self) -> Bins:
        """The bins of both signs together that hold something above zero."""
        return _find_nonzero(self.counts.sum(axis=0))

    def nonzero_by_sign(self) -> tuple[Bins, ...]:
        """The same of the positive and of the negative values; a sign that has none is left out."""
        return tuple(_find_nonzero(each) for each in self.counts if each[LOWEST:].any())


def _find_nonzero(counts: NDArray[np.int64]) -> Bins:
    index = LOWEST + np.flatnonzero(counts[LOWEST:])
    return compute_edges(index), compute_edges(index + 1), counts[index].astype(np.float64)


def compute_edges(index: NDArray[np.intp]) -> NDArray[np.float64]:
    """The smallest magnitude in the bins `index`."""
    return (index.astype(np.uint32) << SHIFT).view(np.float32).astype(np.float64)


def count_magnitudes(values: NDArray[np.float32]) -> Magnitudes:
    """Counts finite `values` of any shape on the CPU."""
    counts = np.zeros(2 * BINS, np.int64)
    for part in _split_chunks(np.ascontiguousarray(values).reshape(-1).view(np.uint32)):
        found = np.bincount((part >> SHIFT).view(np.int32))  # the sign is the leading bit
        counts[: found.size] += found
    return Magnitudes(counts.reshape(2, BINS))


def _split_chunks(flat: NDArray[np.uint32]) -> "Iterator[NDArray[np.uint32]]":
    return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))


def count_on_device(values: Any, counts: Any) -> None:
    """Adds a torch float32 tensor's magnitudes to `counts`, (2 * BINS,) int64, where both lie; nothing is waited for.

    Zeros are left out, so that half of the atomic additions after a ReLU do not queue at one address; they are the
    difference to the number of elements.
    """
    import torch

    bins = (values.reshape(-1).view(torch.int32) >> SHIFT) & (2 * BINS - 1)
    ones = ((bins & (BINS - 1)) >= LOWEST).to(torch.int64)
    spread = torch.where(ones.bool(), bins, torch.arange(bins.numel(), device=bins.device, dtype=torch.int32) % LOWEST)
    counts.scatter_add_(0, spread.to(torch.int64), ones)
