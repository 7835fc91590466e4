"""Where a stored document differs from the one computed again."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping

from optpipe.core.errors import BadInputError
from optpipe.core.records import plain_from_record

PROSE = ("reason", "remedy", "limit", "about", "message", "note", "detail", "why", "advice", "why_not", "withheld")
"""Sentences about the figures beside them: another version of optpipe may word them differently."""


Recomputed = tuple[str, object, object]
"""The place of a document, the record in it, and the record that the raw files give."""


RELATIVE_TOLERANCE = 1e-9
"""Between two computations of one figure, on two machines, by the same formula."""


def list_read_errors() -> tuple[type[Exception], ...]:
    """What reading a file can raise whose values are of the wrong kind, however intact its form."""
    import polars as pl

    wrong_kind = (AttributeError, ArithmeticError, IndexError, KeyError, TypeError, ValueError)
    return (BadInputError, pl.exceptions.PolarsError, *wrong_kind)


def compare_recomputed(found: Iterable[Recomputed]) -> Iterator[str]:
    """Where stored records say something else than their raw files give, one line each."""
    for place, stored, computed in found:
        yield from find_disagreements(plain_from_record(stored), plain_from_record(computed), place)


def find_disagreements(stored: object, computed: object, place: str) -> list[str]:
    """Where a stored document says something else than what was computed, one line each.

    What is null and was not stored is a field that later versions have.
    """
    if isinstance(computed, Mapping) and isinstance(stored, Mapping):
        added = {name for name, value in computed.items() if value is None and name not in stored}
        names = sorted((set(stored) | set(computed)) - set(PROSE) - added)
        return [
            problem
            for name in names
            for problem in find_disagreements(
                stored.get(name, "nothing"), computed.get(name, "nothing"), f"{place}: {name}"
            )
        ]
    if isinstance(computed, list) and isinstance(stored, list) and len(computed) == len(stored):
        pairs = enumerate(zip(stored, computed, strict=True))
        return [
            problem
            for at, (one, other) in pairs
            for problem in find_disagreements(one, other, f"{place}[{_common_name(one, other) or at}]")
        ]
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (stored, computed))
    if stored == computed or (numbers and math.isclose(stored, computed, rel_tol=RELATIVE_TOLERANCE)):  # type: ignore[arg-type]
        return []
    return [f"{place} says {_shorten(stored)}, but the raw files give {_shorten(computed)}"]


def _common_name(one: object, other: object) -> object:
    """What both call themselves, so that a line names a criterion or a measurement and not its place in a list."""
    names = [each.get("name") or each.get("id") if isinstance(each, Mapping) else None for each in (one, other)]
    return names[0] if names[0] == names[1] else None


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
