"""Where output may go, the folders that ship, and the GPUs of the environment."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.fakes.entries import Thing
from tests.fakes.small_disk import fill_disk, mount_small_disk

from optpipe.core.errors import BadInputError, MissingError, StageError
from optpipe.core.events import SilentListener
from optpipe.workspace import places as module
from optpipe.workspace.environment import select_visible_gpus
from optpipe.workspace.places import (
    find_shipped_folder,
    move_folder,
    require_unused_path,
    require_writable_file,
    require_writable_folder,
)
from optpipe.workspace.runs import begin_run
from optpipe.workspace.store import Store

CHECKS = [require_writable_folder, require_writable_file, require_unused_path]


@pytest.fixture
def there(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "x")
    return tmp_path


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/proc/x", "--output /proc/x: /proc is not writable"),
        ("/proc/a/b", "--output /proc/a/b: /proc is not writable"),
        ("file/below", "/file is not a folder"),
        ("n" * 300, r"is not writable \(File name too long\)"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(there, check, place, why):
    with pytest.raises(BadInputError, match=why):
        check(there / place, "--output")


@pytest.mark.parametrize("check", CHECKS)
def test_a_disk_that_is_full_or_read_only_is_refused(tmp_path, check):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk)
        with pytest.raises(StageError, match="no space left at"):
            check(disk / "new" / "x", "--output")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(BadInputError, match=f"{disk} is not writable .Read-only file system"):
            check(disk / "new" / "x", "--output")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_permission_is_refused(tmp_path, check, mode):
    (tmp_path / "locked").mkdir(mode=mode)
    with pytest.raises(BadInputError, match=r"locked is not writable \(Permission denied\)"):
        check(tmp_path / "locked" / "new" / "x", "--output")


@pytest.mark.parametrize("check", CHECKS)
def test_a_place_that_can_be_written_is_left_as_it_is(there, check):
    before = sorted(there.iterdir())
    check(there / "new" / "deep" / "x", "--output")
    assert sorted(there.iterdir()) == before


def test_what_is_there_decides(there):
    require_writable_folder(there, "--output")
    require_writable_file(there / "file", "--junit")
    require_writable_file(Path(os.devnull), "--junit")
    with pytest.raises(BadInputError, match=r"--junit .* is a folder; specify a file"):
        require_writable_file(there, "--junit")
    with pytest.raises(BadInputError, match="file is not a folder"):
        require_writable_folder(there / "file", "--output")
    with pytest.raises(BadInputError, match="dangling is not writable"):
        require_writable_folder(there / "dangling", "--output")
    for taken in ("file", "dangling"):
        with pytest.raises(BadInputError, match="already exists; choose another --output"):
            require_unused_path(there / taken)


def test_a_folder_is_moved_whole_and_for_all_to_read(tmp_path):
    (tmp_path / "scratch" / "inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "scratch" / "inner" / "file").write_text("x")
    move_folder(tmp_path / "scratch", tmp_path / "new" / "target")
    assert (tmp_path / "new" / "target" / "inner" / "file").read_text() == "x"
    assert (tmp_path / "new" / "target" / "inner").stat().st_mode & 0o777 == 0o755
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["target"]


def test_a_workspace_that_cannot_be_made_or_written_is_refused(there):
    def write(workspace):
        for act in (
            lambda: Store(workspace).require_writable(),
            lambda: begin_run(workspace, "bench"),
            lambda: Store(workspace).produce(
                Thing, {}, lambda _: Thing(), listener=SilentListener()
            ),
            lambda: Store(workspace).scratch("x").__enter__(),
        ):
            with pytest.raises(
                BadInputError,
                match=f"workspace {str(workspace)[:60]}.* is not writable .*; pass --workspace DIR",
            ):
                act()

    for place in ("/proc/x", "/proc/a/b", "file", "file/below", "n" * 300):
        write(there / place)
    with mount_small_disk(there / "disk") as disk:
        Store(disk / "ws").require_writable()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        write(disk / "ws")
        write(disk / "other")


def test_finds_the_folders_of_this_checkout() -> None:
    assert (find_shipped_folder("models") / "digits.toml").is_file()
    assert (find_shipped_folder("calibration") / "digits" / "train.json").is_file()


def test_prefers_what_lies_in_the_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "a" / "optpipe"
    (package / "_data" / "models").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(module, "_PACKAGE", package)
    assert find_shipped_folder("models") == package / "_data" / "models"


def test_names_the_missing_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_PACKAGE", tmp_path / "a" / "optpipe")
    with pytest.raises(MissingError, match="folder calibration/ is missing"):
        find_shipped_folder("calibration")


UUIDS = ("GPU-8932f937-d72c", "GPU-89aa0000-0001", "GPU-1f000000-0002")


@pytest.mark.parametrize(("text", "shown"), [
    (None, (0, 1, 2)), ("", ()), ("2,1", (2, 1)), ("0,2,-1,1", (0, 2)), (" 1 , 0", (1, 0)), ("1,7,0", (1,)),
    ("GPU-8932f937,GPU-1f", (0, 2)), ("GPU-89", ()), ("GPU-1f,1", (2, 1)), ("none", ()),
    ("MIG-8932f937-d72c", (0, 1, 2)),
])  # fmt: skip
def test_which_gpus_cuda_shows(text: str | None, shown: tuple[int, ...]) -> None:
    assert select_visible_gpus(text, UUIDS) == shown
