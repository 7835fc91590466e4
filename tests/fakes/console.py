"""What a command prints, as text."""

from io import StringIO

from rich.console import Console, RenderableType

from optpipe.report.document import Document
from optpipe.report.terminal import TerminalText


def text_of(*printed: RenderableType | Document, width: int = 160) -> str:
    """The lines of `printed` on a terminal without colours, `width` columns wide."""
    written = StringIO()
    for each in printed:
        shown = TerminalText(each) if isinstance(each, Document) else each
        Console(file=written, width=width, highlight=False, markup=False).print(shown)
    return written.getvalue()
