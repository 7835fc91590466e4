import pytest

from optpipe.errors import first_line


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("\n one \ntwo"), "one"), (MemoryError(), "MemoryError"), (OSError("x" * 999), "x" * 240)],
)
def test_any_error_has_a_first_line(error, text):
    assert first_line(error).strip() == text
