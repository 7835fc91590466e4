"""The command line: the list of commands, and the only place that prints results or exits."""

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from optpipe import __version__
from optpipe.commands import (
    bench,
    build,
    calibrate,
    compare,
    doctor,
    evaluate,
    preprocess,
    profile,
    run,
    signoff,
    stored,
)
from optpipe.commands.options import DEFAULT_WORKSPACE
from optpipe.commands.outcome import Outcome
from optpipe.core.interrupts import interruptible
from optpipe.core.quiet import keep_descriptors, stdout_to_stderr, write_nowhere
from optpipe.errors import ExitStatus, OptpipeError


class Commands(TyperGroup):
    """The commands; where `--json` was asked for, wrong use too is a JSON document on stdout."""

    def main(self, *given: Any, **options: Any) -> Any:
        """Runs the command line and exits."""
        words = given[0] if given else sys.argv[1:]
        keep_descriptors()
        try:
            status = super().main(words, **{**options, "standalone_mode": False}) or ExitStatus.DONE
        except TyperException as error:
            error.show()  # type: ignore[attr-defined] # those that Typer raises all have it
            status = error.exit_code
            if "--json" in words:
                _print_json_failure(error.format_message(), status)
        except OSError as error:  # a text of help or version
            status = _undelivered(error, ExitStatus.DONE)
        except SystemExit as ended:  # so it ends itself where the reader of a text has gone
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            status = _undelivered(ended.__context__, ExitStatus.DONE)
        sys.exit(status)


app = typer.Typer(
    name="optpipe",
    cls=Commands,
    help="From a trained model to a signed-off, deployable inference engine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


PIPED_WIDTH = 160
"""Columns of a table that goes into a file or a pipe, which has no width of its own."""


def shown(command: Callable[..., Outcome]) -> Callable[..., None]:
    """Wraps `command` so that its outcome is printed and its expected failures become one or two lines and a status."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        as_json, outcome = bool(options.get("json")), None
        try:
            with stdout_to_stderr(), interruptible():
                outcome = command(*args, **options)
            if as_json:
                print(json.dumps(outcome.document, indent=2, allow_nan=False), flush=True)
            else:
                _print_text(outcome.text())
        except OptpipeError as error:
            message = str(error) + _workspace_hint(str(error), options.get("workspace"))
            _print_failure(message, error.exit_status, as_json=as_json)
            raise typer.Exit(error.exit_status) from None
        except OSError as error:
            if outcome is not None and error.errno in GONE:
                raise typer.Exit(_undelivered(error, outcome.status)) from None
            if error.errno == errno.EPIPE:  # of another pipe: Typer would take it for this one, and end without a word
                raise RuntimeError("a pipe to another process broke") from error
            if error.errno not in REFUSED and not isinstance(error, shutil.Error):
                raise
            _print_failure(_refusal(error), ExitStatus.STAGE_FAILED, as_json=as_json and outcome is None)
            raise typer.Exit(ExitStatus.STAGE_FAILED) from None
        except KeyboardInterrupt:
            _print_failure("interrupted; what was finished is kept", ExitStatus.INTERRUPTED, as_json=as_json)
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
        raise typer.Exit(outcome.status)

    return run


def _workspace_hint(message: str, workspace: Path | None) -> str:
    """What turns the commands that `message` names into ones for `workspace`, where that is not the usual one."""
    usual = os.environ.get("OPTPIPE_WORKSPACE") or DEFAULT_WORKSPACE
    if workspace is None or workspace == Path(usual) or "optpipe " not in message:
        return ""
    return f"\n(your workspace: --workspace {shlex.quote(str(workspace))})"


GONE = (errno.EPIPE, errno.EBADF)
"""What writing to stdout says where nobody reads it any more, or it was closed from the start."""


def _undelivered(error: OSError, status: ExitStatus) -> ExitStatus:
    """Says that not all was written to stdout. Returns `status`, but a failure where all went well and nobody ever read.

    Raises `error` where it is about anything else.
    """
    if error.errno not in GONE:
        raise error
    write_nowhere(1)
    _say("standard output is closed: not all of the result was written; what was done is kept")
    return ExitStatus.STAGE_FAILED if error.errno == errno.EBADF and status is ExitStatus.DONE else status


REFUSED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EFBIG,
)
"""What a file system refuses that a user can mend; any other error of the system that comes this far is a bug."""


def _refusal(error: OSError) -> str:
    if isinstance(error, shutil.Error):  # of a folder's copy: a list of (source, target, what was wrong)
        _, target, why = error.args[0][0]
        what = str(why).partition(": '")[0]
        return f"cannot copy to {target}: {what}; free some space, or choose another place"
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left{where}; free some, or choose other places with --workspace, --output and TMPDIR"
    return f"cannot read or write{where}: {error.strerror}; choose another place"


def _print_failure(message: str, status: ExitStatus, *, as_json: bool) -> None:
    _say(message)
    if as_json:
        _print_json_failure(message, status)


def _say(message: str) -> None:
    try:
        print(f"optpipe: {message}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads that either; the exit status says it
        write_nowhere(2)


def _print_json_failure(message: str, status: int) -> None:
    try:
        print(json.dumps({"error": {"message": message, "exit_status": int(status)}}, indent=2), flush=True)
    except OSError as error:
        _undelivered(error, ExitStatus(status))


def _print_text(text: object) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPED_WIDTH)
    with console.capture() as written:  # a console that writes ends the process where its reader has gone
        console.print(text)
    print(written.get(), end="", flush=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"optpipe {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def _optpipe(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


app.command("run")(shown(run.run))
app.command("build")(shown(build.build))
app.command("evaluate")(shown(evaluate.evaluate))
app.command("calibrate")(shown(calibrate.calibrate))
app.command("preprocess")(shown(preprocess.preprocess))
app.command("bench")(shown(bench.bench))
app.command("profile")(shown(profile.profile))
app.command("compare")(shown(compare.compare))
app.command("signoff")(shown(signoff.signoff))
app.command("verify")(shown(signoff.verify))
app.command("approve")(shown(signoff.approve))
app.command("doctor")(shown(doctor.doctor))
app.command("ls")(shown(stored.ls))
app.command("show")(shown(stored.show))
app.command("rm")(shown(stored.rm))
app.command("gc")(shown(stored.gc))
