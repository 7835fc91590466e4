"""A child process and all that it starts, which end together, and with their parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2)."""
_PARENT = "OPTPIPE_PARENT"


def end_with_parent() -> None:
    """Has this process killed when the one that started it ends: nothing goes on using the machine for nobody."""
    _set_death_signal()
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and os.getppid() != int(parent):  # it ended before
        sys.exit(1)


def _set_death_signal() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def open_process_group(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    errors_only: bool = False,
    ask_s: float | None = None,
    foreign: bool = False,
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process, in a session of its own (Ctrl+C is the parent's to handle); after the block nothing of its group is left.

    What it prints goes to the file `log`; with `errors_only` its standard output is dropped. With `ask_s` it is first asked
    to end (SIGTERM) and given that many seconds. A `foreign` program is one that does not call `end_with_parent` itself.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if errors_only else output,
            stderr=output,
            env=dict(environment) if foreign else {**environment, _PARENT: str(os.getpid())},
            start_new_session=True,
            preexec_fn=_set_death_signal if foreign else None,
        )
    try:
        yield process
    finally:
        if ask_s is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ask_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
