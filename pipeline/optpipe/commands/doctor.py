"""`optpipe doctor`."""

from optpipe.commands.options import JsonOption
from optpipe.commands.outcome import Outcome


def doctor(json: JsonOption = False) -> Outcome:
    """Say what this machine can do, and how to get what it lacks."""
    from optpipe.build.doctor import diagnose, diagnosis_record
    from optpipe.reporters.terminal_doctor import doctor_table

    record = diagnosis_record(diagnose())
    return Outcome(record, lambda: doctor_table(record["findings"]))
