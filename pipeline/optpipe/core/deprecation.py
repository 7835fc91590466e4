"""Deprecated names, with the versions that warn and that remove them. docs/reference/library.md promises it; a test checks it."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deprecation:
    """A public name or argument that goes.

    Example:
        >>> Deprecation("Build.run", since="1.2", removed_in="1.4", instead="Build.__call__")
        Deprecation(name='Build.run', since='1.2', removed_in='1.4', instead='Build.__call__')
    """

    name: str
    since: str
    """The first version that warns."""
    removed_in: str
    """The first version without it: at least one minor version after `since`."""
    instead: str
    """The name or argument to use in its place."""


DEPRECATIONS: tuple[Deprecation, ...] = ()
"""All of them. Whoever deprecates something adds it here and calls `warn_deprecated` where it is used."""


def warn_deprecated(name: str, known: Iterable[Deprecation] = DEPRECATIONS) -> None:
    """Warns the caller's caller. Raises LookupError for a name that is not in the list."""
    entry = next((entry for entry in known if entry.name == name), None)
    if entry is None:
        raise LookupError(f"{name} is not in core.deprecation.DEPRECATIONS")
    warnings.warn(
        f"{name} is deprecated since {entry.since} and will be removed in {entry.removed_in}; use {entry.instead}",
        DeprecationWarning,
        stacklevel=3,
    )
