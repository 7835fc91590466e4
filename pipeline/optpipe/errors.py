"""The few expected failures, each with its exit status.

A message is one or two lines: what happened, where, and the command or flag that mends it. Anything that is not an
`OptpipeError` and reaches the top is a bug and shows its traceback.
"""

from enum import IntEnum


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
    return (str(error).strip() or type(error).__name__).splitlines()[0][:240]
