"""Tensors as data for any model, whose names, types, and shapes are checked before anything runs.

`labels` may accompany the inputs: an integer for each sample, or numbers for regression and several labels; and `group`, the
source of each sample.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import InputSpec
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import hash_arrays
from optpipe.core.records import group_pairs
from optpipe.models.inputs.rows import Arrays, count_rows, list_runs, to_rows
from optpipe.models.inputs.sample_set import SampleSet, SetFile, stratify_indices
from optpipe.models.inputs.stored_data import name_source
from optpipe.models.inputs.tensor_files import FORMS, iterate_arrays

LABELS = "labels"
LABEL_NAMES = (LABELS, "label", "targets", "target")
"""Names of an array with the truths, unless an input has that name."""
GROUP_NAMES = ("group", "groups")
"""Names of an array with the source of each sample, unless an input has that name."""


@dataclass(frozen=True)
class TensorSet(SampleSet):
    """Rows by input; `files[].path` is `PART:ROW`. Rows of one part have equal shapes and equal values of inputs without a batch axis."""

    format: ClassVar[str] = "optpipe.tensor-set/1"
    kind: ClassVar[str] = "tensors"

    parts: tuple[Arrays, ...] = field(default=())

    def batches(self, size: int) -> Iterator[Arrays]:
        """The samples in order, at most `size` rows at a time, each time from one part."""
        places = (map(int, file.path.split(":")) for file in self.files)
        for part, rows in group_pairs((part, row) for part, row in places).items():
            for start in range(0, len(rows), size):
                yield {
                    name: value[rows[start : start + size]]
                    for name, value in self.parts[part].items()
                }

    def keep_usual_shapes(self) -> "TensorSet":
        shapes = [tuple(rows[name].shape[1:] for name in sorted(rows)) for rows in self.parts]
        groups = group_pairs(
            (shapes[int(file.path.partition(":")[0])], file) for file in self.files
        )
        most = max(groups.values(), key=len)
        return replace(self, files=tuple(most))


def read_tensor_set(
    source: Path, inputs: Sequence[InputSpec], count: int | None = None, seed: int = 0
) -> TensorSet:
    """The set in `source`, or a sample of `count`.

    Raises BadInputError for an unreadable file, and for a name, type or shape that the model does not take.
    """
    parts, labels, groups = [], [], []
    own = {spec.name for spec in inputs}
    names = [name for name in LABEL_NAMES if name not in own]
    of_groups = [name for name in GROUP_NAMES if name not in own]
    with read_as_user_file(source, "tensors", f"give {FORMS}"):
        for where, arrays in iterate_arrays(source, [spec.name for spec in inputs]):
            given = [name for name in names if name in arrays]
            marked = arrays.pop(given[0]) if given else None
            known = [arrays.pop(name) for name in of_groups if name in arrays]
            rows = check_rows(where, arrays, inputs)
            groups += _read_groups(where, known, count_rows(rows))
            labels += _read_labels(where, marked, count_rows(rows))
            parts += [
                {name: value[run] for name, value in rows.items()}
                for run in list_runs(inputs, rows)
            ]
    if not any(map(count_rows, parts)):
        raise BadInputError(f"{source} holds no samples; give {FORMS}")
    whole = tensor_set_from_parts(name_source(source), parts, labels)
    if len(groups) - groups.count(None) not in (0, len(groups)):
        raise BadInputError(f"{source}: some files have no array `group`, although others have one")
    files = tuple(
        replace(file, group=group) for file, group in zip(whole.files, groups, strict=True)
    )
    whole = replace(whole, files=files, root=source, seed=seed)
    if count is None or count >= len(files):
        return whole
    chosen = sorted(stratify_indices([file.label for file in files], count, seed)[:count])
    return replace(whole, files=tuple(files[index] for index in chosen))


def tensor_set_from_parts(
    name: str, parts: Sequence[Arrays], labels: Sequence[str | None] = ()
) -> TensorSet:
    remaining = chain(labels, repeat(None))
    files = tuple(
        SetFile(
            f"{index}:{row}",
            hash_arrays({key: value[row] for key, value in rows.items()}),
            next(remaining),
        )
        for index, rows in enumerate(parts)
        for row in range(count_rows(rows))
    )
    known = {label for label in labels if label is not None}
    names = tuple(sorted(known)) if all(label.isdecimal() for label in known) else ()
    return TensorSet(name, Path(), 0, files, names, parts=tuple(parts))


def _read_labels(where: str, marked: NDArray[Any] | None, count: int) -> list[str | None]:
    if marked is None:
        return [None] * count
    if marked.shape[:1] != (count,) or marked.dtype.kind not in "iufb":
        problem = f"{where}: labels are {marked.dtype} of {marked.shape}"
        raise BadInputError(
            f"{problem}; give one integer for each of the {count} samples, or numbers for regression and several labels"
        )
    if marked.dtype.kind == "f" and not np.isfinite(marked).all():
        raise BadInputError(f"{where}: labels contain NaN or infinity")
    if marked.dtype.kind in "bf" and (marked == marked.astype(np.int64)).all():
        marked = marked.astype(np.int64)
    return [json.dumps(label) for label in marked.tolist()]


def _read_groups(where: str, known: Sequence[NDArray[Any]], count: int) -> list[str | None]:
    """The source of each sample. Raises BadInputError for anything but a text or an integer for each."""
    if not known:
        return [None] * count
    if known[0].shape != (count,) or known[0].dtype.kind not in "iuU":
        problem = f"{where}: groups are {known[0].dtype} of {known[0].shape}"
        raise BadInputError(
            f"{problem}; give a string or an integer for each of the {count} samples"
        )
    return [str(group) for group in known[0].tolist()]


def check_rows(
    where: str, arrays: Mapping[str, NDArray[Any]], inputs: Sequence[InputSpec]
) -> dict[str, NDArray[Any]]:
    """Checks each array against its input; returns rows."""
    names = [spec.name for spec in inputs]
    for wrong, what in (
        (set(names) - set(arrays), "lacks input"),
        (set(arrays) - set(names), "has the unknown array"),
    ):
        if wrong:
            raise BadInputError(
                f"{where} {what} '{min(wrong)}'; the model takes {', '.join(names)}, and truths are an array '{LABELS}'"
            )
    counts, single = {}, set()
    for spec in inputs:
        value = _require_fit(where, arrays[spec.name], spec)
        if spec.batch is not None or value.ndim > len(spec.min):
            counts[spec.name] = value.shape[spec.batch or 0]
        else:
            single.add(spec.name)
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInputError(f"{where}: its inputs have different numbers of samples: {shown}")
    count = next(iter(counts.values()), 1)
    axes = {spec.name: None if spec.name in single else spec.batch or 0 for spec in inputs}
    return {
        name: np.ascontiguousarray(to_rows(arrays[name], axis, count))
        for name, axis in axes.items()
    }


def _is_mask(value: NDArray[Any]) -> bool:
    """Whether it holds only 0 and -inf, as a mask does that is added to scores."""
    return bool(((value == 0) | np.isneginf(value)).all() and (value == 0).any())


def _require_fit(where: str, value: NDArray[Any], spec: InputSpec) -> NDArray[Any]:
    """Checks an array. One without a batch axis may be one value for all samples, or have a leading axis of samples."""
    if str(value.dtype) != spec.dtype:
        way = f"; save it as .astype('{spec.dtype}')" if value.dtype.kind in "iufb" else ""
        raise BadInputError(
            f"{where}: input '{spec.name}' is {value.dtype}, and the model takes {spec.dtype}{way}"
        )
    shape = (
        value.shape[1:] if spec.batch is None and value.ndim == len(spec.min) + 1 else value.shape
    )
    fits = len(shape) == len(spec.min) and all(
        axis == spec.batch or low <= size <= high
        for axis, (size, low, high) in enumerate(zip(shape, spec.min, spec.max, strict=True))
    )
    if not fits or value.size == 0:
        more = ", or that after an axis of samples" if spec.batch is None else ""
        problem = (
            f"{where}: input '{spec.name}' is {'x'.join(map(str, value.shape)) or 'a single value'}"
        )
        raise BadInputError(f"{problem}, and the model takes {spec.format_profile()}{more}")
    if value.dtype.kind == "f" and not np.isfinite(value).all() and not _is_mask(value):
        raise BadInputError(f"{where}: input '{spec.name}' contains NaN or Inf; give finite values")
    if spec.below is not None and (value.max() >= spec.below or value.min() < -spec.below):
        wrong = value.max() if value.max() >= spec.below else value.min()
        problem = f"{where}: input '{spec.name}' contains {wrong}"
        raise BadInputError(f"{problem}, and the model looks it up in a table of {spec.below} rows")
    return value
