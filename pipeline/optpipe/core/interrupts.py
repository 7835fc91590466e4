"""Ctrl+C and SIGTERM: what was started is ended, what was finished is kept, nothing is half-written, no signal is lost."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FrameType

_AGAIN_S = 0.02


class _Interruption(KeyboardInterrupt):
    """Raised by a signal; one that is destroyed before it came to `handle_interrupts` was lost, and is raised again."""

    def __init__(self, number: int, over: threading.Event) -> None:
        super().__init__()
        self.number, self.over = number, over
        self.taken = False

    def __del__(self) -> None:
        if not (self.taken or self.over.is_set()):
            threading.Thread(
                target=_raise_again, args=(self.number, self.over), daemon=True
            ).start()  # not from in here


def _raise_again(number: int, over: threading.Event) -> None:
    if not over.wait(_AGAIN_S):
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _initializes_native_code(frame: FrameType | None) -> bool:
    """Whether an extension module is being initialized: some bindings (nanobind) abort on an exception that arrives then."""
    while frame is not None:
        loads = frame.f_code.co_name in ("create_module", "exec_module")
        if loads and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def acknowledge_interrupt(interruption: KeyboardInterrupt) -> None:
    """Says that what catches `interruption` ends in order by itself: it is not raised again."""
    if isinstance(interruption, _Interruption):
        interruption.taken = True


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt as SIGINT does while the block runs, and nothing but that comes of either.

    A signal may come while a library is imported, asks for an attribute or destroys an object. Extension modules turn it
    into an ImportError of their own, which the importing library may take for a missing option; Python only prints what a
    destructor raises; and there is `except:`. An error that comes of it is an interruption here, and where it came to
    nothing it is raised again, until the block ends or says `acknowledge_interrupt`. Only on the main thread, where signals can be handled;
    SIGINT stays ignored where it is (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, over = False, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        if _initializes_native_code(frame):
            threading.Thread(target=_raise_again, args=(number, over), daemon=True).start()
            return
        raise _Interruption(number, over)

    def unraisable(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, _Interruption):
            hook(lost)

    hook = sys.unraisablehook
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    sys.unraisablehook = unraisable
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Polars is not an Exception
        if received:
            raise KeyboardInterrupt from error
        raise
    finally:
        over.set()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
