"""What a command prints, as text, and the whole texts under tests/golden/reports."""

import os
from io import StringIO
from pathlib import Path

from rich.console import Console

from optpipe.report.document import Document
from optpipe.report.terminal import print_document

FOLDER = Path(__file__).parents[1] / "golden" / "reports"


def text_of(*printed: Document | str, width: int = 160) -> str:
    """The lines of `printed` on a terminal without colors, `width` columns wide."""
    written = StringIO()
    console = Console(file=written, width=width, highlight=False, markup=False)
    for each in printed:
        if isinstance(each, str):
            console.print(each)
        else:
            print_document(each, console)
    return written.getvalue()


def assert_golden(text: str, name: str) -> None:
    """`text` is that of `name`, spaces at the ends of lines left out; with OPTPIPE_UPDATE_GOLDEN=1 it becomes that."""
    text = "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
    if os.environ.get("OPTPIPE_UPDATE_GOLDEN") == "1":
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
    assert text == (FOLDER / name).read_text(encoding="utf-8")
