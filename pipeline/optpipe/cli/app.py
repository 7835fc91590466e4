"""The command line: the list of commands, and the only place that prints results or exits."""

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from optpipe import __version__
from optpipe.cli.groups import (
    DefaultGroup,
    LazyCommands,
    Outcome,
    SectionedGroup,
    choose_command_class,
    define_options,
)
from optpipe.cli.options import JsonOption, WorkspaceOption
from optpipe.core.errors import ExitStatus, OptpipeError, escape, make_message
from optpipe.core.process import (
    discard_output,
    handle_interrupts,
    keep_descriptors,
    redirect_stdout_to_stderr,
)
from optpipe.core.records import plain_from_record
from optpipe.core.wording import DEFAULT_WORKSPACE
from optpipe.workspace.places import REFUSED

if TYPE_CHECKING:
    from typer._click import Command, Context, Parameter

    from optpipe.report.document import Document


Verb = str | dict[str, str]
"""`module:function` in this room, or several by name for a verb with subcommands, the default first."""

SECTIONS: dict[str, dict[str, Verb]] = {
    "Build": {
        "build": "build:build",
        "calibrate": "build:calibrate",
        "preprocess": "preprocess:preprocess",
    },
    "Measure": {
        "bench": "bench:bench",
        "evaluate": "evaluate:evaluate",
        "profile": "profile:profile",
    },
    "Judge": {
        "compare": "bench:compare",
        "signoff": {
            "judge": "signoff:signoff",
            "approve": "signoff:approve",
            "attest": "signoff:attest",
            "stamp": "signoff:stamp",
            "export": "signoff:export",
            "recheck": "signoff:recheck",
        },
        "verify": "signoff:verify",
        "run": "signoff:run",
    },
    "Ship": {"deploy": "ship:deploy", "sweep": "ship:sweep"},
    "Workspace": {
        "store": {name: f"store:{name}" for name in ("ls", "show", "approve", "rm", "gc", "merge")},
        "doctor": "store:doctor",
    },
}

SHARED_OPTIONS = "Every command takes --workspace DIR and --json; optpipe --help explains them."


class Commands(SectionedGroup):
    """With `--json`, wrong use too is a JSON document on stdout."""

    sections = SECTIONS

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands(
            {
                name: partial(_make, name, where)
                for verbs in SECTIONS.values()
                for name, where in verbs.items()
            }
        )

    def main(self, *given: Any, **options: Any) -> Any:
        words = given[0] if given else sys.argv[1:]
        keep_descriptors()
        try:
            status = super().main(words, **{**options, "standalone_mode": False}) or ExitStatus.DONE
        except TyperException as error:
            status = error.exit_code
            if not words:  # the whole help
                error.show()  # type: ignore[attr-defined] # those that Typer raises all have it
            else:
                # the prefix is of the library that reads an option's text
                message = error.format_message().replace("Value error, ", "")
                if (context := getattr(error, "ctx", None)) is not None:
                    message += f"\nTry '{context.command_path} --help' for help."
                _print_failure(message, status, as_json="--json" in words)
        except OSError as error:  # a text of help or version
            status = _handle_undelivered(error, ExitStatus.DONE)
        except SystemExit as ended:  # Typer exits if the reader of a help text has gone
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            status = _handle_undelivered(ended.__context__, ExitStatus.DONE)
        sys.exit(status)


app = typer.Typer(
    name="optpipe",
    cls=Commands,
    help="From a trained model to a signed-off, deployable inference engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


PIPED_WIDTH = 100
"""Columns of a table in a file or a pipe if COLUMNS is not set."""


SCHEMA_VERSION = 27
"""The version that all JSON documents share; it increases when the shape of any document changes."""


def _print_json(document: object) -> None:
    plain = {"schema_version": SCHEMA_VERSION, **plain_from_record(document)}
    print(json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False), flush=True)


def print_outcome(command: Callable[..., Outcome]) -> Callable[..., None]:
    """Prints the outcome of `command`; expected failures become one or two lines and an exit status."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        context: typer.Context | None = options.get("context")
        shared = context.find_root().params if context is not None else options
        as_json, outcome = bool(shared.get("json")), None
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
        try:
            with redirect_stdout_to_stderr(), handle_interrupts():
                outcome = command(*args, **options)
            if as_json:
                _print_json(outcome.document)
            else:
                _print_text(outcome.show(outcome.document))
        except OptpipeError as error:
            _print_failure(str(error), error.exit_status, as_json=as_json)
            raise typer.Exit(error.exit_status) from None
        except OSError as error:
            if outcome is not None and error.errno in GONE:
                raise typer.Exit(_handle_undelivered(error, outcome.status)) from None
            if (
                error.errno == errno.EPIPE
            ):  # of another pipe: Typer would take it for stdout's and exit silently
                raise RuntimeError("broken pipe to another process") from error
            if error.errno not in UNWRITABLE and not isinstance(error, shutil.Error):
                raise
            too_long = error.errno == errno.ENAMETOOLONG
            status = ExitStatus.BAD_INPUT if too_long else ExitStatus.STAGE_FAILED
            _print_failure(_explain_os_error(error), status, as_json=as_json and outcome is None)
            raise typer.Exit(status) from None
        except KeyboardInterrupt:
            _print_failure(
                "interrupted; finished work was kept", ExitStatus.INTERRUPTED, as_json=as_json
            )
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
        raise typer.Exit(outcome.status)

    return run


GONE = (errno.EPIPE, errno.EBADF)
"""Errors of writing to stdout if its reader has gone or it was closed from the start."""


def _handle_undelivered(error: OSError, status: ExitStatus) -> ExitStatus:
    """Reports that stdout is incomplete. Returns `status`, or a failure if stdout was closed from the start.

    Raises `error` if it is a different one.
    """
    if error.errno not in GONE:
        raise error
    discard_output(1)
    _say("standard output is closed; the result was not fully written, but finished work was kept")
    return (
        ExitStatus.STAGE_FAILED
        if error.errno == errno.EBADF and status is ExitStatus.DONE
        else status
    )


UNWRITABLE = (*REFUSED, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.EFBIG)
"""Refusals of a file system that a user can fix; any other OSError here is a bug."""


def _explain_os_error(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # from copying a folder: a list of (source, target, reason)
        _, target, why = error.args[0][0]
        what = str(why).partition(": '")[0]
        return f"cannot copy to {target}: {what}; free disk space, or choose another location"
    if error.errno == errno.ENAMETOOLONG:
        return f"{error.filename}: the name is too long for a file; give a shorter one"
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left{where}; free disk space, or choose other locations with --workspace, --output and TMPDIR"
    return f"cannot read or write{where}: {error.strerror}; choose another location"


def _print_failure(message: str, status: int, *, as_json: bool) -> None:
    message = make_message(message)
    _say(message)
    if as_json:
        try:
            _print_json({"error": {"message": message, "exit_status": int(status)}})
        except OSError as error:
            _handle_undelivered(error, ExitStatus(status))


def _say(message: str) -> None:
    try:
        shown = "\n".join(map(escape, message.splitlines()))  # text from files
        print(f"optpipe: {shown}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads stderr either; the exit status reports the failure
        discard_output(2)


def _print_text(text: "Document | str") -> None:
    from rich.console import Console

    from optpipe.report.document import clean_text
    from optpipe.report.terminal import print_document

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console = Console(highlight=False, markup=False, width=PIPED_WIDTH)
    with console.capture() as written:  # a console that writes exits if its reader has gone
        if isinstance(text, str):
            console.print(clean_text(text))
        else:
            print_document(text, console)
    print(written.get(), end="", flush=True)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"optpipe {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def _optpipe(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> None:
    pass


TYPES = {"str": "TEXT", "int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}


def _show_type(param: "Parameter", ctx: "Context") -> str:
    """`N` for Typer's `<int range>`; empty for an argument, whose name is enough."""
    typer_name: str = type(param).display_type_rich(param, ctx) or ""  # type: ignore[attr-defined]
    shown = typer_name.replace("<list[", "<").replace("]>", ">").strip("<>")
    return "" if param.param_type_name == "argument" else TYPES.get(shown, shown)


def _make(name: str, where: Verb) -> "Command":
    if isinstance(where, str):
        module, _, function = where.partition(":")
        command = getattr(import_module(f"optpipe.cli.{module}"), function)
        alone = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        kind = choose_command_class(command)
        alone.command(name, cls=kind, epilog=SHARED_OPTIONS)(print_outcome(define_options(command)))
        made = typer.main.get_command(alone)
        for parameter in made.params:
            vars(parameter)["display_type_rich"] = partial(_show_type, parameter)
        return made
    below = LazyCommands({name: partial(_make, name, path) for name, path in where.items()})
    options: Mapping[str, Any] = {"name": name, "commands": below, "rich_markup_mode": None}
    if name == "store":
        return TyperGroup(help="List, show, remove, and merge stored builds and runs.", **options)
    usage = "[MODEL] | COMMAND [ARGS]..."
    return DefaultGroup(help=below[next(iter(where))].help, subcommand_metavar=usage, **options)
