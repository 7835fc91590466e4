"""Keeps what libraries print out of the way: stdout belongs to the result, stderr to progress and warnings."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to `log` while the block runs: also what C++ code and child processes print."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, target in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
