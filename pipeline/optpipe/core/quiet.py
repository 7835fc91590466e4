"""Keeps what libraries print out of the way: stdout belongs to the result, stderr to progress and warnings."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to `log` while the block runs: also what C++ code and child processes print."""
    with log.open("ab") as file, _redirected({1: file.fileno(), 2: file.fileno()}):
        yield


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends all that is printed to stdout to stderr while the block runs: libraries print where they like."""
    with _redirected({1: 2}):
        yield


@contextmanager
def _redirected(targets: Mapping[int, int]) -> Iterator[None]:
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
