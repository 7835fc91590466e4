"""Programs of NVIDIA's tools, `nsys` and `ncu`: where they are, and how they run."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from optpipe.core.errors import MissingError, StageError
from optpipe.core.process import NEUTRAL_FOLDER, open_process_group

_TOOL_TIMEOUT_S = 600


def find_tool(name: str, variable: str, folders: Sequence[str], missing: str) -> Path:
    """Searches the environment's `variable`, PATH, and `folders`, patterns below /opt, of which the last match counts.

    Raises MissingError, with the sentence `missing` if the program is in none of them.
    """
    if named := os.environ.get(variable):
        if not Path(named).is_file():
            raise MissingError(f"{variable}={named}: no such file")
        return Path(named).absolute()
    if path := shutil.which(name):
        return Path(path).absolute()
    for pattern in folders:
        if places := sorted(Path("/opt").glob(pattern)):
            return places[-1]
    raise MissingError(missing)


def run_tool(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a program of nsys or ncu, whose arguments are absolute paths, away from the current folder."""
    try:
        return subprocess.run(
            command,
            cwd=NEUTRAL_FOLDER,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        name = Path(command[0]).name
        raise StageError(f"{name} did not finish within {_TOOL_TIMEOUT_S} s") from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error


def run_to_end(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    timeout_s: float | None,
    ask_s: float,
    name: str,
) -> int:
    """Runs nsys or ncu with a program, away from the current folder, and returns the exit status; output goes to `log`.

    Nothing of its process group outlives the call. Raises StageError, which says that `name` did not finish, after `timeout_s`,
    and MissingError if the command cannot run.
    """
    try:
        with open_process_group(
            command, log, environment, ask_s=ask_s, foreign=True, folder=NEUTRAL_FOLDER
        ) as process:
            return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{name} did not finish within {timeout_s:.0f} s") from error
    except OSError as error:
        raise MissingError(f"cannot run {command[0]}: {error.strerror}") from error
