"""How a long-running stage tells the outside world what it is doing, without printing anything itself."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class ProgressStep(Protocol):
    """A step in progress: `advance` moves its progress bar, `cached` says that the store answered it."""

    def advance(self, count: int = 1) -> None:
        """Reports `count` more units of the step's `total` as done."""

    def cached(self) -> None:
        """Marks the step as answered from the store."""


class Listener(Protocol):
    """Hears of steps and warnings; the terminal's implementation is `commands.terminal.Terminal`."""

    def step(self, name: str, total: int | None = None) -> AbstractContextManager[ProgressStep]:
        """Opens a step called `name` with `total` units of work, or an unknown amount."""

    def warn(self, message: str) -> None:
        """Says something the user must know and that ends up in the JSON's `warnings` too."""

    def inform(self, message: str) -> None:
        """Says something that helps while one waits, such as how long."""


class SilentListener:
    """A listener for library use and tests, and the steps it opens: keeps the warnings, shows nothing."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:  # noqa: ARG002
        yield self

    def advance(self, count: int = 1) -> None:
        pass

    def cached(self) -> None:
        pass

    def warn(self, message: str) -> None:
        """Keeps `message` in `warnings`, once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def inform(self, message: str) -> None:
        """Nobody waits."""


UNWATCHED: ProgressStep = SilentListener()
"""For library use: work that nobody watches."""
