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
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from optpipe.core.errors import escape
from optpipe.core.events import ProgressStep
from optpipe.core.process import discard_output

HEARTBEAT_S = 15.0


class _Stderr(Console):
    def on_broken_pipe(self) -> None:
        """Continues silently: a closed stderr must not end the command."""
        discard_output(self.file.fileno())


class _Count(ProgressColumn):
    """`3 of 8` while a step with a known total runs."""

    def render(self, task: Task) -> Text:
        return Text("" if task.finished or (task.total or 1) == 1 else f"{task.completed:.0f} of {task.total:.0f}")


class Terminal:
    """Shows steps while they run: a live bar on a terminal, otherwise one line per finished step and a heartbeat."""

    def __init__(self) -> None:
        # a separate descriptor, so that progress stays visible while a library's output is redirected (core.process)
        self._stderr = os.fdopen(
            os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8", errors="backslashreplace"
        )
        self.console = _Stderr(file=self._stderr, highlight=False, markup=False)
        self.warnings: list[str] = []
        self._reused = 0
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            _Count(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        if self._reused:
            self.inform(f"{self._reused} step{'' if self._reused == 1 else 's'} reused from the store")
        self._stderr.flush()

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        """Shows `name` with a bar until the block ends; a step that raises gets no tick."""
        name = escape(name)
        task = self._progress.add_task(name, total=total)
        step = _Shown(self._progress, task)
        started = monotonic()
        with self._heartbeat(name, started, task):
            yield step
        seconds = monotonic() - started
        self._progress.update(task, total=total or 1, completed=total or 1, visible=not step.from_store)
        self._reused += step.from_store
        if not self.console.is_terminal and not step.from_store:
            self.console.print(f"{name}: {seconds:.1f} s")

    @contextmanager
    def _heartbeat(self, name: str, started: float, task: TaskID) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            shown = next(each for each in self._progress.tasks if each.id == task)
            while not over.wait(HEARTBEAT_S):
                seconds, done, total = monotonic() - started, shown.completed, shown.total
                left = (
                    f", {done:.0f} of {total:.0f}, about {seconds * (total - done) / done:.0f} s left"
                    if total and 0 < done < total
                    else ""
                )
                self.console.print(f"{name}: running for {seconds:.0f} s{left}")

        if not self.console.is_terminal:
            threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def warn(self, message: str) -> None:
        """Prints a warning once, and keeps it for the JSON document."""
        message = "\n".join(map(escape, message.splitlines()))
        if message not in self.warnings:
            self.warnings.append(message)
            # in a log a warning stays on one line
            self.console.print(
                Text.assemble(("warning:", "yellow"), f" {message}"), soft_wrap=not self.console.is_terminal
            )

    def inform(self, message: str) -> None:
        self.console.print(escape(message), soft_wrap=not self.console.is_terminal)


class _Shown:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self.from_store = False

    def advance(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)

    def cached(self) -> None:
        self.from_store = True
