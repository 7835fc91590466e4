"""Arrays by name in a `.npz`, whatever the names are.

`numpy.savez` takes names as keyword arguments, so that it has none for arrays called `file` or `allow_pickle`; and `numpy.load`
returns the array `x` for the name `x.npy` if the file has both.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from optpipe.core.files import open_user_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def write_arrays(path: Path, arrays: "Mapping[str, NDArray[Any]]") -> None:
    """Writes `arrays` by name, uncompressed. Raises ValueError for arrays of objects.

    >>> write_arrays(Path("inputs.npz"), {"file": np.zeros((2, 3))})  # doctest: +SKIP
    """
    import numpy as np

    with ZipFile(path, "w") as archive:
        for name, values in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(values), allow_pickle=False)


def read_arrays(path: Path) -> "dict[str, NDArray[Any]]":
    """All arrays of `path` by name. Raises ValueError for arrays of objects, and what `numpy.load` raises for a damaged file."""
    import numpy as np

    with open_user_file(path) as file, np.load(file, allow_pickle=False) as stored:
        return {name.removesuffix(".npy"): stored[name] for name in stored.zip.namelist()}
