"""Shows progress and warnings on stderr, so that stdout holds the result alone."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from optpipe.core.errors import BadInputError, escape, make_message
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.process import discard_output
from optpipe.core.wording import word_for_terminal

HEARTBEAT_S = 15.0


class _Stderr(Console):
    def on_broken_pipe(self) -> None:
        """Continues silently: a closed stderr must not end the command."""
        discard_output(self.file.fileno())


class _Count(ProgressColumn):
    """`3 of 8, about 12 s left` while a step with a known total runs."""

    def render(self, task: Task) -> Text:
        if (task.total or 1) == 1 or task.completed > (task.total or 0):
            return Text("")  # more work came up than was expected
        known = task.time_remaining is not None and task.completed < (task.total or 0)
        left = f", about {task.time_remaining:.0f} s left" if known else ""
        return Text(f"{task.completed:.0f} of {task.total:.0f}{left}")


class Terminal(Listener):
    """Shows steps while they run, and in one line how many there were; in a log, a line for each step and a heartbeat.

    Warnings of its block wait for the first step: of a command that refuses its input, the refusal is all that is shown.
    """

    def __init__(self) -> None:
        # a separate descriptor, so that progress stays visible while a library's output is redirected (core.process)
        own = os.dup(sys.stderr.fileno())
        self._stderr = os.fdopen(own, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        self.console = _Stderr(file=self._stderr, highlight=False, markup=False)
        super().__init__()
        self._started, self._done, self._reused = monotonic(), 0, 0
        self._waiting: list[Text] | None = None
        """Warnings before the first step; None once something was begun, or outside of the block."""
        shown = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Count(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *shown, console=self.console, transient=True, disable=not self.console.is_terminal
        )

    def __enter__(self) -> Self:
        self._waiting = []
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, BadInputError):
            self._waiting = None
        self._show_waiting()
        self._progress.stop()
        if self._reused or (self._done and self.console.is_terminal):
            done = f"steps: {self._done} done in {monotonic() - self._started:.1f} s"
            self.inform(f"{done}, {self._reused} reused from the store" if self._reused else done)
        self._stderr.flush()

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        """Shows `name` until the block ends."""
        self._show_waiting()
        name = escape(name)
        task = self._progress.add_task(name, total=total)
        step = _Shown(self._progress, task)
        started = monotonic()
        with self._heartbeat(name, started, task):
            yield step
        self._progress.update(task, visible=False)
        self._done += not step.from_store
        self._reused += step.from_store
        if not self.console.is_terminal and not step.from_store:
            self.console.print(f"{name}: {monotonic() - started:.1f} s", soft_wrap=True)

    @contextmanager
    def _heartbeat(self, name: str, started: float, task: TaskID) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            shown = next(known for known in self._progress.tasks if known.id == task)
            while not over.wait(HEARTBEAT_S):
                seconds, done, total = monotonic() - started, shown.completed, shown.total
                left = ""
                if total and 0 < done < total:
                    left = f", {done:.0f} of {total:.0f}, about {seconds * (total - done) / done:.0f} s left"
                # in a log, as a warning, on one line
                self.console.print(f"{name}: running for {seconds:.0f} s{left}", soft_wrap=True)

        if not self.console.is_terminal:
            threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def warn(self, message: str) -> None:
        """Prints a warning once, and keeps it for the JSON document."""
        message = make_message(word_for_terminal(message))
        if message not in self.warnings:
            self.warnings.append(message)
            # in a log a warning stays on one line
            text = Text.assemble(("warning:", "yellow"), f" {message}")
            if self._waiting is not None:
                self._waiting.append(text)
            else:
                self._print_warning(text)

    def _show_waiting(self) -> None:
        waiting, self._waiting = self._waiting or (), None
        for text in waiting:
            self._print_warning(text)

    def _print_warning(self, text: Text) -> None:
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def inform(self, message: str) -> None:
        self._show_waiting()
        text = escape(word_for_terminal(message))
        self.console.print(text, soft_wrap=not self.console.is_terminal)


class _Shown(ProgressStep):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self.from_store = False

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def cached(self) -> None:
        self.from_store = True
