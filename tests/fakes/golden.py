"""Whole outputs, compared with the texts under tests/golden/reports."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden" / "reports"


def assert_golden(text: str, name: str) -> None:
    """`text` is that of `name`, spaces at the ends of lines left out; with OPTPIPE_UPDATE_GOLDEN=1 it becomes that."""
    text = "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
    if os.environ.get("OPTPIPE_UPDATE_GOLDEN") == "1":
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
    assert text == (FOLDER / name).read_text(encoding="utf-8")
