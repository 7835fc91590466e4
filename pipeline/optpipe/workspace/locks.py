"""Locks between processes: `flock` on a file, which the kernel releases however its holder ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Creates and locks the file `path` while the block runs; waits for another holder."""
    with open_lock(path) as file:
        lock(file)
        yield


def open_lock(path: Path) -> IO[str]:
    """The lock file, not yet locked; closing it unlocks it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def lock(file: IO[str], *, shared: bool = False) -> None:
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: IO[str] | int, *, shared: bool = False) -> bool:
    """Locks `file`, a file or descriptor, unless another process holds it; returns whether it did."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
