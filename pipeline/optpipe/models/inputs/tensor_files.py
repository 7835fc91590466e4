"""Files of tensors: `.npz`, `.npy`, and the JSON of Polygraphy's inputs (`polygraphy.json.save_json`).

A folder holds files of samples, one after another by name; or one `.npy` for each input, named after it. Whatever a file
declares is compared with what it holds before memory is taken.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from optpipe.core.errors import BadInputError, first_line, read_as_user_file
from optpipe.core.files import get_memory_bytes, open_user_file, read_user_bytes
from optpipe.core.quantity import format_bytes
from optpipe.workspace.arrays import read_arrays

NPZ, NPY, JSON = ".npz", ".npy", ".json"
FORMS = "a .npz with an array per input, a .npy of the only input, Polygraphy's JSON, or a folder of them"
_POLYGRAPHY = b"polygraphy_class"
_LAST_BYTES = 200
"""Polygraphy writes the class of an array behind the array, so that every file ends with one."""
TRUSTED_BYTES, MOST_EXPANSION = 2**30, 100
"""A file may unpack to so many bytes, or so many times its own size; data of a model do not shrink to a hundredth."""
_BESIDE = {"", ".md", ".txt"}
"""Suffixes of files that may lie beside the `.npy` files of a folder."""

NamedArrays = dict[str, NDArray[Any]]


def holds_tensors(source: Path) -> bool:
    """Whether a file, or any file of a folder, holds tensors; a folder of other data may hold a `.npy` too."""
    if not source.is_dir():
        return source.suffix.lower() in (NPZ, NPY) or _is_polygraphy(source)
    visible = [path for path in source.iterdir() if not path.name.startswith(".")]
    suffixes = {path.suffix.lower() for path in visible if path.is_file()}
    return (
        NPZ in suffixes
        or (NPY in suffixes and suffixes <= {NPY, *_BESIDE})
        or (JSON in suffixes and any(map(_is_polygraphy, visible)))
    )


def read_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a `.npz`; nothing for other files, whose arrays have no names."""
    if source.suffix.lower() != NPZ:
        return {}
    with read_as_user_file(source, "tensors", f"give {FORMS}"):
        return {name: values.shape for name, values in _read_npz(source).items()}


def read_columns(source: Path) -> dict[str | int, NDArray[Any]]:
    """The arrays of a `.npz` by name, or that of a `.npy` as column 0. Raises BadInputError for other sources."""
    with read_as_user_file(source, "tensors", f"give {FORMS}"):
        if source.suffix.lower() == NPZ and source.is_file():
            return dict(_read_npz(source).items())
        if source.suffix.lower() == NPY and source.is_file():
            return {0: _read_npy(source)}
    raise BadInputError(
        f"{source}: a part of it cannot be drawn\ngive a .npz or a .npy, or leave count out"
    )


def iterate_arrays(source: Path, inputs: Sequence[str]) -> Iterator[tuple[str, NamedArrays]]:
    """Yields the place of each group of arrays, and the arrays by name; `inputs` are the names of the model's.

    Raises BadInputError for a `.npy` if the model has several inputs, and for a file that declares more than it holds.
    """
    if not source.is_dir():
        yield from _iterate_file(source, inputs)
        return
    files = sorted(path for path in source.iterdir() if path.suffix.lower() in (NPZ, NPY, JSON))
    arrays = {path.stem: path for path in files if path.suffix.lower() == NPY}
    if arrays and set(inputs) <= arrays.keys():
        yield str(source), {name: _read_npy(path) for name, path in arrays.items()}
        return
    for path in files:
        if path.suffix.lower() != JSON or _is_polygraphy(path):
            yield from _iterate_file(path, inputs)


def _iterate_file(path: Path, inputs: Sequence[str]) -> Iterator[tuple[str, NamedArrays]]:
    match path.suffix.lower():
        case ".npy":
            if len(inputs) != 1:
                names = ", ".join(f"{name}.npy" for name in inputs)
                problem = f"{path} is one array, and the model has {len(inputs)} inputs"
                raise BadInputError(f"{problem}; give a folder with {names}, or a .npz")
            yield str(path), {inputs[0]: _read_npy(path)}
        case ".json":
            yield from _iterate_polygraphy(path)
        case _:
            yield str(path), _read_npz(path)


def _read_npz(path: Path) -> NamedArrays:
    with open_user_file(path) as opened, zipfile.ZipFile(opened) as packed:
        unpacked = sum(member.file_size for member in packed.infolist())
        _require_room(path, unpacked)
        if unpacked > max(TRUSTED_BYTES, MOST_EXPANSION * path.stat().st_size):
            problem = f"{path} has {format_bytes(path.stat().st_size)} and unpacks to {format_bytes(unpacked)}"
            raise BadInputError(problem, remedy="store what it holds uncompressed (numpy.savez)")
        for member in packed.infolist():
            with packed.open(member) as file:
                _require_whole(f"{path}, {member.filename}", file, member.file_size)
    with _refuse_objects(str(path)):
        return read_arrays(path)


def _read_npy(path: Path) -> NDArray[Any]:
    with open_user_file(path) as file:
        _require_room(path, path.stat().st_size)
        _require_whole(str(path), file, path.stat().st_size)
        file.seek(0)
        with _refuse_objects(str(path)):
            values: NDArray[Any] = np.load(file, allow_pickle=False)
    return values


def _require_room(path: Path, size_bytes: int) -> None:
    """Raises BadInputError for arrays that would take more than half of this machine's memory; holes in a file count too."""
    if size_bytes > get_memory_bytes() // 2:
        raise BadInputError(
            f"{path} unpacks to {format_bytes(size_bytes)}, more than half of this machine's memory"
        )


@contextmanager
def _refuse_objects(where: str) -> Iterator[None]:
    """Raises BadInputError for an array of Python objects, which only a pickle holds: NumPy's advice is to run its code."""
    try:
        yield
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        problem = (
            f"{where} holds Python objects, which are not read, because reading them can run code"
        )
        way_out = "store numbers: numpy.save or numpy.savez of values.astype('float32'), one shape for all samples"
        raise BadInputError(problem, remedy=way_out) from error


def _require_whole(where: str, file: IO[bytes], size_bytes: int) -> None:
    """Raises BadInputError for a .npy whose header declares more than `size_bytes`, since NumPy allocates what it declares."""
    header = np.lib.format
    read = {(1, 0): header.read_array_header_1_0, (2, 0): header.read_array_header_2_0}.get(
        header.read_magic(file)
    )
    shape, _, dtype = read(file) if read else ((), False, np.dtype("uint8"))
    if (declared_bytes := prod(shape) * dtype.itemsize) > size_bytes:
        raise BadInputError(
            f"{where} declares {format_bytes(declared_bytes)}, but holds {format_bytes(size_bytes)}"
        )


def _is_polygraphy(path: Path) -> bool:
    if path.suffix.lower() != JSON or not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LAST_BYTES, 0))
        return _POLYGRAPHY in file.read()


def _iterate_polygraphy(path: Path) -> Iterator[tuple[str, NamedArrays]]:
    """The arrays of each call: a list of inputs by name, or those of one call."""
    from polygraphy.exception import PolygraphyException
    from polygraphy.json import from_json
    from polygraphy.logger import G_LOGGER

    text = read_user_bytes(path, get_memory_bytes() // 4).decode()
    try:
        # it prints what it raises
        with _refuse_objects(str(path)), G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            stored = from_json(text)
    except PolygraphyException as error:
        raise BadInputError(
            f"{path} cannot be read as inputs of Polygraphy: {first_line(error)}"
        ) from error
    calls = stored if isinstance(stored, list) else [stored]
    for number, arrays in enumerate(calls):
        if not isinstance(arrays, Mapping):
            raise BadInputError(
                f"{path} holds no inputs by name, as polygraphy.json.save_json writes them for a list of feed_dicts"
            )
        yield (
            f"{path}, inputs {number}",
            {str(name): np.asarray(values) for name, values in arrays.items()},
        )
