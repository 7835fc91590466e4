"""What a command prints, as text."""

from io import StringIO

from rich.console import Console

from optpipe.report.document import Document
from optpipe.report.terminal import print_document


def text_of(*printed: Document | str, width: int = 160) -> str:
    """The lines of `printed` on a terminal without colours, `width` columns wide."""
    written = StringIO()
    console = Console(file=written, width=width, highlight=False, markup=False)
    for each in printed:
        if isinstance(each, str):
            console.print(each)
        else:
            print_document(each, console)
    return written.getvalue()
