"""`optpipe doctor`."""

from typing import Annotated

import typer

from optpipe.cli.groups import Outcome


def doctor(
    options: Annotated[
        bool, typer.Option("--options", help="List each backend's options, for --option BACKEND.KEY=VALUE.")
    ] = False,
) -> Outcome:
    """Show what this machine supports and what to install."""
    from optpipe.build.doctor import diagnose_machine, list_options
    from optpipe.build.document import document_from_diagnosis, document_from_options

    if options:
        listed = list_options()
        return Outcome(listed, lambda: document_from_options(listed))
    found = diagnose_machine()
    return Outcome(found, lambda: document_from_diagnosis(found.findings))
