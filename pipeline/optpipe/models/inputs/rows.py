"""Converts between rows (samples, ...) and a model's batches, whose batch axes are in its card.

Everything that is stored or compared is rows; a value that all samples of a call share (a sampling rate) is repeated
for each. Tensors are data for any model: .npz, and folders of .npz, whose names, types and shapes are checked before
anything runs. `labels` may accompany the inputs: an integer for each sample, or numbers for regression and several labels.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optpipe.core.card import InputSpec, ModelCard, TensorSpec
from optpipe.core.errors import BadInputError, read_as_user_file
from optpipe.core.files import get_memory_bytes, hash_arrays, open_user_file
from optpipe.core.quantity import format_bytes
from optpipe.core.records import group_pairs
from optpipe.core.wording import Argument
from optpipe.models.inputs.sample_set import SampleSet, SetFile, stratify_indices
from optpipe.workspace.arrays import read_arrays

Arrays = Mapping[str, NDArray[Any]]


def batch_from_rows(card: ModelCard, rows: Arrays) -> dict[str, NDArray[Any]]:
    """One batch of the model from rows (samples, ...) by input."""
    return {each.name: lay_out(rows[each.name], each.batch) for each in card.inputs}


def lay_out(rows: NDArray[Any], axis: int | None) -> NDArray[Any]:
    """Moves the samples to `axis`; the first row if `axis` is None."""
    return np.asarray(rows[0]) if axis is None else np.ascontiguousarray(np.moveaxis(rows, 0, axis))


def to_rows(value: NDArray[Any], axis: int | None, count: int = 1) -> NDArray[Any]:
    """Inverse of `lay_out`; without a batch axis, the value is repeated `count` times."""
    value = np.asarray(value)
    return (
        np.repeat(value[np.newaxis], count, axis=0) if axis is None else np.moveaxis(value, axis, 0)
    )


def rows_from_outputs(
    specs: Sequence[TensorSpec], outputs: Arrays, count: int
) -> dict[str, NDArray[Any]]:
    """The outputs for `count` samples as rows. Raises BadInputError for an output without its batch axis."""
    found = {}
    for each in specs:
        value, axis = np.asarray(outputs[each.name]), each.batch
        if axis is not None and value.ndim <= axis:
            if count > 1:
                problem = f"output '{each.name}' is a single value for a whole batch"
                raise BadInputError(f"{problem}: leave it out, or give " + Argument("batch", 1))
            axis = None
        found[each.name] = to_rows(value, axis, count)
    return found


def count_rows(rows: Arrays) -> int:
    return len(next(iter(rows.values())))


def list_runs(inputs: Sequence[InputSpec], rows: Arrays) -> list[slice]:
    """Consecutive samples that can share a batch: they have the same values of inputs without a batch axis."""
    count = count_rows(rows)
    shared = [rows[each.name].reshape(count, -1) for each in inputs if each.batch is None]
    edges = [
        0,
        *(at for at in range(1, count) if any((one[at] != one[at - 1]).any() for one in shared)),
        count,
    ]
    return [slice(*pair) for pair in pairwise(edges)]


def list_batches(card: ModelCard, rows: Arrays, size: int | None = None) -> list[slice]:
    smallest, _, largest = card.batch_range
    found = []
    for run in list_runs(card.inputs, rows):
        step = min(size or largest, largest, run.stop - run.start)
        starts = range(run.start, run.stop, step)
        found += [
            slice(start, end)
            for start in starts
            if (end := min(start + step, run.stop)) - start >= smallest
        ]
    return found


def split_batches(
    card: ModelCard, rows: Arrays, size: int | None = None
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """All rows as batches of `size`, or of the profile's maximum, each with its number of samples.

    The rest is a smaller batch, or is left out if it is below the profile's minimum. Samples with different values of
    an input without a batch axis are in different batches.
    """
    for part in list_batches(card, rows, size):
        yield (
            batch_from_rows(card, {name: value[part] for name, value in rows.items()}),
            part.stop - part.start,
        )


def join_batches(name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One output's rows of all batches. Raises BadInputError if their axes differ or are missing."""
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1 or not all(part.ndim for part in parts):
        seen = "one value for a whole batch"
        if len(shapes) > 1:
            seen = f"{shapes[0]} for one batch and {shapes[1]} for another"
        problem = f"output '{name}' is {seen}, and outputs are compared input by input"
        raise BadInputError(f"{problem}: pad it in the model, or leave it out")
    return np.concatenate(parts)


def run_rows(
    card: ModelCard, rows: Arrays, run: Callable[[Arrays], Arrays], size: int | None = None
) -> dict[str, NDArray[Any]]:
    """Runs `run`, from a batch of inputs to outputs by name, on all of `rows` in the batches of `split_batches`; returns rows."""
    runs = [
        rows_from_outputs(card.outputs, run(batch), count)
        for batch, count in split_batches(card, rows, size)
    ]
    return {
        each.name: join_batches(each.name, [one[each.name] for one in runs])
        for each in card.outputs
    }


TOKENS_OF_A_POOL = 4096
"""Limits filled sequences, whose FP32 reference is computed on the CPU: 64 of 64 tokens, 8 of 512."""
FEWEST_SEQUENCES = 8
MASK = "attention_mask"


def read_length(card: ModelCard, rows: Arrays) -> int | None:
    return next((rows[name].shape[axis] for name, axis in _find_axes(card).items()), None)


def compute_padding(rows: Arrays) -> float:
    """Share of positions that the attention mask excludes; 0 without a mask."""
    return float(1 - np.mean(rows[MASK] != 0)) if MASK in rows else 0.0


def fill_sequences(card: ModelCard, rows: Arrays, length: int, most: int) -> dict[str, np.ndarray]:
    """Up to `most` rows of `length` tokens without padding, made of the rows' consecutive tokens, starting at each row in turn.

    `rows` are (samples, ...) by input; inputs without tokens are kept.
    """
    known, axes = count_rows(rows), _find_axes(card)
    mask = rows.get(MASK)
    if mask is None:
        mask = np.ones((known, read_length(card, rows) or 1))
    of, at = np.nonzero(mask)  # row and position of every token
    starts = np.searchsorted(of, np.arange(known))
    count = max(card.batch_range[0], min(most, max(FEWEST_SEQUENCES, TOKENS_OF_A_POOL // length)))
    # a second round over the rows starts one token later, so that all sequences differ
    begin = [starts[index % known] + index // known for index in range(count)]
    taken = (np.array(begin)[:, None] + np.arange(length)) % len(of)
    filled = {}
    for name, value in rows.items():
        if name in axes:
            tokens = np.moveaxis(value, axes[name], 1)[of[taken], at[taken]]
            filled[name] = np.ascontiguousarray(np.moveaxis(tokens, 1, axes[name]))
        else:
            filled[name] = value[np.arange(count) % known]
    return filled


def _find_axes(card: ModelCard) -> dict[str, int]:
    batches = {each.name: each.batch or 0 for each in card.inputs}
    return {
        name: axis if axis > batches[name] else axis + 1 for name, axis in card.length_axes.items()
    }


SUFFIX = ".npz"
LABELS = "labels"
LABEL_NAMES = (LABELS, "label", "targets", "target")
"""Names of an array with the truths, unless an input has that name."""
GROUP_NAMES = ("group", "groups")
"""Names of an array with the source of each sample, unless an input has that name."""
FORMS = "a .npz with an array per input, or a folder of them"


@dataclass(frozen=True)
class TensorSet(SampleSet):
    """Rows by input; `files[].path` is `PART:ROW`. Rows of one part have equal shapes and equal values of inputs without a batch axis."""

    format: ClassVar[str] = "optpipe.tensor-set/1"
    kind: ClassVar[str] = "tensors"

    parts: tuple[Arrays, ...] = field(default=())

    def batches(self, size: int) -> Iterator[Arrays]:
        """The samples in order, at most `size` rows at a time, each time from one part."""
        places = (map(int, each.path.split(":")) for each in self.files)
        for part, rows in group_pairs((part, row) for part, row in places).items():
            for start in range(0, len(rows), size):
                yield {
                    name: value[rows[start : start + size]]
                    for name, value in self.parts[part].items()
                }

    def keep_usual_shapes(self) -> "TensorSet":
        shapes = [tuple(rows[name].shape[1:] for name in sorted(rows)) for rows in self.parts]
        groups = group_pairs(
            (shapes[int(each.path.partition(":")[0])], each) for each in self.files
        )
        most = max(groups.values(), key=len)
        return replace(self, files=tuple(most))


def holds_tensors(source: Path) -> bool:
    return any(
        each.suffix.lower() == SUFFIX
        for each in (source.iterdir() if source.is_dir() else (source,))
    )


def read_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    if source.suffix.lower() != SUFFIX:
        return {}
    with read_as_user_file(source, "tensors", f"give {FORMS}"):
        _require_room(source)
        return {name: values.shape for name, values in read_arrays(source).items()}


def _require_room(source: Path) -> None:
    """Raises BadInputError for a .npz that declares more than the memory or its file holds, before unpacking it."""
    with open_user_file(source) as opened, zipfile.ZipFile(opened) as packed:
        size = sum(each.file_size for each in packed.infolist())
        if size > get_memory_bytes() // 2:
            raise BadInputError(
                f"{source} unpacks to {format_bytes(size)}, more than half of this machine's memory"
            )
        for each in packed.infolist():
            with packed.open(each) as file:
                _require_whole(f"{source}, {each.filename}", file, each.file_size)


def _require_whole(where: str, file: IO[bytes], size: int) -> None:
    """Raises BadInputError for a .npy of `size` bytes whose header declares more, since NumPy allocates what it declares."""
    header = np.lib.format
    read = {(1, 0): header.read_array_header_1_0, (2, 0): header.read_array_header_2_0}.get(
        header.read_magic(file)
    )
    shape, _, dtype = read(file) if read else ((), False, np.dtype("uint8"))
    if (declared := prod(shape) * dtype.itemsize) > size:
        raise BadInputError(
            f"{where} declares {format_bytes(declared)}, but holds {format_bytes(size)}"
        )


def read_tensor_set(
    source: Path, inputs: Sequence[InputSpec], count: int | None = None, seed: int = 0
) -> TensorSet:
    """The set in `source`, or a sample of `count`.

    Raises BadInputError for an unreadable file, and for a name, type or shape that the model does not take.
    """
    parts, labels, groups = [], [], []
    own = {each.name for each in inputs}
    names = [name for name in LABEL_NAMES if name not in own]
    of_groups = [name for name in GROUP_NAMES if name not in own]
    with read_as_user_file(source, "tensors", f"give {FORMS}"):
        for where, found in _iterate_feeds(source):
            given = [name for name in names if name in found]
            marked = found.pop(given[0]) if given else None
            known = [found.pop(name) for name in of_groups if name in found]
            rows = check_rows(where, found, inputs)
            groups += _read_groups(where, known, count_rows(rows))
            labels += _read_labels(where, marked, count_rows(rows))
            parts += [
                {name: value[run] for name, value in rows.items()}
                for run in list_runs(inputs, rows)
            ]
    if not any(map(count_rows, parts)):
        raise BadInputError(f"{source} holds no samples; give {FORMS}")
    whole = tensor_set_from_parts(source.resolve().name, parts, labels)
    if len(groups) - groups.count(None) not in (0, len(groups)):
        raise BadInputError(f"{source}: some files have no array `group`, although others have one")
    files = tuple(
        replace(each, group=group) for each, group in zip(whole.files, groups, strict=True)
    )
    whole = replace(whole, files=files, root=source, seed=seed)
    if count is None or count >= len(files):
        return whole
    chosen = sorted(stratify_indices([each.label for each in files], count, seed)[:count])
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
    return [json.dumps(each) for each in marked.tolist()]


def _read_groups(where: str, known: Sequence[NDArray[Any]], count: int) -> list[str | None]:
    """The source of each sample. Raises BadInputError for anything but a text or an integer for each."""
    if not known:
        return [None] * count
    if known[0].shape != (count,) or known[0].dtype.kind not in "iuU":
        problem = f"{where}: groups are {known[0].dtype} of {known[0].shape}"
        raise BadInputError(f"{problem}; give a text or an integer for each of the {count} samples")
    return [str(each) for each in known[0].tolist()]


def _iterate_feeds(source: Path) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    """Yields the file of each group of arrays, and the arrays by name."""
    files = (
        sorted(each for each in source.iterdir() if each.suffix.lower() == SUFFIX)
        if source.is_dir()
        else [source]
    )
    for file in files:
        _require_room(file)
        yield str(file), read_arrays(file)


def check_rows(
    where: str, found: Mapping[str, NDArray[Any]], inputs: Sequence[InputSpec]
) -> dict[str, NDArray[Any]]:
    """Checks each array against its input; returns rows."""
    names = [each.name for each in inputs]
    for wrong, what in (
        (set(names) - set(found), "lacks input"),
        (set(found) - set(names), "has the unknown array"),
    ):
        if wrong:
            raise BadInputError(
                f"{where} {what} '{min(wrong)}'; the model takes {', '.join(names)}, and truths are an array '{LABELS}'"
            )
    counts, single = {}, set()
    for each in inputs:
        value = _require_fit(where, found[each.name], each)
        if each.batch is not None or value.ndim > len(each.min):
            counts[each.name] = value.shape[each.batch or 0]
        else:
            single.add(each.name)
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInputError(f"{where}: its inputs have different numbers of samples: {shown}")
    count = next(iter(counts.values()), 1)
    axes = {each.name: None if each.name in single else each.batch or 0 for each in inputs}
    return {
        name: np.ascontiguousarray(to_rows(found[name], axis, count)) for name, axis in axes.items()
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
