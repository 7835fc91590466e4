"""Arrays are read as they were written, whatever they are called."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.workspace.arrays import read_arrays, write_arrays

ODD = st.sampled_from(
    ["file", "allow_pickle", "args", "kwds", "arr_0", "x", "x.npy", "x.npy.npy", "a/b:0", "..", ""]
)
ANY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=50, deadline=None)
@given(st.sets(ODD | ANY, max_size=8))
def test_every_name_has_its_own_array(names) -> None:
    arrays = {each: np.full((2, number), number, np.int64) for number, each in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "arrays.npz")
        write_arrays(path, arrays)
        read = read_arrays(path)
    assert read.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(read[name], values)


def test_numpy_reads_the_same_file(tmp_path) -> None:
    write_arrays(tmp_path / "a.npz", {"file": np.arange(3), "x": np.array(2.5, np.float16)})
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["file"].tolist() == [0, 1, 2]
        assert stored["x"] == np.float16(2.5)


def test_objects_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        write_arrays(tmp_path / "a.npz", {"x": np.array([{"a": 1}], dtype=object)})
