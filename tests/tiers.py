"""Which cases of a long table run in the fast tier."""

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import pytest


def leave_to_slow_tier(cases: Iterable[Any], *, but: Collection[Hashable] = ()) -> list[Any]:
    """The cases of a parametrized test, all marked slow except those in `but`.

    A table of a hundred cases that go the same way takes a minute. The fast tier runs one of each kind.
    """
    cases = list(cases)
    unknown = set(but) - set(cases)
    assert not unknown, f"no such case: {unknown}"
    return [
        case if case in but else pytest.param(*_as_values(case), marks=pytest.mark.slow)
        for case in cases
    ]


def _as_values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
