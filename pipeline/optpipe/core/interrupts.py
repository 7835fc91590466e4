"""Ctrl+C and SIGTERM: what was started is ended, what was finished is kept, nothing is half-written, no signal is lost."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.02


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as SIGINT does while the block runs, and nothing but that comes of either.

    A signal may come while a library is imported or destroys an object. Extension modules turn it into an ImportError of
    their own, and Python only prints what a destructor raises: the first is an interruption here, the second is raised
    again. Only on the main thread, where signals can be handled; SIGINT stays ignored where it is (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, over = False, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal received
        received = True
        raise KeyboardInterrupt

    def again() -> None:
        if not over.wait(_AGAIN_S):
            signal.pthread_kill(threading.main_thread().ident or 0, numbers[0])

    def unraisable(lost: "sys.UnraisableHookArgs") -> None:
        if received and issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Thread(target=again, daemon=True).start()  # from here it would be lost once more
        else:
            hook(lost)

    hook = sys.unraisablehook
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    sys.unraisablehook = unraisable
    try:
        yield
    except Exception as error:
        if received:
            raise KeyboardInterrupt from error
        raise
    finally:
        over.set()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
