"""An artifact of several files is identified by all of them; one of a single file by that file's hash, as it always was."""

from types import SimpleNamespace

import pytest

from optpipe.models.artifacts.engine import hash_engine, measure_engine

FILES = {"model.pt2": ("aa", 5), "batch-8.pt2": ("bb", 7), "build.log": ("cc", 100)}


def make_entry(more_files, files=FILES):
    records = {name: SimpleNamespace(sha256=sha256, size_bytes=size) for name, (sha256, size) in files.items()}
    return SimpleNamespace(
        info=SimpleNamespace(file="model.pt2", more_files=more_files),
        manifest=SimpleNamespace(files=records),
        sha256=lambda name: records[name].sha256,
    )


def test_one_file_is_its_hash():
    assert hash_engine(make_entry(())) == "aa"
    assert measure_engine(make_entry(())) == 5


@pytest.mark.parametrize("name", ["model.pt2", "batch-8.pt2"])
def test_every_file_that_is_loaded_counts(name):
    entry = make_entry(("batch-8.pt2",))
    other = make_entry(("batch-8.pt2",), {**FILES, name: ("dd", 1)})
    assert hash_engine(entry) != hash_engine(other)
    assert hash_engine(entry) == hash_engine(make_entry(("batch-8.pt2",), {**FILES, "build.log": ("dd", 1)}))
    assert measure_engine(entry) == 12
