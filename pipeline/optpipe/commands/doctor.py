"""`optpipe doctor`."""

from optpipe.commands.options import JsonOption
from optpipe.commands.outcome import Outcome


def doctor(json: JsonOption = False) -> Outcome:
    """Show what this machine supports and what to install."""
    from optpipe.build.doctor import diagnose_machine
    from optpipe.reporters.terminal_doctor import render_diagnosis

    found = diagnose_machine()
    return Outcome(found, lambda: render_diagnosis(found.findings))
