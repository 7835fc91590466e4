"""Comma-separated lists of known words, such as `--precision fp16,int8`, and their completion by the shell."""

from collections.abc import Collection
from difflib import get_close_matches

from optpipe.core.errors import BadInputError


def choices_from_text(text: str, choices: Collection[str], flag: str) -> tuple[str, ...]:
    """Reads a list of `choices`; keeps its order and drops repetitions. Raises BadInputError that names the nearest word."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    known = ", ".join(choices)
    for word in words:
        if word not in choices:
            near = get_close_matches(word, choices, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise BadInputError(f"{flag} {word}: {hint}choose from {known}")
    if not words:
        raise BadInputError(f"{flag} is empty; choose from {known}")
    return tuple(dict.fromkeys(words))


def complete_choice(incomplete: str, choices: Collection[str]) -> list[str]:
    """The lists that complete the last word of `incomplete`, for a shell."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [f"{before}{comma}{word}" for word in choices if word.startswith(last) and word not in given]
