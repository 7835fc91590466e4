"""The few expected failures, each with its exit status.

A message is one or two lines: what happened, where, and the command or flag that mends it. Anything that is not an
`OptpipeError` and reaches the top is a bug and shows its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitStatus(IntEnum):
    """What a command's exit status means; the same for every command."""

    DONE = 0
    FAIL = 1
    BAD_INPUT = 2
    MISSING = 3
    STAGE_FAILED = 4
    INCONCLUSIVE = 5
    INTERRUPTED = 130


class OptpipeError(Exception):
    """An expected failure; `exit_status` is what the command exits with."""

    exit_status = ExitStatus.STAGE_FAILED


class BadInputError(OptpipeError):
    """Wrong use, or an input that cannot be what the user says it is."""

    exit_status = ExitStatus.BAD_INPUT


class MissingError(OptpipeError):
    """A tool, driver, library or GPU that the request needs is not here."""

    exit_status = ExitStatus.MISSING


class StageError(OptpipeError):
    """A stage began with good input and could not finish."""

    exit_status = ExitStatus.STAGE_FAILED


class GateError(OptpipeError):
    """A stage finished and its result is outside what was asked for: a judged FAIL."""

    exit_status = ExitStatus.FAIL


def first_line(error: BaseException) -> str:
    """A library's error on one line, for a message that adds the way out; its type's name where it says nothing."""
    return escape((str(error).strip() or type(error).__name__).splitlines()[0])[:240]


def escape(text: str) -> str:
    """`text` with control characters and lone surrogates as Python writes them: no file may drive the terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def require_existing(path: Path | None, option: str) -> None:
    """Raises BadInputError, with the name of the option that gave it, where nothing is at `path`; None was not given."""
    if path is not None and not path.exists():
        raise BadInputError(f"{option} {path}: no such file or folder")


@contextmanager
def read_as_user_file(path: Path, what: str, way_out: str = "") -> Iterator[None]:
    """The one boundary around a user's file: whatever a library raises while the block reads it is that file's fault.

    Raises `BadInputError` with the file, what it was read as, and the library's reason; errors of optpipe pass.
    """
    try:
        yield
    except OptpipeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # polars' own, no Exception
            raise
        if isinstance(error, FileNotFoundError | IsADirectoryError) and error.filename in (path, str(path)):
            what = "is a folder; give a file" if isinstance(error, IsADirectoryError) else "no such file"
            raise BadInputError(f"{path}: {what}") from error
        told = isinstance(error, OSError | ValueError | RuntimeError) and not isinstance(error, RecursionError)
        kind = "" if told else f"{type(error).__name__}: "
        raise BadInputError(
            f"{path} cannot be read as {what}: {kind}{first_line(error)}" + (f"\n{way_out}" if way_out else "")
        ) from error


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its text, of torch, CUDA, TensorRT, ONNX Runtime, DALI or C++ says that memory ran out."""
    text = error.lower() if isinstance(error, str) else f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("out of memory", "out_of_memory", "outofmemory", "failed to allocate memory", "bad_alloc", "badalloc",
                  "cudaerrormemoryallocation")  # fmt: skip
