"""The default listener: a bar in a terminal or notebook, otherwise one that keeps warnings and shows nothing."""

import html
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from optpipe.core.events import Listener, ProgressStep

REDRAW_S = 0.2
"""Shortest time between two drawings of a bar."""


def choose_listener() -> Listener:
    """A bar if someone can see it."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if type(shell).__name__ == "ZMQInteractiveShell":
        return NotebookBar(ipython.display.display)
    try:
        watched = sys.stderr.isatty() and sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        watched = False
    if not watched:
        return Listener()
    from optpipe.report.progress import Terminal

    return Terminal()


class NotebookBar(Listener):
    """One line in the output of a cell: the running steps, and how far the last one is. Warnings stay below it."""

    def __init__(self, display: Any) -> None:
        super().__init__()
        self._display = display
        self._handle: Any = None
        self._running: list[_Step] = []
        self._done, self._drawn = 0, 0.0
        self._begun = monotonic()

    def __enter__(self) -> "NotebookBar":
        self._begun = monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self._running.clear()
        if self._handle is not None:
            steps = f"{self._done} step{'' if self._done == 1 else 's'}"
            self.draw(f"{steps} in {monotonic() - self._begun:.1f} s")

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        step = _Step(self, name, total)
        self._running.append(step)
        self.draw()
        try:
            yield step
        finally:
            self._done += 1
            if step in self._running:
                self._running.remove(step)

    def warn(self, message: str) -> None:
        super().warn(message)
        self.draw(" · ".join(step.name for step in self._running))

    def draw(self, text: str | None = None) -> None:
        """Draws at once with a `text`, otherwise at most every REDRAW_S."""
        if text is None:
            if self._handle is not None and monotonic() - self._drawn < REDRAW_S:
                return
            text = " · ".join(step.name for step in self._running)
        self._drawn = monotonic()
        last = self._running[-1] if self._running else None
        bar = (
            ""
            if last is None or not last.total
            else f'<progress max="{last.total}" value="{last.done}"></progress> '
        )
        warnings = [f"warning: {warning}" for warning in self.warnings]
        warned = "".join(
            f"<div>{html.escape(warning).replace(chr(10), '<br>')}</div>" for warning in warnings
        )
        shown = _Drawing(
            f"<div>{bar}<small>{html.escape(text)}</small></div>{warned}",
            "\n".join([text, *warnings]),
        )
        if self._handle is None:
            self._handle = self._display(shown, display_id=True)
        else:
            self._handle.update(shown)


class _Step(ProgressStep):
    def __init__(self, bar: NotebookBar, name: str, total: int | None) -> None:
        self.bar, self.name, self.total, self.done = bar, name, total, 0

    def advance(self, count: int = 1) -> None:
        self.done += count
        self.bar.draw()


class _Drawing:
    """HTML for a notebook, and the same in plain text for front ends without HTML."""

    def __init__(self, markup: str, text: str) -> None:
        self._markup, self._text = markup, text

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._text
