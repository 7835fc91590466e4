"""What every command returns: one JSON document, one text for people, one exit status."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optpipe.core.errors import ExitStatus


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished command. `text` is only called when people read it, so that `--json` pays for no rendering."""

    document: Any
    """A record or a mapping: what `--json` prints."""
    text: Callable[[], Any]
    """Makes the text or rich renderable for people; units and rounding belong in `optpipe.report`."""
    status: ExitStatus = ExitStatus.DONE
