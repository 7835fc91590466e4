"""Reports progress and warnings of long-running stages without printing anything."""

from collections.abc import Callable, Generator, Iterator
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
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
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


Steps = Generator[None, None, Made]
"""Work that yields where other work may go on before it does."""


def as_steps(work: Callable[P, Made], *given: P.args, **options: P.kwargs) -> Steps[Made]:
    """`work` without a pause."""
    yield from ()
    return work(*given, **options)


def advance_steps(steps: Steps[Made]) -> Made | None:
    """Runs `steps` until their next pause; returns the result if none comes."""
    try:
        next(steps)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    return None


def finish_steps(steps: Steps[Made]) -> Made:
    while (made := advance_steps(steps)) is None:
        pass
    return made


def run_step(
    name: str,
    listener: Listener,
    work: Callable[P, tuple[Made, bool]],
    *given: P.args,
    **options: P.kwargs,
) -> Made:
    """Takes a step of progress; returns what `work` made, and marks the step if it existed already."""
    with listener.step(name) as step:
        entry, cached = work(*given, **options)
        if cached:
            step.cached()
    return entry
