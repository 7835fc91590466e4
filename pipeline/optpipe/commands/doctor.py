"""`optpipe doctor`."""

from optpipe.commands.options import JsonOption
from optpipe.commands.outcome import Outcome


def doctor(json: JsonOption = False) -> Outcome:
    """Show what this machine supports and what to install."""
    from optpipe.build.doctor import diagnose_machine, document_from_diagnosis
    from optpipe.reporters.terminal_doctor import render_diagnosis

    record = document_from_diagnosis(diagnose_machine())
    return Outcome(record, lambda: render_diagnosis(record["findings"]))
