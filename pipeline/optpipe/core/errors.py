"""Expected failures, each with its exit status.

An error is data: a problem, its place, the argument at fault, and a remedy; `core/wording.py` shows how they are given, and how each
door words them, on one or two lines. Any other exception is a bug and shows its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from optpipe.core.wording import Argument, Message


class ExitStatus(IntEnum):
    DONE = 0
    FAIL = 1
    BAD_INPUT = 2
    MISSING = 3
    STAGE_FAILED = 4
    INCONCLUSIVE = 5
    INTERRUPTED = 130


class OptpipeError(Exception):
    """An expected failure; the command exits with `exit_status`.

    `problem` says what is wrong, after `place` (a file or a model) and the `argument` at fault, by its name or with its value;
    `remedy` is the next line. `str()` is worded for the terminal, and for Python once `word_for_python` was called.
    """

    exit_status = ExitStatus.STAGE_FAILED

    def __init__(
        self,
        problem: str = "",
        *,
        place: object = None,
        argument: Argument | str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.place, self.remedy = problem, place, remedy
        if argument is not None and not isinstance(argument, Argument):
            argument = Argument(argument)
        self.argument = argument
        super().__init__(shorten(self.message.on_terminal()))

    @property
    def message(self) -> Message:
        """The whole text, to be part of another error's."""
        before = [part for part in (self.argument, self.place) if part is not None]
        parts = [Message(part if isinstance(part, Message) else str(part), ": ") for part in before]
        after = () if self.remedy is None else ("\n", self.remedy)
        return Message(*parts, self.problem, *after)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that it blames or proposes."""
        return tuple(dict.fromkeys(argument.name for argument in self.message.list_arguments()))

    def word_for_python(self) -> None:
        """From now on `str()` names arguments and calls of the library instead of options and commands."""
        self.args = (shorten(self.message.in_python()),)


class BadInputError(OptpipeError):
    """Wrong use, or an input that cannot be what the user claims."""

    exit_status = ExitStatus.BAD_INPUT


class MissingError(OptpipeError):
    """A required tool, driver, library or GPU is missing."""

    exit_status = ExitStatus.MISSING


class StageError(OptpipeError):
    """A stage failed on good input."""


class GateError(OptpipeError):
    """A stage finished with a judged FAIL."""

    exit_status = ExitStatus.FAIL


class InconclusiveError(OptpipeError):
    """A verdict is INCONCLUSIVE: nothing is proven, neither way."""

    exit_status = ExitStatus.INCONCLUSIVE


def error_from_status(message: str, status: ExitStatus) -> OptpipeError:
    """The error of another process, by the status that it would have exited with."""
    kinds = {
        kind.exit_status: kind
        for kind in (BadInputError, MissingError, GateError, InconclusiveError)
    }
    return kinds.get(status, StageError)(message)


def first_line(error: BaseException) -> str:
    """A library's error on one line; the name of its type if it has no message."""
    return escape((str(error).strip() or type(error).__name__).splitlines()[0])[:240]


LONGEST_WORD = 300
"""Characters without a space that a message repeats whole: a path of a deep folder, but not a text that was taken for a name."""
LONGEST_LINE = 500
LONGEST_WAY_OUT = 1000
"""The line of a way out may hold a command with several long paths."""


def shorten(text: str) -> str:
    """`text` for a message: words over LONGEST_WORD and lines over LONGEST_LINE lose their middle, so that both ends stay.

    A user's string may be of any length, and the way out stands behind it.

    >>> len(shorten("x" * 5000))
    161
    """
    lines = [
        " ".join(_cut_middle(word, LONGEST_WORD, 80) for word in line.split(" "))
        for line in text.split("\n")
    ]
    first, *others = (_cut_middle(line, LONGEST_WAY_OUT, LONGEST_LINE // 2) for line in lines)
    return "\n".join([_cut_middle(first, LONGEST_LINE, LONGEST_LINE // 2), *others])


def _cut_middle(text: str, most: int, end: int) -> str:
    return text if len(text) <= most else f"{text[:end]}…{text[-end:]}"


def make_message(text: str) -> str:
    """An error or a warning as a terminal shows it: the problem and the way out, at most a line each, without control characters.

    Further lines come from a line break in a user's string or a file.

    >>> make_message("a\\nb: no such file\\nuse another")
    'a\\\\nb: no such file\\nuse another'
    """
    *problem, last = [escape(line) for line in text.splitlines()] or [""]
    return shorten("\n".join(["\\n".join(problem), last] if problem else [last]))


def escape(text: str) -> str:
    """Escapes control characters and lone surrogates, so that no file can drive the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def require_existing(path: Path | None, argument: str) -> None:
    """Raises BadInputError that names `argument` if `path` is neither a file nor a folder. None passes."""
    if path is None or path.is_file() or path.is_dir():
        return
    problem = "is a pipe, a socket, or a device" if path.exists() else "no such file or folder"
    raise BadInputError(problem, argument=Argument(argument, path))


def require_file(path: str | Path, way_out: str = "") -> Path:
    """The path. Raises BadInputError, with `way_out` at its end, if there is no such file."""
    named = Path(path)
    if named.is_file():
        return named
    problem = "no such file"
    if named.is_dir():
        problem = "is a folder; give a file"
    elif named.exists():
        problem = "is a pipe, a socket, or a device"
    raise BadInputError(f"{path}: {problem}" + way_out)


@contextmanager
def read_as_user_file(path: Path, what: str, way_out: str = "") -> Iterator[None]:
    """Reports every exception while the block reads a user's file as that file's fault.

    Raises BadInputError with the file, `what`, and the library's reason. Errors of optpipe pass.
    """
    try:
        yield
    except OptpipeError:
        raise
    except BaseException as error:
        # a panic of polars is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, FileNotFoundError | IsADirectoryError) and (
            error.filename in (path, str(path)) or path.is_dir()
        ):
            what = (
                "is a folder; give a file"
                if isinstance(error, IsADirectoryError)
                else "no such file"
            )
            raise BadInputError(f"{path}: {what}") from error
        told = isinstance(error, OSError | ValueError | RuntimeError) and not isinstance(
            error, RecursionError
        )
        kind = "" if told else f"{type(error).__name__}: "
        raise BadInputError(
            f"{path} cannot be read as {what}: {kind}{first_line(error)}"
            + ("\n" + way_out if way_out else "")
        ) from error


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error of torch, CUDA, TensorRT, ONNX Runtime, DALI or C++, or its text, reports exhausted memory."""
    text = error.lower() if isinstance(error, str) else f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = (
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "failed to allocate memory",
    "bad_alloc",
    "badalloc",
    "cudaerrormemoryallocation",
)
