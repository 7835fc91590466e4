"""In which order slots take works, and how large: longest expected time first (LPT, Graham 1969), the last ones divided so that
slots end together."""

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import replace
from itertools import accumulate
from math import floor
from typing import TypeVar

from optpipe.sweep.plan import START_S, Work

T = TypeVar("T")


def sort_works(works: Iterable[Work]) -> list[Work]:
    """The longest first: with n slots the last ends at most 4/3 - 1/(3n) times as late as in the best order."""
    return sorted(works, key=lambda work: -work.expected_s)


def take_work(waiting: MutableSequence[tuple[Work, T]], at: int, ends: Sequence[float], slots: int, now: float) -> Work:
    """Removes the work at index `at` for a slot of its kind that is free `now`, and puts back the loads that other slots do sooner.

    `slots` is how many the kind has; `ends` are the times in seconds when those that are in use are expected to be free.
    """
    work, note = waiting.pop(at)
    if len(work.cells) == 1 or slots == 1:
        return work
    left_s = work.expected_s + START_S  # one more process has to start where the work is divided
    for other, _ in waiting:
        if left_s >= work.expected_s * slots:  # enough for the others to do meanwhile
            return work
        left_s += other.expected_s if other.kind == work.kind else 0.0
    free = sorted([*(max(now, end) for end in ends), *[now] * (slots - len(ends))])
    together = min((left_s + total) / count for count, total in enumerate(accumulate(free), start=1))
    count = max(1, floor((together - now - START_S) / work.load_s))
    if count < len(work.cells):
        rest = replace(work, cells=work.cells[count:])
        place = next((at for at, (each, _) in enumerate(waiting) if each.expected_s <= rest.expected_s), len(waiting))
        waiting.insert(place, (rest, note))
    return replace(work, cells=work.cells[:count])
