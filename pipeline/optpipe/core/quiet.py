"""Keeps what libraries print out of the way: stdout belongs to the result, stderr to progress and warnings."""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def keep_descriptors() -> None:
    """Takes the places of standard streams that were closed, so that no file that is opened later is written to as one.

    From stdin nothing comes; writing to stdout is the error that it would be, and to stderr none.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null_as(number, os.O_RDONLY if number < 2 else os.O_WRONLY)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def discard_output(descriptor: int) -> None:
    """Drops what is written to `descriptor` from here on: nobody reads it, and Python's end must not fail at it."""
    _open_null_as(descriptor, os.O_WRONLY)


def _open_null_as(descriptor: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)


@contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to `log` while the block runs: also what C++ code and child processes print."""
    with log.open("ab") as file, _redirect({1: file.fileno(), 2: file.fileno()}):
        yield


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Sends all that is printed to stdout to stderr while the block runs: libraries print where they like."""
    with _redirect({1: 2}):
        yield


def redirect_stdout_to_stderr_at_exit() -> None:
    """Sends to stderr what code that ran before prints when Python ends: after the result, on its stdout."""
    atexit.unregister(_send_stdout_to_stderr)
    atexit.register(_send_stdout_to_stderr)  # the last one registered runs first


def _send_stdout_to_stderr() -> None:
    with suppress(OSError, ValueError):  # closed by whom it went to, or by the code itself
        sys.stdout.flush()
        os.dup2(2, 1)


@contextmanager
def _redirect(targets: Mapping[int, int]) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in targets}
    for descriptor, target in targets.items():
        os.dup2(target, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
