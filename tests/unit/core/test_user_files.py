"""A pipe, a device or a huge file where a document is expected is refused at once, whatever reads it."""

import os
from pathlib import Path

import pytest

from optpipe.core.errors import BadInputError
from optpipe.core.files import read_user_bytes
from optpipe.models.sources.resolve import CardSource
from optpipe.signoff.policy import policy_from_file
from optpipe.sweep.matrix import matrix_from_file

READERS = [read_user_bytes, policy_from_file, matrix_from_file, lambda path: CardSource(path).card]


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize("read", READERS, ids=["bytes", "policy", "matrix", "card"])
def test_no_reader_waits_for_a_special_file(tmp_path, read, kind):
    path = tmp_path / "given.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**34)
    with pytest.raises(BadInputError, match=r"is a pipe|is too large"):
        read(path)
