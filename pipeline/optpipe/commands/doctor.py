"""`optpipe doctor`."""

from optpipe.commands.options import JsonOption
from optpipe.commands.outcome import Outcome


def doctor(json: JsonOption = False) -> Outcome:
    """Say what this machine can do, and how to get what it lacks."""
    from optpipe.core.environment import environment

    found = environment()
    return Outcome(document=found, text=lambda: str(found))
