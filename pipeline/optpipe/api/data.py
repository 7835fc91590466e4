"""Samples for calibration, verification, and evaluation."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.api.arguments import check_arguments
from optpipe.api.door import keep_caller_state, speak_of_arguments
from optpipe.core.errors import BadInputError
from optpipe.core.events import Listener

if TYPE_CHECKING:
    from optpipe.core.card import ModelCard
    from optpipe.models.inputs.drawn import DrawnData, StoredData
    from optpipe.workspace.store import Store


class Data:
    """Samples, drawn once and stored, with a hash that does not depend on their order.

    `source` is a loader or another iterable of batches (arrays or tensors, tuples of them with the
    labels last, `(inputs, labels)`, or mappings by input name with `labels`); a torch Dataset,
    whose items are single samples; an array or tensor, (samples, ...); a tuple of arrays, one for
    each input, and the labels; a mapping of arrays or a polars frame by input name; or the path of
    a folder of images, a JSON Lines file of texts, tensors (.npz, .npy, Polygraphy's JSON), or a
    Python file with `CALIBRATION`, as on the command line. `count` limits the samples: of an iterable the first ones are taken, of
    arrays and frames a random draw by `seed`. `axes` names the axis of samples of a column (by
    position or name) where it is not 0, or None for a value that all samples of a batch share.

    Raises BadInputError for a source that yields nothing, or anything but arrays and tensors; an exception of the user's loader is
    its cause.

    >>> import numpy as np, optpipe as op
    >>> images, labels = np.zeros((4, 8), np.float32), np.array([0, 1, 1, 0])
    >>> op.Data((images, labels))
    Data(tuple, 4 samples)
    >>> op.Data(images).sha256 == op.Data(images[::-1]).sha256
    True
    """

    @check_arguments
    @speak_of_arguments()
    def __init__(
        self,
        source: Any,
        *,
        count: int | None = None,
        seed: int = 0,
        axes: Mapping[str | int, int | None] | None = None,
        name: str | None = None,
    ) -> None:
        _require_numbers(count, seed)
        self.path: Path | None = None
        self.count_limit, self.seed = count, seed
        self._drawn: DrawnData | None = None
        if isinstance(source, Data):
            raise BadInputError("this is a Data already")
        if isinstance(source, str | os.PathLike):
            self._take_path(Path(source))
        else:
            from optpipe.models.inputs.program_data import draw_data

            with keep_caller_state():
                self._drawn = draw_data(source, count, seed, axes, name)

    def _take_path(self, path: Path) -> None:
        from optpipe.models.inputs.program_data import draw_data, draw_python_file
        from optpipe.models.inputs.task_data import PYTHON_SUFFIX, hash_data
        from optpipe.models.inputs.tensor_files import holds_tensors, read_columns

        if not path.exists():
            raise BadInputError(f"{path}: no such file or folder")
        if path.suffix.lower() == PYTHON_SUFFIX and path.is_file():
            with keep_caller_state():
                self._drawn = draw_python_file(path, self.count_limit, self.seed)
            return
        if self.count_limit is not None and holds_tensors(path):
            columns = read_columns(path)
            self._drawn = draw_data(columns, self.count_limit, self.seed, None, path.stem)
            return
        self.path, self._sha256 = path, hash_data(path)

    @property
    def sha256(self) -> str:
        """Hash of the samples and their truths, in any order; for a path, hash over its files."""
        return self._sha256 if self._drawn is None else self._drawn.sha256

    def __len__(self) -> int:
        """The number of samples; raises TypeError for a path, whose samples are known only with a model."""
        if self._drawn is None:
            raise TypeError("the samples of a path are known only with a model")
        return self._drawn.count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"Data({self.path})"
            if self._drawn is None
            else f"Data({self._drawn.name}, {self._drawn.count} samples)"
        )

    def store_for(
        self, card: "ModelCard", store: "Store", listener: Listener
    ) -> "tuple[Path, StoredData | None]":
        """The path to read for a model, and the stored samples; of a path itself, or a manifest of `count` of its samples."""
        if self._drawn is not None:
            from optpipe.models.inputs.drawn import store_data

            stored = store_data(self._drawn, card, store, listener)
            return stored.path, stored
        assert self.path is not None
        from optpipe.models.inputs.task_data import hash_data

        if hash_data(self.path) != self._sha256:
            raise BadInputError(
                f"{self.path} has changed since Data() read it\nmake a new Data of it"
            )
        if self.count_limit is None:
            return self.path, None
        from optpipe.models.inputs.task_data import write_subset

        folder = store.workspace / "calibration"
        return write_subset(self.path, card, self.count_limit, self.seed, folder, listener), None


def _require_numbers(count: int | None, seed: int) -> None:
    """Raises BadInputError for a `count` or `seed` below its minimum."""
    if count is not None and count < 1:
        raise BadInputError(f"count {count}: expected a whole number of at least 1")
    if seed < 0:
        raise BadInputError(f"seed {seed}: expected a whole number of at least 0")


def resolve_data_argument(data: "Data | str | os.PathLike[str] | Any | None") -> Data | None:
    """A Data of anything that Data() takes; None stays None."""
    return data if data is None or isinstance(data, Data) else Data(data)
