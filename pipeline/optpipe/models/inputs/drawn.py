"""Samples drawn from a Python program's data: arrays, tensors, frames, loaders; and their place in the store.

A source is drawn once. Its samples are columns of rows, (samples, ...), by position or by name; which of them are inputs and
which is the truth is known only with a model. Samples are stored in the order of their hashes, so that the same data in
another order are the same entry, with the same hash.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError, first_line
from optpipe.core.events import Listener
from optpipe.core.files import get_memory_bytes, hash_arrays, hash_text
from optpipe.core.quantity import format_bytes
from optpipe.core.records import group_pairs
from optpipe.core.values import describe_elements, is_integer
from optpipe.models.inputs.rows import lay_out
from optpipe.models.inputs.stored_data import FILE, FOLDER, DataInfo
from optpipe.models.inputs.tensor_set import GROUP_NAMES, LABEL_NAMES, LABELS, check_rows
from optpipe.workspace.arrays import write_arrays
from optpipe.workspace.entry import Entry
from optpipe.workspace.store import Store

TRUTHS = (LABELS, "label", "targets", "target", "truth", "truths")
"""Names of a column with truths, in data whose columns have names."""
NUMBERS = "biuf"
"""The kinds of NumPy's types that models take."""
Column = str | int
Truths = Sequence[Any]


@dataclass(frozen=True)
class DrawnPart:
    """Samples of one shape: rows by column, and the truths if the source keeps them apart."""

    where: str
    columns: Mapping[Column, NDArray[Any]]
    truths: Truths | None = None
    groups: NDArray[np.int64] | None = None
    """The source of each sample, if the source names them and the columns are the model's inputs."""

    @property
    def count(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True)
class DrawnData:
    """Everything that was drawn from a source."""

    name: str
    parts: tuple[DrawnPart, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    def hash_samples(self) -> list[tuple[str, int, int]]:
        """The hash, part, and row of each sample, ordered by hash."""
        hashes = []
        for number, part in enumerate(self.parts):
            for row in range(part.count):
                own = {str(key): rows[row] for key, rows in part.columns.items()}
                sha256 = hash_arrays(own)
                if part.truths is not None:
                    sha256 = hash_text(f"{sha256} {_show_truth(part.truths[row])}")
                hashes.append((sha256, number, row))
        return sorted(hashes)

    @property
    def sha256(self) -> str:
        return hash_text("\n".join(sha256 for sha256, _, _ in self.hash_samples()))


@dataclass(frozen=True)
class StoredData:
    """Data in the store, as the model takes them: `path` for everything that reads data, and a truth per sample, in order."""

    entry: Entry[DataInfo]
    path: Path
    truths: Truths | None


def _show_truth(value: Any) -> str:
    return hash_arrays({"": value}) if isinstance(value, np.ndarray) else repr(value)


def draw_arrays(
    columns: Mapping[Column, Any],
    name: str,
    count: int | None,
    seed: int,
    axes: Mapping[Column, int | None] | None = None,
) -> DrawnData:
    """Whole columns; `count` of their rows are drawn at random by `seed`. Raises BadInputError if their lengths differ."""
    part = _make_part(name, columns, axes or {})
    if count is None or count >= part.count:
        return DrawnData(name, (part,), _note_few(name, part.count, count))
    rows = sorted(np.random.default_rng(seed).permutation(part.count)[:count].tolist())
    return DrawnData(name, (_take_rows(part, rows),))


def draw_items(
    items: Iterable[Any],
    name: str,
    count: int | None,
    *,
    single: bool = False,
    axes: Mapping[Column, int | None] | None = None,
) -> DrawnData:
    """The first `count` samples of `items`, each a batch, or one sample if they are `single`.

    Raises BadInputError, with the user's own exception as its cause, if they cannot be read; and for anything but arrays and
    tensors, for nothing, and for items that do not fit together.
    """
    parts: list[DrawnPart] = []
    drawn, size_bytes, limit = 0, 0, get_memory_bytes() // 2
    for where, item in _iterate(items, name):
        part = _part_from_item(where, item, single=single, axes=axes or {})
        if parts:
            _require_alike(parts[0], part)
        if count is not None and drawn + part.count > count:
            part = _take_rows(part, list(range(count - drawn)))
        drawn += part.count
        size_bytes += sum(rows.nbytes for rows in part.columns.values())
        if size_bytes > limit:
            raise BadInputError(
                f"{name}: {drawn} samples take {format_bytes(size_bytes)}, more than half of this machine's memory\n"
                "draw fewer: count="
            )
        parts.append(part)
        if count is not None and drawn >= count:
            break
    if not drawn:
        way = "give a loader or iterable with at least one sample"
        if isinstance(items, Iterator):
            way += "; an iterator gives its samples once, so make one Data of it for several uses"
        raise BadInputError(f"{name} yields nothing\n{way}")
    return DrawnData(name, tuple(parts), _note_few(name, drawn, count))


def _note_few(name: str, available: int, count: int | None) -> tuple[str, ...]:
    few = count is not None and available < count
    return (f"{name} has only {available} samples, not {count}; using all of them",) if few else ()


def _iterate(items: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    try:
        iterator = iter(items)
    except Exception as error:
        raise BadInputError(
            f"{name} cannot be read: {type(error).__name__}: {first_line(error)}"
        ) from error
    for number in count_up():
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise BadInputError(
                f"{name} fails at item {number}: {type(error).__name__}: {first_line(error)}\nits own traceback is above"
            ) from error
        yield f"{name}, item {number}", item


def _part_from_item(
    where: str, item: Any, *, single: bool, axes: Mapping[Column, int | None]
) -> DrawnPart:
    columns: Mapping[Column, Any]
    truths: Any = None
    if isinstance(item, Mapping):
        columns = {str(key): value for key, value in item.items()}
    elif (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], tuple | list | Mapping)
    ):
        inner, truths = item
        columns = dict(inner) if isinstance(inner, Mapping) else dict(enumerate(inner))
    elif isinstance(item, tuple | list):
        columns = dict(enumerate(item))
    else:
        columns = {0: item}
    if not columns:
        raise BadInputError(f"{where} is empty\ngive tensors or arrays")
    if single:
        columns = {key: _add_axis(value) for key, value in columns.items()}
        truths = None if truths is None else _add_axis(truths)
    if truths is not None:
        columns = {**columns, _choose_truths_key(columns): truths}
    return _make_part(where, columns, axes)


def _choose_truths_key(columns: Mapping[Column, Any]) -> Column:
    """The next place, or a name of truths that no column has."""
    if 0 in columns:
        return len(columns)
    return next((name for name in TRUTHS if name not in columns), LABELS)


def _add_axis(value: Any) -> Any:
    array = to_array(value)
    return [value] if array is None else array[np.newaxis]


def to_array(value: Any) -> NDArray[Any] | None:
    """An array of a NumPy array, a dense tensor, or numbers; None for anything else. BF16 becomes FP32, which holds its values."""
    if isinstance(value, np.ndarray):
        holds_numbers = value.dtype.kind in NUMBERS and not np.ma.is_masked(value)
        return np.asarray(value) if holds_numbers else None
    if hasattr(value, "detach"):
        if value.is_meta or str(value.layout) != "torch.strided" or value.is_complex():
            return None
        tensor = value.detach().cpu()
        return np.asarray(
            (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        )
    if isinstance(value, bool | int | float | np.generic):
        return np.asarray(value)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(number, int | float) for number in value)
    ):
        return np.asarray(value)
    return None


def _make_part(
    where: str, columns: Mapping[Column, Any], axes: Mapping[Column, int | None]
) -> DrawnPart:
    """Raises BadInputError for columns that are no arrays (but texts may be truths), for numbers of rows that differ, and for axes
    that are not there."""
    if unknown := [key for key in axes if key not in columns]:
        shown = ", ".join(map(_name, columns))
        raise BadInputError(f"axes: {where} has no {_name(unknown[0])}; it has {shown}")
    if all(axes.get(key, 0) is None for key in columns):
        raise BadInputError(
            f"axes: no column of {where} has an axis of samples\nname it for one of them"
        )
    arrays: dict[Column, NDArray[Any]] = {}
    truths: Truths | None = None
    last = list(columns)[-1]
    for key, value in columns.items():
        array = _number_groups(value) if key in GROUP_NAMES else to_array(value)
        if array is None:
            listed = isinstance(value, list | tuple) or (
                isinstance(value, np.ndarray) and value.ndim > 0
            )
            if len(columns) > 1 and listed and (key in TRUTHS or key == last) and len(value):
                truths = list(value)
                continue
            raise BadInputError(f"{where}: {_name(key)} {_explain_no_numbers(value)}")
        axis = axes.get(key, 0)
        if axis is not None and not 0 <= axis < max(array.ndim, 1):
            raise BadInputError(
                f"axes: {where}: {_name(key)} has {array.ndim} axes, so its axis of samples cannot be {axis}"
            )
        if axis is not None and array.ndim <= axis:
            raise BadInputError(
                f"{where}: {_name(key)} is a single value without an axis of samples\ngive batches: (samples, ...)"
            )
        arrays[key] = array if axis is None else np.moveaxis(array, axis, 0)
    rows = {key: len(array) for key, array in arrays.items() if axes.get(key, 0) is not None}
    if truths is not None:
        rows[LABELS] = len(truths)
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{_name(key)} {size}" for key, size in rows.items())
        raise BadInputError(f"{where}: its columns have different numbers of samples: {shown}")
    count = next(iter(rows.values()))
    if not count:
        raise BadInputError(f"{where} has no samples")
    shared = {
        key: np.repeat(array[np.newaxis], count, axis=0)
        for key, array in arrays.items()
        if axes.get(key, 0) is None
    }
    return DrawnPart(where, {**arrays, **shared}, truths)


def _explain_no_numbers(value: Any) -> str:
    """What a column is that holds no numbers, and what to give instead."""
    if np.ma.is_masked(value):
        return "has masked values\nfill them with .filled(VALUE), or leave these samples out"
    if isinstance(value, np.ndarray):
        ragged = value.dtype == object and any(isinstance(part, np.ndarray) for part in value.flat)
        way = "give numbers, such as .astype('float32')"
        if value.dtype.kind in "SU":
            way = "texts come from a JSON Lines file"
        elif ragged:
            way = "stack samples of one shape with numpy.stack, or give them by an iterable of batches"
        return f"is an array of {describe_elements(value)}\n{way}"
    if hasattr(value, "detach"):
        if value.is_meta:
            return "is on the meta device, which holds no values\ngive tensors with values"
        if value.is_complex():
            return f"is {str(value.dtype).removeprefix('torch.')}\ngive real numbers"
        return (
            f"is a {str(value.layout).removeprefix('torch.')} tensor\nconvert it with .to_dense()"
        )
    way = "texts come from a JSON Lines file" if _holds_texts(value) else "give tensors or arrays"
    return f"is a {type(value).__name__}\n{way}, as (inputs, labels) or by name"


def _holds_texts(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(text, str) for text in value)
    )


def _number_groups(value: Any) -> NDArray[Any] | None:
    """The sources of samples as numbers, the same for the same name in every batch."""
    array = to_array(value)
    if array is not None:
        return array
    names = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return np.array([int(hash_text(name)[:15], 16) for name in names], np.int64)


def _name(key: Column) -> str:
    return f"column {key}" if isinstance(key, int) else f"'{key}'"


def _require_alike(first: DrawnPart, other: DrawnPart) -> None:
    """Raises BadInputError if columns, their types, or their numbers of axes change."""
    if [*first.columns] != [*other.columns] or (first.truths is None) != (other.truths is None):
        raise BadInputError(
            f"{other.where} has other columns ({', '.join(map(_name, other.columns))}) than the first item "
            f"({', '.join(map(_name, first.columns))})"
        )
    for key, rows in first.columns.items():
        now = other.columns[key]
        if rows.dtype != now.dtype or rows.ndim != now.ndim:
            forms = [f"{array.dtype} with {array.ndim} axes" for array in (now, rows)]
            raise BadInputError(
                f"{other.where}: {_name(key)} is {forms[0]}, and {forms[1]} in the first item"
            )


def _take_rows(part: DrawnPart, rows: Sequence[int]) -> DrawnPart:
    truths = None if part.truths is None else [part.truths[row] for row in rows]
    index = np.asarray(rows, np.int64)
    return DrawnPart(part.where, {key: array[index] for key, array in part.columns.items()}, truths)


def store_data(drawn: DrawnData, card: ModelCard, store: Store, listener: Listener) -> StoredData:
    """The store entry of the samples as the model takes them. Raises BadInputError for a name, type, or shape that it does not."""
    fitted = [_fit_part(part, card) for part in drawn.parts]
    for note in drawn.notes:
        listener.warn(note)
    hashes = drawn.hash_samples()
    rows = [(number, row) for _, number, row in hashes]
    places = group_pairs(
        (
            tuple(fitted[number].columns[name].shape[1:] for name in fitted[number].columns),
            (number, row),
        )
        for number, row in rows
    )
    labeled = fitted[0].truths is not None
    grouped = fitted[0].groups is not None
    integers = labeled and all(is_integer(truth) for part in fitted for truth in part.truths or ())
    recipe = {
        "revision": 1,
        "samples": hash_text("\n".join(sha256 for sha256, _, _ in hashes)),
        "inputs": [[spec.name, spec.dtype, spec.batch] for spec in card.inputs],
        "truths": "column" if labeled else None,
    } | ({"groups": "column"} if grouped else {})

    def truth_of(place: tuple[int, int]) -> Any:
        part, row = place
        return (fitted[part].truths or ())[row]

    def make(folder: Path) -> DataInfo:
        (folder / FOLDER).mkdir()
        for number, group in enumerate(places.values()):
            held: dict[str, Any] = {}
            for spec in card.inputs:
                values = np.stack([fitted[part].columns[spec.name][row] for part, row in group])
                held[spec.name] = values if spec.batch is None else lay_out(values, spec.batch)
            if integers:
                held[_choose_name(LABEL_NAMES, card)] = np.array(
                    [truth_of(place) for place in group], np.int64
                )
            if grouped:
                groups = [fitted[part].groups for part, _ in group]
                rows_of = [row for _, row in group]
                held[_choose_name(GROUP_NAMES, card)] = np.array(
                    [
                        numbers[row]
                        for numbers, row in zip(groups, rows_of, strict=True)
                        if numbers is not None
                    ]
                )
            write_arrays(folder / FOLDER / f"{number:05}.npz", held)
        if len(places) == 1:
            (folder / FOLDER / "00000.npz").rename(folder / FILE)
            (folder / FOLDER).rmdir()
        return DataInfo(drawn.name, str(recipe["samples"]), len(hashes), labeled)

    entry, _ = store.produce(DataInfo, recipe, make, listener=listener)
    entry = store.verify_entry(entry)
    path = entry.file(FILE) if entry.file(FILE).is_file() else entry.file(FOLDER)
    order = [place for group in places.values() for place in group]
    truths = [truth_of(place) for place in order] if labeled else None
    return StoredData(entry, path, truths)


def _choose_name(names: Sequence[str], card: ModelCard) -> str:
    """The first of `names` that no input of the model has. Raises BadInputError if inputs have all of them."""
    taken = {spec.name for spec in card.inputs}
    free = next((name for name in names if name not in taken), None)
    if free is None:
        listed = ", ".join(names)
        raise BadInputError(f"{card.name} has inputs called {listed}\nrename one of them")
    return free


def _fit_part(part: DrawnPart, card: ModelCard) -> DrawnPart:
    """The part with its columns named as the model's inputs, and its truths apart."""
    names = [spec.name for spec in card.inputs]
    truths: Any = part.truths
    groups: NDArray[np.int64] | None = None
    columns: dict[Column, NDArray[Any]]
    if all(isinstance(key, int) for key in part.columns):
        positional = list(part.columns.values())
        if len(positional) == len(names) + 1 and truths is None:
            *positional, truths = positional
        if len(positional) != len(names):
            raise BadInputError(
                f"{part.where} has {len(part.columns)} columns, and {card.name} takes {', '.join(names)}\n"
                "give the inputs in this order, and the labels after them: (inputs, labels)"
            )
        columns = dict(zip(names, positional, strict=True))
    else:
        columns = {str(key): value for key, value in part.columns.items()}
        known = [name for name in GROUP_NAMES if name in columns and name not in names]
        groups = _check_groups(part.where, columns.pop(known[0])) if known else None
        extra = [key for key in columns if key not in names]
        if len(extra) > 1 and set(extra) <= {*TRUTHS}:
            several = " and ".join(f"'{key}'" for key in extra)
            raise BadInputError(f"{part.where} has several columns of truths, {several}; give one")
        if len(extra) == 1 and extra[0] in TRUTHS and truths is None:
            truths = columns.pop(extra[0])
        elif extra:
            raise BadInputError(
                f"{part.where} has the unknown column '{extra[0]}'; {card.name} takes {', '.join(names)}, and truths are called "
                f"{', '.join(TRUTHS)}"
            )
        if missing := [name for name in names if name not in columns]:
            raise BadInputError(f"{part.where} lacks the input '{missing[0]}' of {card.name}")
    laid_out = {
        spec.name: columns[spec.name]
        if spec.batch is None
        else np.moveaxis(columns[spec.name], 0, spec.batch)
        for spec in card.inputs
    }
    check_rows(part.where, laid_out, card.inputs)
    listed = (
        [truth.item() if getattr(truth, "ndim", 1) == 0 else truth for truth in truths]
        if truths is not None
        else None
    )
    _require_truths(part.where, listed or ())
    return DrawnPart(part.where, columns, listed, groups)


def _require_truths(where: str, truths: Truths) -> None:
    """Raises BadInputError for a sample whose truth is NaN or infinite; an array may hold NaN where its truth is unknown."""
    for number, truth in enumerate(truths):
        value = np.asarray(truth)
        if value.dtype.kind != "f" or not value.size:
            continue
        if np.isnan(value).all() or np.isinf(value).any():
            what = "infinite" if np.isinf(value).any() else "NaN"
            raise BadInputError(
                f"{where}: the truth of sample {number} is {what}\nleave the sample out"
            )


def _check_groups(where: str, values: NDArray[Any]) -> NDArray[np.int64]:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        problem = f"{where}: groups are {values.dtype} of {values.shape}"
        raise BadInputError(f"{problem}; give a string or an integer for each sample")
    return values.astype(np.int64)
