from pathlib import Path

import pytest

from optpipe.errors import BadInputError, first_line, require_existing


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
