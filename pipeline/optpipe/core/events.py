"""Reports progress and warnings of long-running stages without printing anything."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Made = TypeVar("Made")
P = ParamSpec("P")


class ProgressStep:
    def advance(self, count: int = 1) -> None:
        """Reports `count` more units of the step's `total` as done."""

    def cached(self) -> None:
        """Marks the step as answered from the store."""


UNWATCHED = ProgressStep()


class Listener(ProgressStep):
    """Keeps warnings and shows nothing. It is also the step that it opens."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:  # noqa: ARG002
        """Opens a step with `total` units of work; None if unknown."""
        yield self

    def warn(self, message: str) -> None:
        """Reports a warning, which also appears in the JSON's `warnings`."""
        if message not in self.warnings:
            self.warnings.append(message)

    def inform(self, message: str) -> None:
        """Reports something useful while the user waits, such as an estimated time."""


SilentListener = Listener
"""For library use and tests."""


def run_step(
    name: str, listener: Listener, work: Callable[P, tuple[Made, bool]], *given: P.args, **options: P.kwargs
) -> Made:
    """Takes a step of progress; returns what `work` made, and marks the step if it existed already."""
    with listener.step(name) as step:
        entry, cached = work(*given, **options)
        if cached:
            step.cached()
    return entry
