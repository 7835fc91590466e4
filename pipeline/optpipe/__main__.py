"""`python -m optpipe` and the `optpipe` command."""

import atexit
import os
import signal
from types import FrameType


def _end_at_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"optpipe: interrupted\n")
    os._exit(130)


def main() -> None:
    """Runs the command line. A signal that comes while it is imported ends the process in one line with status 130.

    One that comes after all is done is ignored: Python takes its handlers away before libraries have ended, and the signal
    would kill the process with another status.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)
            atexit.register(signal.signal, number, signal.SIG_IGN)
    from optpipe.cli.app import app

    app()


if __name__ == "__main__":
    main()
