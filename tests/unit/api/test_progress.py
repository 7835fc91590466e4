"""The bar of a notebook."""

from typing import Any

from optpipe.api.door import SpokenListener
from optpipe.api.progress import NotebookBar
from optpipe.core.wording import Argument, Call


class Screen:
    """What a notebook shows, in place of IPython's display."""

    def __init__(self) -> None:
        self.shown: Any = None

    def __call__(self, drawing, *, display_id):
        self.shown = drawing
        return self

    def update(self, drawing) -> None:
        self.shown = drawing


def test_warnings_are_lines_that_name_arguments() -> None:
    screen = Screen()
    way = "isolate its cores (" + Argument("affinity") + "), or run `" + Call("bench", turns=True)
    with NotebookBar(screen) as bar, bar.step("bench"):
        SpokenListener(bar).warn("a busy <host>\n" + way + "`")
    markup = screen.shown._repr_html_()
    assert "busy &lt;host&gt;<br>isolate its cores (affinity)" in markup
    assert "`optpipe bench --turns`" in markup
    text = repr(screen.shown)
    assert text.startswith("1 step in ")
    assert "isolate its cores (affinity)" in text.splitlines()[2]
    assert bar.warnings[0] in text


def test_several_steps_are_counted() -> None:
    screen = Screen()
    with NotebookBar(screen) as bar:
        for name in ("export", "build"):
            with bar.step(name):
                pass
    assert repr(screen.shown).startswith("2 steps in ")
