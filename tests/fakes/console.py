"""What a reporter writes, as text."""

from io import StringIO

from rich.console import Console, RenderableType


def text_of(*renderables: RenderableType, width: int = 160) -> str:
    """The lines of `renderables` on a terminal without colours, `width` columns wide."""
    written = StringIO()
    for each in renderables:
        Console(file=written, width=width, highlight=False).print(each)
    return written.getvalue()
