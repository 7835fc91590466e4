"""Commands that a message advises, as they have to be typed to mean the workspace that the message is about."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_WORKSPACE: ContextVar[Path | None] = ContextVar("workspace of the running command", default=None)


@contextmanager
def advising_for(workspace: Path | None) -> Iterator[None]:
    """What is advised while the block runs means `workspace`: that of the running command."""
    before = _WORKSPACE.set(workspace)
    try:
        yield
    finally:
        _WORKSPACE.reset(before)


def advised(words: str, workspace: Path | None = None) -> str:
    """`optpipe WORDS` with `--workspace DIR` at its end, where that is not the usual one and `words` are of a command that has it.

    `workspace` is the running command's where it is not given.
    """
    found = workspace or _WORKSPACE.get()
    usual = os.environ.get("OPTPIPE_WORKSPACE") or ".optpipe"
    flag = "" if found is None or found == Path(usual) else f" --workspace {shlex.quote(str(found))}"
    return f"optpipe {words}{flag}"


def again(command: str, workspace: Path) -> str:
    """The recorded `command` for `workspace`, which may have been moved or copied since."""
    words = shlex.split(command)
    if "--workspace" in words[:-1]:
        at = words.index("--workspace")
        del words[at : at + 2]
    words = [each for each in words if not each.startswith("--workspace=")]
    return advised(shlex.join(words[1:]), workspace) if words[:1] == ["optpipe"] else command
