"""A child process and all that it starts, which end together."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def open_process_group(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    errors_only: bool = False,
    ask_s: float | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process, in a session of its own (Ctrl+C is the parent's to handle); after the block nothing of its group is left.

    What it prints goes to the file `log`; with `errors_only` its standard output is dropped. With `ask_s` it is first asked
    to end (SIGTERM) and given that many seconds.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if errors_only else output,
            stderr=output,
            env=environment,
            start_new_session=True,
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
