from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError, first_line, read_as_user_file, require_existing


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("\n one \ntwo"), "one"), (MemoryError(), "MemoryError"), (OSError("x" * 999), "x" * 240)],
)
def test_any_error_has_a_first_line(error, text):
    assert first_line(error).strip() == text


def test_a_path_that_is_not_there_is_named_with_its_option(tmp_path):
    require_existing(tmp_path, "--data")
    require_existing(None, "--data")
    with pytest.raises(BadInputError, match=r"^--data nowhere: no such file or folder$"):
        require_existing(Path("nowhere"), "--data")


def test_a_file_to_read_that_is_not_there_or_is_a_folder_is_said_in_words(tmp_path):
    for path, said in ((tmp_path / "x.toml", "no such file"), (tmp_path, "is a folder; give a file")):
        with pytest.raises(BadInputError) as refused, read_as_user_file(path, "a price list (TOML)"):
            path.read_text()
        assert str(refused.value) == f"{path}: {said}"
