"""The inputs that a measurement rotates through, so that no cache answers twice for the same question."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.models.inputs.rows import lay_out

if TYPE_CHECKING:
    import numpy as np

MAX_ROTATED_BATCHES = 8
MIN_ROTATED_BATCHES = 2
MAX_ROTATED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Rotation:
    """A few distinct batches; `rows[i]` says which inputs of the pool batch `i` is made of."""

    batches: tuple[Mapping[str, "np.ndarray"], ...]
    rows: tuple["np.ndarray", ...]

    @property
    def nbytes(self) -> int:
        """The size of all batches."""
        return sum(int(array.nbytes) for batch in self.batches for array in batch.values())

    def first(self, count: int) -> "Rotation":
        """The first `count` batches alone."""
        return Rotation(self.batches[:count], self.rows[:count])


def draw_rotation(
    pool: Mapping[str, "np.ndarray"],
    batch_size: int,
    seed: int,
    known: int = 0,
    axes: Mapping[str, int | None] | None = None,
) -> Rotation:
    """Draws up to MOST batches from the pool, each in another seeded order; a batch larger than the pool repeats it.

    The first `known` inputs have a reference: as long as there are unused ones, each batch gets one. `axes` says which axis
    of an input is the batch; what has none is the same for all rows of a batch.
    """
    import numpy as np

    size = min(len(array) for array in pool.values())
    one = sum(int(array[:1].nbytes) for array in pool.values()) * batch_size
    count = max(MIN_ROTATED_BATCHES, min(MAX_ROTATED_BATCHES, MAX_ROTATED_BYTES // max(one, 1)))
    generator = np.random.default_rng(seed)
    drawn = np.concatenate([generator.permutation(size) for _ in range(-(-batch_size * count // size))])
    rows = tuple(drawn[index * batch_size : (index + 1) * batch_size] for index in range(count))
    unused = iter(np.setdiff1d(np.arange(known), drawn[: count * batch_size]))
    for row in rows:
        if (row >= known).all():
            row[0] = next(unused, row[0])
    found = axes or {}
    batches = tuple({name: lay_out(array[row], found.get(name, 0)) for name, array in pool.items()} for row in rows)
    return Rotation(batches, rows)


def pool_from_files(files: Mapping[str, str]) -> dict[str, "np.ndarray"]:
    """Opens pools of inputs or reference outputs; the files are mapped, not read."""
    import numpy as np

    return {name: np.load(Path(path), mmap_mode="r", allow_pickle=False) for name, path in files.items()}


def make_unseen_batch(
    batch: Mapping[str, "np.ndarray"], seed: int, axes: Mapping[str, int | None] | None = None
) -> dict[str, "np.ndarray"]:
    """The batch with its values reordered along one axis by a seeded step: as realistic, and asked for the first time.

    What has no batch axis where others have one stays: it says how to read them.
    """
    import numpy as np

    step = int(np.random.default_rng(seed).integers(1, 1 << 16))
    found = axes or {}
    batched = any(found.get(name, 0) is not None for name in batch)
    return {
        name: array
        if array.ndim == 0 or (batched and found.get(name, 0) is None)
        else np.roll(array, 1 + step % max(array[0].size - 1, 1)).reshape(array.shape)
        for name, array in batch.items()
    }
