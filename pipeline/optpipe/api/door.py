"""The door of every library call: one call at a time, the caller's state restored, errors in Python's terms.

torch.export and the redirection of compilers' output work on the whole process, so calls that build or measure take turns.
"""

import errno
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import msgspec

from optpipe.core import np
from optpipe.core.errors import BadInputError, OptpipeError, escape
from optpipe.core.events import Listener, ProgressStep
from optpipe.core.params import record_origin
from optpipe.core.wording import suggest_for, word_for_python
from optpipe.workspace.store import Store

T = TypeVar("T")

_TURN = threading.RLock()


@contextmanager
def enter(
    store: Store, listener: Listener, call: str, arguments: Mapping[str, object]
) -> Iterator[Listener]:
    """Runs a call of the library: `call` and the `arguments` that are not None become the origin of what it makes.

    Yields a listener that passes warnings on, worded for Python, to `listener`, which is shown while the block runs. Raises errors
    of optpipe worded for Python.
    """
    origin = f"{call}({','.join(_show(*argument) for argument in arguments.items() if argument[1] is not None)})"
    with ExitStack() as stack:
        stack.enter_context(_TURN)
        stack.enter_context(suggest_for(store.workspace))
        stack.enter_context(record_origin(origin))
        stack.enter_context(keep_caller_state())
        shown: Any = listener
        if hasattr(shown, "__enter__"):
            stack.enter_context(shown)
        stack.enter_context(speak_of_arguments())
        store.require_folder()
        yield SpokenListener(listener)


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


@contextmanager
def speak_of_arguments() -> Iterator[None]:
    """Raises errors of optpipe again, worded for Python, and BadInputError for a name that no file can have."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise BadInputError(
            f"{escape(str(error.filename))}: the name is too long for a file; give a shorter one"
        ) from error
    except OptpipeError as error:
        error.word_for_python()
        raise


def speak(value: T) -> T:
    """A text worded for Python; a record or a document in which every text is."""
    return cast("T", _speak(value))


def _speak(value: Any) -> Any:
    if isinstance(value, str):
        return word_for_python(value)
    if isinstance(value, tuple | list):
        spoken = [_speak(item) for item in value]
        if all(new is old for new, old in zip(spoken, value, strict=True)):
            return value
        return type(value)(spoken)
    if isinstance(value, Mapping):
        return {key: _speak(item) for key, item in value.items()}
    if isinstance(value, type) or not (is_dataclass(value) or isinstance(value, msgspec.Struct)):
        return value
    changes = {}
    for name in (member.name for member in _list_fields(value)):
        old = getattr(value, name)
        if (new := _speak(old)) is not old:
            changes[name] = new
    change: Any = replace if is_dataclass(value) else msgspec.structs.replace
    return change(value, **changes) if changes else value


def _list_fields(record: Any) -> Iterable[Any]:
    return fields(record) if is_dataclass(record) else msgspec.structs.fields(record)


class SpokenListener(Listener):
    """Passes everything to a listener, texts worded for Python; its own warnings are those of one call."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def advance(self, count: int = 1) -> None:
        self._listener.advance(count)

    def cached(self) -> None:
        self._listener.cached()

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[ProgressStep]:
        with self._listener.step(name, total) as step:
            yield step

    def warn(self, message: str) -> None:
        super().warn(message)
        self._listener.warn(word_for_python(message))

    def inform(self, message: str) -> None:
        self._listener.inform(word_for_python(message))
