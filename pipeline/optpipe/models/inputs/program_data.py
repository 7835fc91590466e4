"""Samples of a program's data: loaders, datasets, arrays, tensors, frames; and `CALIBRATION` of a Python file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, OptpipeError, require_file
from optpipe.core.events import Listener
from optpipe.models.inputs.drawn import DrawnData, draw_arrays, draw_items, store_data
from optpipe.models.inputs.task_data import PYTHON_SUFFIX
from optpipe.models.sources.python_file import UserCode, describe_user_error
from optpipe.workspace.store import Store

NAME = "CALIBRATION"


def draw_python_file(path: Path, count: int | None = None, seed: int = 0) -> DrawnData:
    """The samples of `CALIBRATION` in a Python file: anything that `op.Data` takes, or a function that returns it.

    Raises BadInputError for a file without it, and with the error and line of the user's code.

    `net.py` may have `CALIBRATION = DataLoader(...)`, or `def CALIBRATION(): yield {"x": ...}`.
    """
    require_file(path)
    code = UserCode(path)
    with code.running():
        source = getattr(code.import_definitions(), NAME, None)
        if source is None:
            way_out = "define it: a loader, arrays, or a function that returns them"
            raise BadInputError(f"{path} has no {NAME}\n{way_out}")
        try:
            if callable(source) and not isinstance(source, Iterable):
                source = source()
            return draw_data(source, count, seed, name=f"{path.name}:{NAME}")
        except OptpipeError as error:
            if error.__cause__ is None:
                raise
            reason = describe_user_error(error.__cause__)  # a user of a command sees no traceback
            raise BadInputError(f"{path}: {NAME} fails: {reason}") from error
        except (Exception, SystemExit) as error:
            raise BadInputError(f"{path}: {NAME} fails: {describe_user_error(error)}") from error


def store_python_file(
    path: Path,
    card: ModelCard,
    store: Store,
    listener: Listener,
    count: int | None = None,
    seed: int = 0,
) -> Path:
    """The stored samples of a Python file as the model takes them; any other path as it is.

    Raises BadInputError for samples that the model does not take.
    """
    if path.suffix.lower() != PYTHON_SUFFIX or not path.is_file():
        return path
    return store_data(draw_python_file(path, count, seed), card, store, listener).path


def draw_data(
    source: Any,
    count: int | None = None,
    seed: int = 0,
    axes: Mapping[str | int, int | None] | None = None,
    name: str | None = None,
) -> DrawnData:
    """The samples of a loader, a dataset, arrays, tensors, or a polars frame, as `op.Data` takes them; `name` is shown.

    Raises BadInputError for a source without samples, and for anything but numbers.
    """
    kind = type(source)
    called = name or kind.__name__
    if kind.__module__.partition(".")[0] == "polars":
        return draw_arrays(_columns_from_frame(source), called, count, seed, axes)
    if isinstance(source, Mapping):
        return draw_arrays(
            {str(key): column for key, column in source.items()}, called, count, seed, axes
        )
    if isinstance(source, np.ndarray) or hasattr(source, "detach"):
        return draw_arrays({0: source}, called, count, seed, axes)
    if isinstance(source, tuple):
        if not source:
            raise BadInputError("an empty tuple holds no samples")
        inputs, *rest = source
        if isinstance(inputs, tuple | Mapping) and len(rest) == 1:
            columns = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
            columns["labels" if isinstance(inputs, Mapping) else len(columns)] = rest[0]
            return draw_arrays(columns, called, count, seed, axes)
        return draw_arrays(dict(enumerate(source)), called, count, seed, axes)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and _is_dataset(source):
        return draw_items(
            (source[index] for index in range(len(source))), called, count, single=True, axes=axes
        )
    if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise BadInputError(
            f"{called} holds no samples\ngive a loader, arrays, tensors, a polars frame, or the path of a folder or file"
        )
    return draw_items(source, called, count, axes=axes)


def _is_dataset(source: Any) -> bool:
    """Whether it is a map-style torch Dataset, whose items are samples."""
    return any(
        f"{base.__module__}.{base.__name__}" == "torch.utils.data.dataset.Dataset"
        for base in type(source).__mro__
    )


def _columns_from_frame(frame: Any) -> dict[str | int, Any]:
    """The columns of a polars frame as arrays; lists become rows, which must have one length."""
    columns: dict[str | int, Any] = {}
    for series in frame:
        if series.null_count():
            raise BadInputError(
                f"column '{series.name}' has nulls\nremove these rows, or fill them"
            )
        if series.dtype.is_nested():
            if not str(series.dtype).startswith(("List", "Array")):
                raise BadInputError(
                    f"column '{series.name}' is {str(series.dtype).partition('(')[0]}\ngive numbers, or lists of numbers"
                )
            try:
                columns[series.name] = np.stack([np.asarray(row.to_list()) for row in series])
            except ValueError as error:
                raise BadInputError(
                    f"column '{series.name}' has lists of different lengths"
                ) from error
            if str(series.dtype).find("Float32") >= 0:
                columns[series.name] = columns[series.name].astype(np.float32)
        else:
            numbers = series.dtype.is_numeric() or str(series.dtype) == "Boolean"
            columns[series.name] = series.to_numpy() if numbers else series.to_list()
    if not columns:
        raise BadInputError("the frame has no columns")
    return columns
