import pytest

from optpipe.core.errors import MissingError
from optpipe.workspace import shipped as module
from optpipe.workspace.shipped import find_shipped_folder


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
