"""`optpipe profile`."""

from pathlib import Path
from typing import Annotated

import typer

from optpipe.commands.options import DEFAULT_WORKSPACE, JsonOption, WorkspaceOption
from optpipe.commands.outcome import Outcome


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="As for `optpipe build`; left out with --trace and --diff.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Judge a recording that exists: .nsys-rep, its .sqlite export, or a profile's folder."
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Compare two recordings, kernel by kernel and layer by layer."),
    ] = None,
    range: Annotated[
        str | None, typer.Option("--range", metavar="NAME", help="Judge only what this NVTX range launched.")
    ] = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    json: JsonOption = False,
) -> Outcome:
    """Say what limits each stage, from a recording under Nsight Systems, and what to try next."""
    from optpipe.commands.terminal import Terminal
    from optpipe.errors import BadInputError
    from optpipe.reporters.terminal_profile import diff_text, profile_text
    from optpipe.stages.profile import diff_recordings, profile_recording
    from optpipe.trace.kernels import short_name
    from optpipe.trace.report import document_from_profile

    if sum(given is not None for given in (model, trace, diff)) != 1:
        msg = "give one of: MODEL to record a profile, --trace FILE to judge one, --diff BEFORE AFTER"
        raise BadInputError(msg)
    with Terminal() as terminal:
        if diff is not None:
            compared = diff_recordings(*diff, range, terminal).document()
            return Outcome(compared, lambda: diff_text(compared, short_name))
        if trace is not None:
            document = document_from_profile(profile_recording(trace, range, terminal))
            return Outcome(document, lambda: profile_text(document, short_name))
    raise NotImplementedError
