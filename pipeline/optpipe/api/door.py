"""The door of every library call: one call at a time, the caller's state restored, errors in Python's terms.

torch.export and the redirection of compilers' output work on the whole process, so calls that build or measure take turns.
"""

import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from optpipe.core import np
from optpipe.core.errors import OptpipeError
from optpipe.core.events import Listener
from optpipe.core.plan import record_origin, suggest_for
from optpipe.workspace.store import Store

_TURN = threading.RLock()


@contextmanager
def enter(
    store: Store, listener: Listener, call: str, arguments: Mapping[str, object]
) -> Iterator[Listener]:
    """Runs a call of the library: `call` and the `arguments` that are not None become the origin of what it makes.

    Yields the listener, shown while the block runs. Raises errors of optpipe with arguments in place of flags.
    """
    origin = (
        f"{call}({','.join(_show(*each) for each in arguments.items() if each[1] is not None)})"
    )
    with ExitStack() as stack:
        stack.enter_context(_TURN)
        stack.enter_context(suggest_for(store.workspace))
        stack.enter_context(record_origin(origin))
        stack.enter_context(keep_caller_state())
        stack.enter_context(_collect_warnings(listener))
        shown: Any = listener
        if hasattr(shown, "__enter__"):
            stack.enter_context(shown)
        stack.enter_context(speak_of_arguments())
        yield listener


@contextmanager
def _collect_warnings(listener: Listener) -> Iterator[None]:
    """The listener's `warnings` are those of this call while the block runs; afterward those of earlier calls come before them."""
    before = listener.warnings
    listener.warnings = []
    try:
        yield
    finally:
        before += [each for each in listener.warnings if each not in before]
        listener.warnings = before


def _show(name: str, value: object) -> str:
    if isinstance(value, list | tuple):
        value = "[" + ",".join(map(str, value)) + "]"
    text = " ".join(str(value).split())[:120]
    return f"{name}={text}"


@contextmanager
def keep_caller_state() -> Iterator[None]:
    """Gives back the state of the random generators, and of torch's default type, default device, and autocast."""
    python, numpy = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            stack.enter_context(_keep_torch_state(torch))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _keep_torch_state(torch: Any) -> Iterator[None]:
    cpu, dtype, device = (
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    if device.type != "cpu":
        torch.set_default_device(None)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        if device.type != "cpu":
            torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


_FLAG = re.compile(r"--([a-z][a-z-]*)((?:[ =])([A-Z][A-Z_:|.]*\b))?")
_COMMAND = re.compile(r"(`[^`]*`)")


@contextmanager
def speak_of_arguments() -> Iterator[None]:
    """Raises errors of optpipe again, worded for Python."""
    try:
        yield
    except OptpipeError as error:
        error.word_for_python()
        # for the rooms that still write options as text
        error.args = (name_arguments(str(error)), *error.args[1:])
        raise


def name_arguments(text: str) -> str:
    """`batch=MIN:OPT:MAX` for `--batch MIN:OPT:MAX`, `min_snr` for `--min-snr`, outside of commands in backquotes."""

    def rename(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return f"{name}={found[3]}" if found[3] else name

    parts = _COMMAND.split(text)
    return "".join(part if part.startswith("`") else _FLAG.sub(rename, part) for part in parts)
