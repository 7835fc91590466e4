"""The three-valued verdict, and how verdicts combine."""

from collections.abc import Iterable
from enum import StrEnum

from optpipe.errors import ExitStatus


class Verdict(StrEnum):
    """PASS and FAIL are proven; INCONCLUSIVE is everything the evidence cannot decide."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status a command ends with on this verdict."""
        return {
            Verdict.PASS: ExitStatus.DONE,
            Verdict.FAIL: ExitStatus.FAIL,
            Verdict.INCONCLUSIVE: ExitStatus.INCONCLUSIVE,
        }[self]


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on all of `verdicts` together: any FAIL fails, nothing at all is INCONCLUSIVE."""
    seen = set(verdicts)
    if Verdict.FAIL in seen:
        return Verdict.FAIL
    if Verdict.INCONCLUSIVE in seen or not seen:
        return Verdict.INCONCLUSIVE
    return Verdict.PASS
