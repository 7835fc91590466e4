"""What a backend loads is what was verified, also if another engine lies in the build's place for a moment and is put back."""

import shutil

import pytest
from tests.fakes.entries import artifact_info, put

from optpipe.backends.onnxruntime import OnnxRuntime
from optpipe.backends.registry import load_artifact
from optpipe.core.errors import StageError
from optpipe.workspace.store import Store

HONEST, OTHER = b"the build", b"a faster build"


@pytest.fixture
def entry(tmp_path):
    files = {"model.onnx": HONEST, "weights.bin": b"weights"}
    info = artifact_info(more_files=("weights.bin",))
    return put(Store(tmp_path / "workspace"), info, {"of": "digits"}, files=files)


class Loaded:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def load(entry, monkeypatch, tmp_path):
    """Loads the entry, with a swap before and one after its file is read; gives what was read."""
    monkeypatch.setattr(OnnxRuntime, "list_files", lambda _, info: (info.file, *info.more_files))

    def load_with(swap, restore):
        read = []

        def open_file(_, folder, info, __):
            swap(folder)
            read.append((folder / info.file).read_bytes())
            restore(folder)
            return Loaded()

        monkeypatch.setattr(OnnxRuntime, "load", open_file)
        load_artifact(entry, Store(tmp_path / "workspace"))
        return read[0]

    return load_with


def move_away(folder):
    (folder / "model.onnx").rename(folder.parent / "aside")
    (folder / "model.onnx").write_bytes(OTHER)


def move_back(folder):
    (folder.parent / "aside").rename(folder / "model.onnx")


def overwrite(folder):
    (folder.parent / "times").touch()
    shutil.copystat(folder / "model.onnx", folder.parent / "times")
    (folder / "model.onnx").write_bytes(OTHER)


def write_back(folder):
    (folder / "model.onnx").write_bytes(HONEST)
    shutil.copystat(folder.parent / "times", folder / "model.onnx")


def link_away(folder):
    (folder / "model.onnx").rename(folder / "kept")
    (folder.parent / "other").write_bytes(OTHER)
    (folder / "model.onnx").symlink_to(folder.parent / "other")


def link_back(folder):
    (folder / "model.onnx").unlink()
    (folder / "kept").rename(folder / "model.onnx")


def move_folder_away(folder):
    folder.rename(folder.parent / "aside")
    folder.mkdir()
    (folder / "model.onnx").write_bytes(OTHER)


def move_folder_back(folder):
    shutil.rmtree(folder)
    (folder.parent / "aside").rename(folder)


def leave(_):
    pass


def exchange(folder):
    (folder / "model.onnx").write_bytes(OTHER)


SWAPS = {
    "moved and moved back": (move_away, move_back),
    "written and written back, with its times": (overwrite, write_back),
    "linked and put back": (link_away, link_back),
    "the whole folder": (move_folder_away, move_folder_back),
    "not put back": (exchange, leave),
}


@pytest.mark.parametrize("how", SWAPS)
def test_a_swapped_engine_is_noticed(load, entry, how):
    with pytest.raises(StageError, match="changed while they were loaded"):
        load(*SWAPS[how])


def test_an_engine_that_is_only_read_is_loaded(load, entry):
    assert load(leave, lambda folder: list(folder.iterdir())) == HONEST


def test_a_swapped_engine_is_refused_before_it_is_loaded(load, entry):
    exchange(entry.path)
    with pytest.raises(StageError, match="damaged"):
        load(leave, leave)
