"""A file named in a folder that somebody else wrote is opened inside that folder, once, or not at all."""

import os

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.files import Files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_text("outside")
    inner = tmp_path / "folder" / "runs"
    inner.mkdir(parents=True)
    (inner / "a").write_text("inside")
    (inner / "link").symlink_to(tmp_path / "secret")
    (inner.parent / "out").symlink_to(tmp_path)
    os.mkfifo(inner / "pipe")
    return inner.parent


@pytest.mark.parametrize(
    "name",
    ["../secret", "runs/../../secret", "runs/link", "out/secret", "runs/pipe", "runs", "", "/etc/passwd", "runs/none"],
)
def test_nothing_outside_the_folder_is_read(folder, name):
    for files in (Files(folder), Files(folder, kept={})):
        with pytest.raises(BadInputError):
            files.read(name)
    with pytest.raises(BadInputError):
        Files(folder).hash(name)


def test_a_kept_file_is_opened_once(folder):
    files = Files(folder, kept={})
    inner = files.below("runs")
    assert (files.read("runs/a"), inner.has("a"), inner.has("link")) == (b"inside", True, False)
    (folder / "runs" / "a").write_text("changed")
    assert inner.read("a") == b"inside"
    assert inner.hash("a") != Files(folder).hash("runs/a")
