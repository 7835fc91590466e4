"""A round of processes in turns says whether it is VALID as soon as it ends."""

import pytest

from optpipe.core.errors import StageError
from optpipe.core.events import Listener
from optpipe.measure.measure import announce_round


class Told(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def inform(self, message: str) -> None:
        self.lines.append(message)


def test_a_round_with_a_figure_is_valid() -> None:
    told = Told()
    with announce_round(2, told):
        assert not told.lines
    assert told.lines == ["round 2, both processes: VALID"]


def test_a_round_without_a_figure_is_invalid_and_its_error_goes_on() -> None:
    told = Told()
    with pytest.raises(StageError), announce_round(1, told):
        raise StageError("too few trials\nfree the machine")
    assert told.lines == ["round 1, both processes: INVALID (too few trials)"]


def test_an_interruption_is_no_verdict() -> None:
    told = Told()
    with pytest.raises(KeyboardInterrupt), announce_round(1, told):
        raise KeyboardInterrupt
    assert not told.lines
