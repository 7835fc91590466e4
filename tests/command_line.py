"""What the command line makes of a command, without running it."""

import shlex
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from optpipe.cli.app import app
from optpipe.cli.groups import Outcome
from optpipe.core.events import SilentListener
from optpipe.workspace.store import Store

COMMAND = get_command(app)


def parse_command(line: str) -> tuple[str, dict[str, Any]]:
    """The verb, with the sub-command if it has some, and its parameters. Raises TyperException for a wrong word."""
    _, *words = shlex.split(line)
    verb, command = [], COMMAND
    context = command.make_context("optpipe", list(words))
    while isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, found, words = command.resolve_command(context, rest)
        assert found is not None
        verb.append(str(name))
        command, context = found, found.make_context(name, words, parent=context)
    return " ".join(verb), context.params


def call(
    command: Callable[..., Outcome], *given: Any, workspace: Path = Path(".optpipe"), **options: Any
) -> Outcome:
    """Calls a command's function as the command line does, with a store and a silent terminal where it takes them."""
    shared = {"store": Store(workspace), "terminal": SilentListener()}
    taken = signature(command).parameters
    return command(
        *given, **{name: each for name, each in shared.items() if name in taken} | options
    )
